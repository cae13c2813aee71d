# engram_options: the compile options of everything in native/.
# No -march=native: a build must run on any machine of its architecture, so faster variants of a function are chosen at
# run time, in the code. Frame pointers stay, so that perf and sanitizers give whole stacks at next to no cost.
add_library(engram_options INTERFACE)
target_compile_options(engram_options INTERFACE -Wall -Wextra -fno-omit-frame-pointer -fno-plt)
# Sanitizers confuse GCC's flow warnings, so the ordinary build alone is held to them.
if(ENGRAM_WERROR AND NOT ENGRAM_SANITIZE)
  target_compile_options(engram_options INTERFACE -Werror)
endif()
target_link_libraries(engram_options INTERFACE Threads::Threads)
# CMake's RelWithDebInfo is -O2 -g -DNDEBUG.

if(ENGRAM_SANITIZE STREQUAL "address")
  set(sanitize_flags -fsanitize=address,undefined -fno-sanitize-recover=all)
elseif(ENGRAM_SANITIZE STREQUAL "thread")
  # GCC's thread sanitizer sees memcpy and friends only where they are real calls, hence -fno-builtin.
  # It does not see fences at all, and says so: that warning stays an error.
  set(sanitize_flags -fsanitize=thread -fno-builtin -Werror=tsan)
elseif(ENGRAM_SANITIZE STREQUAL "fuzz")
  # clang alone: coverage for libFuzzer, beside the address and undefined-behaviour checks.
  set(sanitize_flags -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
elseif(ENGRAM_SANITIZE)
  message(FATAL_ERROR "ENGRAM_SANITIZE is '${ENGRAM_SANITIZE}': use address, thread, fuzz, or leave it empty.")
endif()
if(ENGRAM_SANITIZE)
  # For every target, the generated module sources too: all parts of one module must agree.
  add_compile_options(${sanitize_flags} -O1)
  add_link_options(${sanitize_flags})
endif()
