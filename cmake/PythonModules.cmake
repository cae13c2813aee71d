# engram_python_module(MODULE package.name FOLDER dir LIBRARY target HEADERS a.h ... [FAULTS])
#
# FAULTS: a second build of the module with the fault seam inside (native/io/fault_reader.h), left in faults/ of the build
# folder and never installed.
#
# Builds a cffi module in API mode: the sections between cdef-begin and cdef-end of each header become the module's
# declarations, and the C compiler checks every size and offset against the same headers. So Python and C++ share one
# definition of each layout.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)

# cffi keeps to the limited API, so one build serves every later Python; free-threaded Pythons have no such interface.
if(Python_SOABI MATCHES "^cpython-[0-9]+t")
  set(module_suffix ".${Python_SOABI}.so")
else()
  set(module_suffix ".abi3.so")
endif()

# zig's linker does not know the usual way, but takes a version script.
include(CheckLinkerFlag)
check_linker_flag(CXX "-Wl,--exclude-libs,ALL" ENGRAM_HAS_EXCLUDE_LIBS)
if(ENGRAM_HAS_EXCLUDE_LIBS)
  set(hide_archives -Wl,--exclude-libs,ALL)
else()
  set(hide_archives -Wl,--version-script=${CMAKE_SOURCE_DIR}/cmake/python_module.map)
endif()

add_custom_target(engram_modules)

function(engram_python_module)
  cmake_parse_arguments(ARG "FAULTS" "MODULE;FOLDER;LIBRARY" "HEADERS" ${ARGN})
  string(REPLACE "." ";" parts ${ARG_MODULE})
  list(GET parts 0 package)
  list(GET parts 1 name)
  set(target ${package}${name}_module)
  if(ARG_FAULTS)
    string(APPEND target "_faults")
  endif()
  set(generated ${CMAKE_BINARY_DIR}/generated/${target})
  set(extract ${CMAKE_SOURCE_DIR}/tools/extract_cdef.py)
  set(headers)
  set(prelude)
  foreach(header ${ARG_HEADERS})
    list(APPEND headers ${CMAKE_SOURCE_DIR}/native/include/engram/${header})
    string(APPEND prelude "#include \"engram/${header}\"\n")
  endforeach()
  file(CONFIGURE OUTPUT ${generated}.prelude.h CONTENT "${prelude}" @ONLY)
  add_custom_command(
    OUTPUT ${generated}.c
    COMMAND ${Python_EXECUTABLE} ${extract} --output ${generated}.cdef.h ${headers}
    COMMAND sh -c "exec \"$@\" >/dev/null" sh # it says that it generates; what goes wrong is on stderr
            ${Python_EXECUTABLE} -m cffi.gen_src read-sources ${ARG_MODULE} ${generated}.cdef.h ${generated}.prelude.h
            ${generated}.c
    DEPENDS ${extract} ${headers} ${generated}.prelude.h
    COMMENT "Generating the source of ${ARG_MODULE}"
    VERBATIM)
  Python_add_library(${target} MODULE ${generated}.c)
  if(ARG_FAULTS)
    # Objects come before archives, so the archive's own side of the seam is never taken.
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:engram_faults>)
  endif()
  # The generated C is not held to -Wextra -Werror, hence only the library's include folders and link line.
  target_link_libraries(${target} PRIVATE ${ARG_LIBRARY})
  target_compile_options(${target} PRIVATE -Wno-error -Wno-extra -Wno-unused-parameter -Wno-missing-field-initializers)
  # Nothing but the module's init function is visible: two modules with the same library inside never mix.
  target_link_options(${target} PRIVATE ${hide_archives} -Wl,-z,now -Wl,--gc-sections)
  if(ARG_FAULTS)
    set(folder ${CMAKE_BINARY_DIR}/faults/${package})
  elseif(ENGRAM_INPLACE)
    set(folder ${CMAKE_SOURCE_DIR}/${ARG_FOLDER})
  else()
    set(folder ${CMAKE_BINARY_DIR}/python/${package})
  endif()
  set_target_properties(
    ${target} PROPERTIES PREFIX "" OUTPUT_NAME ${name} SUFFIX ${module_suffix} LINKER_LANGUAGE CXX
                         LIBRARY_OUTPUT_DIRECTORY ${folder})
  add_dependencies(engram_modules ${target})
  if(NOT ARG_FAULTS)
    install(TARGETS ${target} LIBRARY DESTINATION ${package} COMPONENT python)
  endif()
endfunction()

set(engine_headers wire.h hash.h pages.h engine.h simulate.h sampling.h measure.h numa.h bench.h)
if(NOT ENGRAM_CLIENT_ONLY)
  engram_python_module(
    MODULE engramd._engine FOLDER engramd LIBRARY engram_native
    HEADERS ${engine_headers})
endif()
engram_python_module(
  MODULE engram_client._native FOLDER client/engram_client LIBRARY engram_client_native
  HEADERS wire.h hash.h client.h)
if(ENGRAM_FAULTS)
  engram_python_module(
    MODULE engramd._engine FOLDER engramd LIBRARY engram_native FAULTS
    HEADERS ${engine_headers})
endif()
