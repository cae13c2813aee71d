#include "ring/error.h"

#include <cstdarg>
#include <cstdio>

namespace engram {

int fail(engram_error* error, int status, int error_number, const char* format, ...) {
  if (error == nullptr) return status;
  *error = {};
  error->status = status;
  error->error_number = error_number;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error->text, sizeof error->text, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace engram
