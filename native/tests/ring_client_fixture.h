// What tests of the ring client share: the layer that the double of the daemon serves, its rows, and a client of it.
#pragma once
#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "engram/client.h"
#include "fake_daemon.h"

namespace engram::testing {

inline const engram_layer kLayer{kHandle, kRowBytes, kValueBytes, 0, kRows};

struct Client {
  explicit Client(const FakeDaemon& daemon, uint32_t timeout_ms = 2000, uint32_t flags = 0) {
    const engram_connect_options options{0, timeout_ms, -1, "test", flags, 0};
    session = engram_connect(daemon.path.c_str(), &options, &error);
  }
  ~Client() { engram_session_free(session); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  int64_t submit(const std::vector<int64_t>& ids, int32_t wait_ms = 1000, uint32_t layout = ENGRAM_LAYOUT_PACKED) {
    return engram_submit(session, &kLayer, ids.data(), 8, ids.size(), layout, wait_ms, &error);
  }
  const uint8_t* wait(int64_t ticket, int32_t timeout_ms = 2000) {
    return static_cast<const uint8_t*>(engram_wait(session, ticket, timeout_ms, &error));
  }
  engram_session_usage usage() {
    engram_session_usage usage;
    engram_session_read_usage(session, &usage);
    return usage;
  }
  engram_error error{};
  engram_session* session = nullptr;
};

inline bool rows_match(const uint8_t* rows, const std::vector<int64_t>& ids) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    for (uint64_t j = 0; j < kRowBytes; ++j) {
      if (rows[i * kRowBytes + j] != row_byte(ids[i], j)) return false;
    }
  }
  return true;
}

// A fetch of `ids` in packed layout, or, where there is room for scales, in split layout. The vector must outlive it.
inline engram_fetch fetch_of(const std::vector<int64_t>& ids, uint8_t* rows, uint8_t* scales = nullptr) {
  engram_fetch fetch{};
  fetch.layer = &kLayer;
  fetch.ids = ids.data();
  fetch.rows = rows;
  fetch.scales = scales;
  fetch.row_count = ids.size();
  fetch.id_bytes = 8;
  fetch.layout = scales != nullptr ? ENGRAM_LAYOUT_SPLIT : ENGRAM_LAYOUT_PACKED;
  fetch.operation = ENGRAM_OPERATION_FETCH;
  return fetch;
}

inline std::vector<int64_t> some_ids(std::size_t count) {
  std::vector<int64_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = static_cast<int64_t>((i * 7919) % (kRows + 1)) - 1;
  return ids;
}

template <typename Condition>
bool eventually(Condition condition) {
  for (int i = 0; i < 10'000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace engram::testing
