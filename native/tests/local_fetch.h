// Fetches as the daemon's event loop makes them: submitted with a tag, their completions taken when the eventfd says
// so.
#pragma once

#include <poll.h>

#include "engine_fixture.h"

namespace engram_test {

// A completion with the rows in its keeping.
struct Completion {
  std::uint64_t tag = 0;
  engram_failure failure{};
  std::unique_ptr<std::uint8_t, decltype(&engram_rows_free)> rows{nullptr, engram_rows_free};
  std::uint64_t bytes = 0;
};

// Takes over what an engram_completion says.
inline Completion completion_of(const engram_completion& taken) {
  Completion completion;
  completion.tag = taken.tag;
  completion.failure = taken.failure;
  completion.rows.reset(taken.rows);
  completion.bytes = taken.bytes;
  return completion;
}

// Waits until there are some; takes all that are there. Empty where none comes in time.
inline std::vector<Completion> take_completions(engram_engine* engine, int timeout_ms = 20'000) {
  std::vector<Completion> taken;
  pollfd readable{engram_engine_completion_descriptor(engine), POLLIN, 0};
  if (poll(&readable, 1, timeout_ms) != 1) return taken;
  std::uint64_t count = 0;
  REQUIRE(read(readable.fd, &count, sizeof count) == sizeof count);
  engram_completion next{};
  while (engram_engine_next_completion(engine, &next) == 1) {
    taken.push_back(completion_of(next));
  }
  return taken;
}

// One request from its submission to its completion; *at_once: whether that came with the submission.
inline Completion fetch_local(engram_engine* engine, const engram_request& request,
                              const std::vector<std::int64_t>& ids, bool* at_once = nullptr) {
  engram_completion completion{};
  REQUIRE(engram_engine_submit(engine, &request, ids.data(), 77, &completion) == 0);
  if (at_once != nullptr) *at_once = completion.failure.status != ENGRAM_STATUS_EMPTY;
  if (completion.failure.status != ENGRAM_STATUS_EMPTY) {
    CHECK(completion.tag == 77);
    return completion_of(completion);
  }
  std::vector<Completion> taken = take_completions(engine);
  while (taken.empty()) taken = take_completions(engine);
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].tag == 77);
  return std::move(taken[0]);
}

}  // namespace engram_test
