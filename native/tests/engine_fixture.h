// What engine tests share: a packed table in a real file, an engine over it, and a bare client that writes its ring by
// hand (so that a test can also write what no correct client would).
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/mapping.h"
#include "common/unique_fd.h"
#include "engram/engine.h"
#include "engram/pages.h"
#include "ring/futex.h"

namespace engram_test {

// A table of synthetic rows in a file of its own, removed at the end.
class TableFile {
 public:
  explicit TableFile(std::uint64_t rows, std::uint32_t value_bytes = 256, std::uint32_t scale_bytes = 8,
                     std::uint32_t layer = 1) {
    format_.rows = rows;
    format_.layer = layer;
    format_.generation = 1;
    format_.row_bytes = value_bytes + scale_bytes;
    format_.value_bytes = value_bytes;
    std::memset(format_.table_id, 7, sizeof format_.table_id);
    const std::uint64_t per_page = engram_rows_per_page(format_.row_bytes);
    const std::uint64_t pages = (rows + per_page - 1) / per_page;
    const std::uint64_t page_bytes = engram_page_bytes(format_.row_bytes);
    std::vector<std::uint8_t> values(pages * per_page * value_bytes);
    std::vector<std::uint8_t> scales(pages * per_page * scale_bytes);
    REQUIRE(engram_synth_rows(kSeed, layer, 0, rows, value_bytes, 0, value_bytes, values.data()) == 0);
    if (scale_bytes != 0) {
      REQUIRE(engram_synth_rows(kSeed, layer, 0, rows, value_bytes, value_bytes, format_.row_bytes, scales.data()) ==
              0);
    }
    std::vector<std::uint8_t> bytes(pages * page_bytes);
    REQUIRE(engram_pages_encode(&format_, 0, pages, values.data(), scale_bytes != 0 ? scales.data() : nullptr,
                                bytes.data()) == 0);
    char path[] = "./engram-test-XXXXXX";  // not /tmp: it may be a tmpfs, which has no O_DIRECT
    engram::UniqueFd writer(mkstemp(path));
    path_ = path;
    REQUIRE(writer);
    REQUIRE(write(writer.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    REQUIRE(fsync(writer.get()) == 0);
    reader_.reset(open(path, O_RDONLY | O_DIRECT | O_CLOEXEC));
    if (!reader_) reader_.reset(open(path, O_RDONLY | O_CLOEXEC));
    REQUIRE(reader_);
  }
  ~TableFile() { unlink(path_.c_str()); }

  static constexpr std::uint64_t kSeed = 11;

  const engram_page_format& format() const { return format_; }
  const std::string& path() const { return path_; }
  std::uint64_t row_bytes() const { return format_.row_bytes; }

  std::vector<std::uint8_t> row(std::int64_t row) const {
    std::vector<std::uint8_t> bytes(format_.row_bytes);
    if (row >= 0) {
      engram_synth_rows(kSeed, format_.layer, static_cast<std::uint64_t>(row), 1, format_.value_bytes, 0,
                        format_.row_bytes, bytes.data());
    }
    return bytes;
  }

  engram_layer_options layer_options(const int* file) const {
    engram_layer_options options{};
    std::memcpy(options.table_id, format_.table_id, sizeof options.table_id);
    options.generation = format_.generation;
    options.rows = format_.rows;
    options.layer = format_.layer;
    options.row_bytes = format_.row_bytes;
    options.value_bytes = format_.value_bytes;
    options.stripe_pages = 4096;
    options.file_count = 1;
    options.files = file;
    return options;
  }
  int descriptor() const { return reader_.get(); }

 private:
  engram_page_format format_{};
  std::string path_;
  engram::UniqueFd reader_;
};

inline engram_engine_options small_options(std::uint64_t dram_bytes) {
  engram_engine_options options{};
  options.dram_bytes = dram_bytes;
  options.arena_bytes = 4 << 20;
  options.arena_limit_bytes = 256 << 20;
  options.session_limit = 16;
  options.slot_count = 16;
  options.workers = 1;
  return options;
}

class TestEngine {
 public:
  TestEngine(const std::vector<const TableFile*>& tables, const engram_engine_options& options) {
    char error[256] = "";
    engine_ = engram_engine_create(&options, error, sizeof error);
    INFO(error);
    REQUIRE(engine_ != nullptr);
    for (const TableFile* table : tables) {
      const int file = table->descriptor();
      const engram_layer_options layer = table->layer_options(&file);
      std::uint32_t handle = 0;
      const int added = engram_engine_add_layers(engine_, &layer, 1, nullptr, 0, &handle, error, sizeof error);
      INFO(error);
      REQUIRE(added == 0);
      handles.push_back(handle);
    }
    const int started = engram_engine_start(engine_, error, sizeof error);
    INFO(error);
    REQUIRE(started == 0);
  }
  ~TestEngine() { engram_engine_destroy(engine_); }
  TestEngine(const TestEngine&) = delete;
  TestEngine& operator=(const TestEngine&) = delete;

  engram_engine* get() const { return engine_; }
  engram_layer_counters counters(std::size_t index = 0) const {
    std::vector<engram_layer_counters> all(handles.size());
    engram_engine_layer_counters(engine_, all.data(), all.size());
    return all[index];
  }

  std::vector<std::uint32_t> handles;

 private:
  engram_engine* engine_ = nullptr;
};

// A whole request for rows in packed layout, whose ids of 8 bytes and reply lie at offset 0.
inline engram_request fetch_request(std::uint32_t handle, std::size_t row_count) {
  engram_request request{};
  request.operation = ENGRAM_OPERATION_FETCH;
  request.handle = handle;
  request.row_count = static_cast<std::uint32_t>(row_count);
  request.id_bytes = 8;
  request.part_count = 1;
  request.total_rows = row_count;
  return request;
}

// The client's half of a ring, as bare as can be: one caller, no allocation of ranges.
class BareClient {
 public:
  explicit BareClient(engram_engine* engine, std::uint32_t hello_flags = 0) : engine_(engine) {
    engram_session_descriptors descriptors{};
    char error[256] = "";
    const int opened = engram_engine_open_session(engine, getpid(), getuid(), 0, hello_flags, &welcome, &descriptors,
                                                  error, sizeof error);
    INFO(error);
    REQUIRE(opened == 0);
    ring_fd.reset(descriptors.ring);
    arena_fd.reset(descriptors.arena);
    doorbell_fd.reset(descriptors.doorbell);
    ring = engram::Mapping::map(ring_fd.get(), welcome.geometry.ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
    arena = engram::Mapping::map(arena_fd.get(), welcome.geometry.arena_bytes, PROT_READ, MAP_SHARED);
    state = engram::Mapping::map(engram_engine_state_descriptor(engine), welcome.state_bytes, PROT_READ, MAP_SHARED);
    REQUIRE(ring);
    REQUIRE(arena);
    REQUIRE(state);
    const int started = engram_engine_start_session(engine, welcome.session, error, sizeof error);
    INFO(error);
    REQUIRE(started == 0);
  }
  ~BareClient() { close(); }
  void close() {
    if (engine_ != nullptr) engram_engine_close_session(engine_, welcome.session);
    engine_ = nullptr;
  }

  engram_slot& slot(std::uint32_t number) {
    return reinterpret_cast<engram_slot*>(ring.data() + welcome.geometry.slots_offset)[number];
  }
  std::byte* ids() { return ring.data() + welcome.geometry.ids_offset; }
  const std::uint8_t* reply(std::uint64_t offset) const {
    return reinterpret_cast<const std::uint8_t*>(arena.data()) + offset;
  }

  void submit_only(std::uint32_t number) {
    auto* block = reinterpret_cast<engram_submit_block*>(ring.data() + welcome.geometry.submit_offset);
    auto* entries = reinterpret_cast<std::uint32_t*>(block + 1);
    std::atomic_ref(entries[tail_ % welcome.geometry.slot_count]).store(number, std::memory_order_relaxed);
    set_tail(++tail_);
  }
  void set_tail(std::uint32_t tail) {
    auto* block = reinterpret_cast<engram_submit_block*>(ring.data() + welcome.geometry.submit_offset);
    std::atomic_ref(block->submit_tail).store(tail, std::memory_order_seq_cst);
    auto* page = reinterpret_cast<engram_state*>(state.data());
    if (std::atomic_ref(page->worker_asleep[welcome.worker]).load(std::memory_order_seq_cst) != 0) ring_doorbell();
  }
  void ring_doorbell() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(doorbell_fd.get(), &one, sizeof one);
  }

  void prepare(std::uint32_t number, std::uint32_t handle, const std::vector<std::int64_t>& row_ids,
               std::uint64_t ids_offset, std::uint64_t reply_offset, std::uint16_t layout = ENGRAM_LAYOUT_PACKED,
               std::uint32_t operation = ENGRAM_OPERATION_FETCH) {
    engram_request request = fetch_request(handle, row_ids.size());
    request.operation = operation;
    request.layout = layout;
    request.ids_offset = ids_offset;
    request.reply_offset = reply_offset;
    prepare(number, request, row_ids);
  }
  void prepare(std::uint32_t number, const engram_request& request, const std::vector<std::int64_t>& row_ids) {
    if (!row_ids.empty()) std::memcpy(ids() + request.ids_offset, row_ids.data(), row_ids.size() * 8);
    slot(number).request = request;
    std::atomic_ref(slot(number).reply.completion).store(0, std::memory_order_relaxed);
    std::atomic_ref(slot(number).waiting).store(0, std::memory_order_relaxed);
  }

  // Sleeps on the completion word as a real client does; 0 after the deadline.
  std::uint32_t wait(std::uint32_t number, double timeout_s = 20) {
    const auto deadline = engram::monotonic_ns() + static_cast<std::int64_t>(timeout_s * 1e9);
    std::atomic_ref completion(slot(number).reply.completion);
    std::atomic_ref(slot(number).waiting).store(1, std::memory_order_seq_cst);
    while (true) {
      const std::uint32_t status = completion.load(std::memory_order_seq_cst);
      if (status != 0 || engram::monotonic_ns() > deadline) return status;
      engram::futex_wait(&slot(number).reply.completion, 0, 20'000'000, engram::FutexScope::kShared);
    }
  }

  std::uint32_t fetch(std::uint32_t handle, const std::vector<std::int64_t>& row_ids,
                      std::uint16_t layout = ENGRAM_LAYOUT_PACKED) {
    prepare(0, handle, row_ids, 0, 0, layout);
    submit_only(0);
    return wait(0);
  }

  engram_welcome welcome{};
  engram::UniqueFd ring_fd;
  engram::UniqueFd arena_fd;
  engram::UniqueFd doorbell_fd;
  engram::Mapping ring;
  engram::Mapping arena;
  engram::Mapping state;

 private:
  engram_engine* engine_;
  std::uint32_t tail_ = 0;
};

// True where the reply holds exactly the rows.
inline bool reply_is(const TableFile& table, const std::uint8_t* reply, const std::vector<std::int64_t>& ids) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::vector<std::uint8_t> row = table.row(ids[i]);
    if (std::memcmp(reply + i * row.size(), row.data(), row.size()) != 0) return false;
  }
  return true;
}

template <typename Condition>
bool eventually(Condition&& condition, double timeout_s = 20) {
  const auto deadline = engram::monotonic_ns() + static_cast<std::int64_t>(timeout_s * 1e9);
  while (!condition()) {
    if (engram::monotonic_ns() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Sessions' memory is freed in the background. Waits until fewer than `limit` sessions hold some.
inline bool sessions_fall_below(engram_engine* engine, std::uint64_t limit) {
  return eventually([&] {
    engram_engine_counters counters{};
    engram_engine_read_counters(engine, &counters);
    return counters.arena_count < limit;
  });
}

inline bool all_sessions_are_freed(engram_engine* engine) {
  return eventually([&] {
    engram_engine_counters counters{};
    engram_engine_read_counters(engine, &counters);
    return counters.arena_count == 0 && counters.arena_bytes == 0;
  });
}

// The next event that tells of a session's violation; what else the engine says is passed over.
inline engram_event next_violation(engram_engine* engine) {
  engram_event event{};
  REQUIRE(eventually(
      [&] { return engram_engine_next_event(engine, &event) == 1 && event.kind == ENGRAM_EVENT_VIOLATION; }));
  return event;
}

}  // namespace engram_test
