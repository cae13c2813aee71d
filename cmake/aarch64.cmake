# Toolchain file: builds for aarch64 on a Debian machine of another architecture. The tests then run under qemu-user.
# LIBURING_FOLDER holds the arm64 build of liburing-dev, unpacked (tools/fetch_aarch64_libraries.sh). `make aarch64`.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# The emulator maps memory in pages of 64 KiB, as the kernels of large aarch64 machines do: 4 KiB is what all other tests
# have. It knows no io_uring, so the engine reads by its pool of pread threads there. Its dynamic loading is faulty with
# such pages (libstdc++ alone crashes), hence programs that bring their libraries along.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-p;65536)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
# Programs of this machine; libraries of the other one. Headers without code (doctest) may come from either.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE BOTH)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LIBURING_FOLDER)
set(LIBURING_INCLUDE_DIR ${LIBURING_FOLDER}/usr/include CACHE PATH "arm64")
set(LIBURING_STATIC_LIBRARY ${LIBURING_FOLDER}/usr/lib/aarch64-linux-gnu/liburing.a CACHE FILEPATH "arm64")
