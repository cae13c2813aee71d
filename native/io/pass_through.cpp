// The seam of an ordinary module: nothing is injected. In a fault build fault_reader.cpp takes this file's place.
#include <unistd.h>

#include "io/fault_reader.h"

namespace engram {

bool prepare_faults(std::string&) {
  return true;
}

std::unique_ptr<PageReader> with_faults(std::unique_ptr<PageReader> reader, const PageBuffers&) {
  return reader;
}

ssize_t faulty_pread(int file, void* buffer, std::size_t bytes, off_t offset) {
  return pread(file, buffer, bytes, offset);
}

std::string fault_report() {
  return {};
}

}  // namespace engram
