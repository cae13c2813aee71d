// Fuzzes the ring parser behind a real engine: each input is what one hostile client does in one session. It writes
// anywhere in its ring, moves its tail, submits requests whose fields come from the input, rings, and hangs up. After
// each input an honest client of the same worker fetches rows and compares them: a wrong row, a crash, a sanitizer's
// report or a hang ends the run.
#include <fcntl.h>
#include <fuzzer/FuzzedDataProvider.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "common/mapping.h"
#include "common/unique_fd.h"
#include "engram/engine.h"
#include "engram/pages.h"
#include "ring/futex.h"

namespace {

constexpr std::uint64_t kRows = 900;
constexpr std::uint32_t kRowBytes = 264;
constexpr std::uint32_t kValueBytes = 256;
constexpr std::uint64_t kSeed = 5;
constexpr std::int64_t kDeadlineNs = 20'000'000'000;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "fuzz_ring: %s\n", what);
  std::abort();
}

void check(bool good, const char* what) {
  if (!good) fail(what);
}

template <typename Condition>
void wait_until(Condition&& condition, const char* what) {
  const std::int64_t deadline = engram::monotonic_ns() + kDeadlineNs;
  while (!condition()) {
    if (engram::monotonic_ns() > deadline) fail(what);
    sched_yield();
  }
}

engram_layer_options write_table(std::uint32_t layer, int* file) {
  engram_page_format format{};
  std::memset(format.table_id, 7, sizeof format.table_id);
  format.generation = 1;
  format.rows = kRows;
  format.layer = layer;
  format.row_bytes = kRowBytes;
  format.value_bytes = kValueBytes;
  const std::uint64_t per_page = engram_rows_per_page(kRowBytes);
  const std::uint64_t pages = (kRows + per_page - 1) / per_page;
  std::vector<std::uint8_t> values(pages * per_page * kValueBytes);
  std::vector<std::uint8_t> scales(pages * per_page * (kRowBytes - kValueBytes));
  engram_synth_rows(kSeed, layer, 0, kRows, kValueBytes, 0, kValueBytes, values.data());
  engram_synth_rows(kSeed, layer, 0, kRows, kValueBytes, kValueBytes, kRowBytes, scales.data());
  std::vector<std::uint8_t> bytes(pages * engram_page_bytes(kRowBytes));
  check(engram_pages_encode(&format, 0, pages, values.data(), scales.data(), bytes.data()) == 0, "encode");
  char path[] = "/tmp/engram-fuzz-XXXXXX";
  engram::UniqueFd writer(mkstemp(path));
  check(writer && write(writer.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "table file");
  *file = open(path, O_RDONLY | O_CLOEXEC);
  unlink(path);
  engram_layer_options options{};
  std::memcpy(options.table_id, format.table_id, sizeof options.table_id);
  options.generation = 1;
  options.rows = kRows;
  options.layer = layer;
  options.row_bytes = kRowBytes;
  options.value_bytes = kValueBytes;
  options.stripe_pages = 16;
  options.file_count = 1;
  options.files = file;
  return options;
}

class Client {
 public:
  explicit Client(engram_engine* engine) : engine_(engine) {
    engram_session_descriptors descriptors{};
    char error[256] = "";
    // Sessions that have ended are freed in the background; the limit is reached now and then.
    wait_until(
        [&] {
          return engram_engine_open_session(engine, 1, 0, 64 << 10, 0, &welcome, &descriptors, error, sizeof error) ==
                 0;
        },
        "sessions are not freed");
    ring_fd_.reset(descriptors.ring);
    arena_fd_.reset(descriptors.arena);
    doorbell_.reset(descriptors.doorbell);
    ring = engram::Mapping::map(descriptors.ring, welcome.geometry.ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
    arena = engram::Mapping::map(descriptors.arena, welcome.geometry.arena_bytes, PROT_READ, MAP_SHARED);
    check(ring && arena, "mapping");
    check(engram_engine_start_session(engine, welcome.session, error, sizeof error) == 0, error);
  }
  ~Client() { engram_engine_close_session(engine_, welcome.session); }

  engram_slot& slot(std::uint32_t number) {
    return reinterpret_cast<engram_slot*>(ring.data() + welcome.geometry.slots_offset)[number];
  }
  engram_submit_block* block() {
    return reinterpret_cast<engram_submit_block*>(ring.data() + welcome.geometry.submit_offset);
  }
  void submit(std::uint32_t number) {
    auto* entries = reinterpret_cast<std::uint32_t*>(block() + 1);
    std::atomic_ref(entries[tail & (welcome.geometry.slot_count - 1)]).store(number);
    std::atomic_ref(block()->submit_tail).store(++tail);
  }
  void knock() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(doorbell_.get(), &one, sizeof one);
  }
  std::uint32_t completion(std::uint32_t number) { return std::atomic_ref(slot(number).reply.completion).load(); }

  engram_welcome welcome{};
  engram::Mapping ring;
  engram::Mapping arena;
  std::uint32_t tail = 0;

 private:
  engram_engine* engine_;
  engram::UniqueFd ring_fd_;
  engram::UniqueFd arena_fd_;
  engram::UniqueFd doorbell_;
};

struct World {
  engram_engine* engine = nullptr;
  std::unique_ptr<Client> honest;
  std::uint64_t rounds = 0;
};

World* make_world() {
  auto* world = new World;
  engram_engine_options options{};
  options.dram_bytes = 60'000;
  options.arena_bytes = 64 << 10;
  options.arena_limit_bytes = 64 << 20;
  options.session_limit = 32;
  options.slot_count = 16;
  options.workers = 1;
  options.in_flight_cap = 16;
  options.reader = std::getenv("FUZZ_PREAD") != nullptr ? ENGRAM_READER_PREAD : ENGRAM_READER_AUTO;
  char error[256] = "";
  world->engine = engram_engine_create(&options, error, sizeof error);
  check(world->engine != nullptr, error);
  for (std::uint32_t layer = 1; layer <= 2; ++layer) {
    int file = -1;
    const engram_layer_options table = write_table(layer, &file);
    std::uint32_t handle = 0;
    check(engram_engine_add_layers(world->engine, &table, 1, nullptr, 0, &handle, error, sizeof error) == 0, error);
    close(file);
  }
  check(engram_engine_start(world->engine, error, sizeof error) == 0, error);
  world->honest = std::make_unique<Client>(world->engine);
  return world;
}

void close_violators(engram_engine* engine) {
  engram_event event;
  while (engram_engine_next_event(engine, &event) == 1) {
    if (event.kind == ENGRAM_EVENT_VIOLATION) engram_engine_close_session(engine, event.session);
  }
}

// An honest client's fetch: exact, whatever the others do.
void fetch_honestly(World& world) {
  Client& client = *world.honest;
  const std::uint32_t layer = 1 + world.rounds % 2;
  const std::int64_t ids[4] = {static_cast<std::int64_t>(world.rounds * 131 % kRows), -1, 7,
                               static_cast<std::int64_t>(world.rounds * 31 % kRows)};
  ++world.rounds;
  std::memcpy(client.ring.data() + client.welcome.geometry.ids_offset, ids, sizeof ids);
  engram_request request{};
  request.operation = ENGRAM_OPERATION_FETCH;
  request.handle = layer;
  request.row_count = 4;
  request.id_bytes = 8;
  request.part_count = 1;
  request.total_rows = 4;
  client.slot(0).request = request;
  std::atomic_ref(client.slot(0).reply.completion).store(0u);
  client.submit(0);
  client.knock();
  wait_until([&] { return client.completion(0) != 0; }, "an honest client is not answered");
  check(client.completion(0) == ENGRAM_STATUS_OK, "an honest client gets an error");
  for (int i = 0; i < 4; ++i) {
    std::uint8_t expected[kRowBytes] = {};
    if (ids[i] >= 0) {
      engram_synth_rows(kSeed, layer, static_cast<std::uint64_t>(ids[i]), 1, kValueBytes, 0, kRowBytes, expected);
    }
    check(std::memcmp(reinterpret_cast<const std::uint8_t*>(client.arena.data()) + i * kRowBytes, expected,
                      kRowBytes) == 0,
          "a wrong row");
  }
}

std::uint64_t odd_number(FuzzedDataProvider& input, std::uint64_t usual) {
  switch (input.ConsumeIntegralInRange(0, 5)) {
    case 0:
      return input.ConsumeIntegral<std::uint64_t>();
    case 1:
      return ~std::uint64_t{0} - input.ConsumeIntegralInRange<std::uint64_t>(0, 64);
    case 2:
      return input.ConsumeIntegral<std::uint16_t>();
    default:
      return usual;
  }
}

void submit_request(FuzzedDataProvider& input, Client& client) {
  const std::uint32_t number = input.ConsumeIntegralInRange(0u, client.welcome.geometry.slot_count);
  engram_request request{};
  request.operation = input.ConsumeIntegralInRange(0u, 3u);
  request.handle = input.ConsumeIntegralInRange(0u, 3u);
  request.row_count = static_cast<std::uint32_t>(odd_number(input, input.ConsumeIntegralInRange(0u, 300u)));
  request.id_bytes = static_cast<std::uint16_t>(odd_number(input, 8));
  request.layout = static_cast<std::uint16_t>(odd_number(input, input.ConsumeIntegralInRange(0u, 1u)));
  request.ids_offset = odd_number(input, 0);
  request.reply_offset = odd_number(input, input.ConsumeIntegralInRange(0u, 1u) * 64);
  request.request_id = input.ConsumeIntegralInRange(0u, 3u);
  request.part_index = static_cast<std::uint32_t>(odd_number(input, 0));
  request.part_count = static_cast<std::uint32_t>(odd_number(input, 1));
  request.total_rows = odd_number(input, request.row_count);
  request.flags = static_cast<std::uint32_t>(odd_number(input, input.ConsumeIntegralInRange(0u, 1u)));
  request.reserved = input.ConsumeBool() ? 0 : static_cast<std::uint32_t>(odd_number(input, 0));
  if (number < client.welcome.geometry.slot_count) client.slot(number).request = request;
  client.submit(number);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static World* world = make_world();
  FuzzedDataProvider input(data, size);
  {
    Client client(world->engine);
    for (int step = 0; step < 24 && input.remaining_bytes() > 0; ++step) {
      switch (input.ConsumeIntegralInRange(0, 7)) {
        case 0: {
          const std::vector<std::uint8_t> bytes = input.ConsumeBytes<std::uint8_t>(input.ConsumeIntegralInRange(1, 64));
          const std::uint64_t place = input.ConsumeIntegralInRange<std::uint64_t>(0, client.ring.bytes() - 64);
          if (!bytes.empty()) std::memcpy(client.ring.data() + place, bytes.data(), bytes.size());
          break;
        }
        case 1:
          client.tail += static_cast<std::uint32_t>(odd_number(input, 1));
          std::atomic_ref(client.block()->submit_tail).store(client.tail);
          break;
        case 2: {
          // Ids, a good many of them right.
          std::int64_t ids[32];
          for (std::int64_t& id : ids)
            id = static_cast<std::int64_t>(odd_number(input, input.ConsumeIntegral<std::uint8_t>()));
          std::memcpy(client.ring.data() + client.welcome.geometry.ids_offset, ids, sizeof ids);
          break;
        }
        case 3:
          client.knock();
          break;
        case 4: {
          // Time for the worker, not more than that: nothing need come of it.
          const std::int64_t until = engram::monotonic_ns() + 50'000;
          while (engram::monotonic_ns() < until) sched_yield();
          break;
        }
        default:
          submit_request(input, client);
      }
    }
    client.knock();
    fetch_honestly(*world);
  }
  close_violators(world->engine);
  return 0;
}
