# libengram_client: the ring client and the hash for C and C++ programs (client/include/engram_client.h), with a
# pkg-config file. Its ABI is what engram/client.h and engram/hash.h declare, and nothing else is exported.
set(ENGRAM_CLIENT_ABI 0)
file(STRINGS ${CMAKE_SOURCE_DIR}/engramd/__init__.py version_line REGEX "^__version__ = ")
string(REGEX REPLACE ".*\"([^\"]+)\".*" "\\1" ENGRAM_VERSION "${version_line}")
include(GNUInstallDirs)

file(GLOB client_library_sources CONFIGURE_DEPENDS native/common/*.cpp native/ring/*.cpp native/hash/*.cpp)
# Compiled once more, since the Python modules hide every symbol.
add_library(engram_client SHARED ${client_library_sources})
set_target_properties(engram_client PROPERTIES CXX_VISIBILITY_PRESET default VISIBILITY_INLINES_HIDDEN ON
                      VERSION ${ENGRAM_CLIENT_ABI}.1 SOVERSION ${ENGRAM_CLIENT_ABI})
target_include_directories(engram_client PRIVATE native native/include)
target_link_libraries(engram_client PRIVATE engram_options)
target_link_options(engram_client PRIVATE -Wl,--version-script,${CMAKE_SOURCE_DIR}/cmake/engram_client.map
                    -Wl,--no-undefined -Wl,--gc-sections)
set_target_properties(engram_client PROPERTIES LINK_DEPENDS ${CMAKE_SOURCE_DIR}/cmake/engram_client.map)

configure_file(cmake/engram-client.pc.in ${CMAKE_BINARY_DIR}/engram-client.pc @ONLY)
install(TARGETS engram_client LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT client)
install(FILES client/include/engram_client.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT client)
install(FILES native/include/engram/wire.h native/include/engram/client.h native/include/engram/hash.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/engram COMPONENT client)
install(FILES ${CMAKE_BINARY_DIR}/engram-client.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT client)
