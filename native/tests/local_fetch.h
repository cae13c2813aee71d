// Fetches as the daemon's event loop makes them: submitted with a tag, their completions taken when the eventfd says
// so.
#pragma once

#include <poll.h>

#include "engine_fixture.h"

namespace engram_test {

inline engram_request local_request(std::uint32_t handle, std::size_t count,
                                    std::uint32_t operation = ENGRAM_OPERATION_FETCH) {
  engram_request request{};
  request.operation = operation;
  request.handle = handle;
  request.row_count = static_cast<std::uint32_t>(count);
  request.id_bytes = 8;
  request.part_count = 1;
  return request;
}

// A completion with the rows in its keeping.
struct Completion {
  std::uint64_t tag = 0;
  engram_failure failure{};
  std::unique_ptr<std::uint8_t, decltype(&engram_rows_free)> rows{nullptr, engram_rows_free};
  std::uint64_t bytes = 0;
};

// Waits until there are some; takes all that are there. Empty where none comes in time.
inline std::vector<Completion> take_completions(engram_engine* engine, int timeout_ms = 20'000) {
  std::vector<Completion> taken;
  pollfd readable{engram_engine_completion_descriptor(engine), POLLIN, 0};
  if (poll(&readable, 1, timeout_ms) != 1) return taken;
  std::uint64_t count = 0;
  REQUIRE(read(readable.fd, &count, sizeof count) == sizeof count);
  engram_completion next{};
  while (engram_engine_next_completion(engine, &next) == 1) {
    taken.emplace_back();
    taken.back().tag = next.tag;
    taken.back().failure = next.failure;
    taken.back().rows.reset(next.rows);
    taken.back().bytes = next.bytes;
  }
  return taken;
}

// One fetch from its submission to its completion.
inline Completion fetch_local(engram_engine* engine, const engram_request& request,
                              const std::vector<std::int64_t>& ids) {
  REQUIRE(engram_engine_submit(engine, &request, ids.data(), 77) == 0);
  std::vector<Completion> taken = take_completions(engine);
  while (taken.empty()) taken = take_completions(engine);
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].tag == 77);
  return std::move(taken[0]);
}

}  // namespace engram_test
