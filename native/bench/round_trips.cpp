// Round trips of small batches as a C or C++ server sees them.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <vector>

#include "engram/bench.h"
#include "engram/client.h"

namespace {

int fail(char* error, const engram_error& reason) {
  std::snprintf(error, 256, "%s", reason.text);
  return -1;
}

}  // namespace

int engram_bench_round_trips(const char* socket_path, uint32_t layer_index, const int64_t* ids, uint64_t batch_rows,
                             uint64_t batches, int32_t spin_us, uint32_t pause_us, double* seconds, char* error) {
  engram_error reason{};
  engram_connect_options options{};
  options.spin_us = spin_us;
  options.client_name = "engramd bench";
  engram_session* session = engram_connect(socket_path, &options, &reason);
  if (session == nullptr) return fail(error, reason);
  std::vector<engram_catalogue_record> records(layer_index + 1);
  int result = 0;
  if (engram_session_layers(session, records.data(), layer_index + 1) <= layer_index) {
    std::snprintf(error, 256, "there is no layer number %u", layer_index);
    result = -1;
  }
  const engram_catalogue_record& record = records[layer_index];
  const engram_layer layer{record.handle, record.row_bytes, record.value_bytes, 0, record.rows};
  for (std::uint64_t batch = 0; batch < batches && result == 0; ++batch) {
    if (pause_us != 0) usleep(pause_us);
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t ticket = engram_submit(session, &layer, ids + batch * batch_rows, sizeof(std::int64_t),
                                              batch_rows, ENGRAM_LAYOUT_PACKED, -1, &reason);
    const void* rows = ticket >= 0 ? engram_wait(session, ticket, 10'000, &reason) : nullptr;
    if (rows == nullptr) {
      result = fail(error, reason);
    } else {
      seconds[batch] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      engram_release(session, ticket);
    }
  }
  engram_session_free(session);
  return result;
}
