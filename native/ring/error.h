// How the ring client reports failures: it fills the caller's engram_error, where there is one.
#pragma once
#include "engram/client.h"

namespace engram {

// Sets status, errno and text, zeroes the rest; returns `status`. `error` may be null.
__attribute__((format(printf, 4, 5))) int fail(engram_error* error, int status, int error_number, const char* format,
                                               ...);

}  // namespace engram
