// The seam where disk faults come in. A daemon reads pages through with_faults() and faulty_pread(); what is behind
// them is decided when the module is linked. The ordinary module has pass_through.cpp: no fault, no cost. A fault build
// (ENGRAM_FAULTS=ON) has fault_reader.cpp, which obeys the environment variable ENGRAMD_FAULTS and says in log and
// statistics that it is there.
//
// ENGRAMD_FAULTS is a list `key=value,...`, or @FILE with such a list, which is read again whenever it changes:
//   seed=N                     of the random choices (default 1)
//   short eintr eagain         rate (0 .. 1) of reads cut short at a block, interrupted, refused
//   eio                        rate of reads that fail; eio_at=N: the Nth read of the process fails
//   flip                       rate of pages with a bit flipped in each 64 bytes
//   torn                       rate of pages whose second half is another page's
//   misdirected                rate of reads that deliver another page of the same file
//   layer                      rate of reads that deliver the page of another file that is served
//   stale                      rate of reads that deliver the page at the same place of stale_file=PATH
//   slow                       rate of reads that are held back for slow_ms=N (default 20)
//   lasting                    share of wrong pages that are wrong at the next read too; the others are right then
//                              (default 0)
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "io/page_reader.h"

namespace engram {

// Checks the fault list, once at start. False, with a sentence, where it makes no sense.
bool prepare_faults(std::string& error);

// The reader itself, or one that injects faults into it. Worker's thread, as for make_*_reader.
std::unique_ptr<PageReader> with_faults(std::unique_ptr<PageReader> reader, const PageBuffers& buffers);

// pread(2) for readers outside the workers: short, EINTR, EAGAIN, EIO and flipped bits alone.
ssize_t faulty_pread(int file, void* buffer, std::size_t bytes, off_t offset);

// In a fault build, "short=3 eintr=1 ...": how many faults of each kind have been injected; else empty.
std::string fault_report();

}  // namespace engram
