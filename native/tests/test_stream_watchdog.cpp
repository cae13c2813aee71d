// Lanes of the ring client and the watchdog that releases their streams, against a double of the daemon. The test is
// the stream: it rings the doorbell and looks at the completion word. Against the real daemon: tests/gpu.
#include <string>

#include "ring_client_fixture.h"

using namespace engram::testing;

namespace {

constexpr uint32_t kStreamSlots = 3;

FakeOptions with_streams() {
  FakeOptions options;
  options.stream_slot_count = kStreamSlots;
  return options;
}

// A lane and its words in the ring.
struct Lane {
  explicit Lane(Client& client, uint32_t row_count = 4, uint32_t deadline_ms = 60'000) : session(client.session) {
    engram_session_memory memory;
    engram_session_read_memory(session, &memory);
    status = engram_lane_open(session, &kLayer, row_count, 8, ENGRAM_LAYOUT_PACKED, deadline_ms, &lane, &client.error);
    if (status != 0) return;
    ring = static_cast<std::byte*>(memory.ring);
    rows = static_cast<const uint8_t*>(memory.arena) + lane.rows_offset;
  }
  ~Lane() { close(); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  void close() {
    if (status == 0) engram_lane_close(session, &lane);
    status = -1;
  }

  engram_slot& slot() const {
    return *reinterpret_cast<engram_slot*>(ring + lane.reply_line_offset - offsetof(engram_slot, reply));
  }
  uint32_t completion() const { return std::atomic_ref(slot().reply.completion).load(); }
  uint32_t lost() const { return std::atomic_ref(slot().stream_lost).load(); }
  void ring_doorbell() const { std::atomic_ref(slot().doorbell).store(1); }
  // What the stream does at the end of a use.
  void reset() const { std::atomic_ref(slot().reply.completion).store(0); }
  // One whole use; its status.
  uint32_t use(const std::vector<int64_t>& ids) const {
    std::memcpy(ring + lane.ids_offset, ids.data(), ids.size() * 8);
    ring_doorbell();
    if (!eventually([this] { return completion() != 0; })) return 0;
    return completion();
  }

  engram_session* session;
  engram_lane lane{};
  int status;
  std::byte* ring = nullptr;
  const uint8_t* rows = nullptr;
};

}  // namespace

TEST_CASE("a lane is used again and again, and its place handed out again") {
  FakeDaemon daemon(with_streams());
  Client client(daemon, 2000, ENGRAM_CONNECT_STREAM_SLOTS);
  REQUIRE(client.session != nullptr);
  for (int round = 0; round < 5; ++round) {
    Lane lane(client);
    REQUIRE(lane.status == 0);
    for (int64_t turn = 0; turn < 5; ++turn) {
      const std::vector<int64_t> ids{turn, -1, 999 - turn, round};
      REQUIRE(lane.use(ids) == ENGRAM_STATUS_OK);
      CHECK(rows_match(lane.rows, ids));
      lane.reset();
    }
    CHECK(client.usage().arena_bytes > 0);
    lane.close();
    CHECK(client.usage().arena_bytes == 0);
    CHECK(client.usage().ids_bytes == 0);
  }
}

TEST_CASE("what lanes refuse") {
  FakeDaemon daemon(with_streams());
  {
    Client client(daemon, 2000, ENGRAM_CONNECT_STREAM_SLOTS);
    Lane lanes[kStreamSlots] = {Lane(client), Lane(client), Lane(client)};
    for (const Lane& lane : lanes) REQUIRE(lane.status == 0);
    CHECK(Lane(client).status == ENGRAM_STATUS_BUSY);
    CHECK(std::string(client.error.text).find("3 stream slots") != std::string::npos);
    lanes[1].close();
    const uint64_t ids_bytes = client.usage().ids_bytes;
    CHECK(Lane(client, 4, 0).status == ENGRAM_CLIENT_ARGUMENT);
    CHECK(Lane(client, 1 << 20).status == ENGRAM_CLIENT_ARGUMENT);
    const auto most = static_cast<uint32_t>(engram_session_ticket_rows(client.session, kRowBytes));
    Lane large(client, most);
    REQUIRE(large.status == 0);
    large.close();
    CHECK(client.usage().ids_bytes == ids_bytes);
  }
  FakeDaemon without;
  Client client(without, 2000, ENGRAM_CONNECT_STREAM_SLOTS);
  CHECK(Lane(client).status == ENGRAM_CLIENT_ARGUMENT);
  CHECK(std::string(client.error.text).find("this daemon offers none") != std::string::npos);
}

TEST_CASE("whatever ends the session releases its streams, for good") {
  FakeDaemon daemon(with_streams());
  Client client(daemon, 2000, ENGRAM_CONNECT_STREAM_SLOTS);
  Lane waiting(client);
  Lane idle(client);
  REQUIRE(waiting.use({1, 2, 3, 4}) == ENGRAM_STATUS_OK);
  waiting.reset();
  daemon.hold = true;
  waiting.ring_doorbell();
  SUBCASE("the daemon is killed") {
    daemon.die();
  }
  SUBCASE("the daemon crashes") {
    daemon.crash();
  }
  SUBCASE("the daemon hangs up") {
    daemon.hang_up();
  }
  SUBCASE("the session is closed") {
    engram_session_close(client.session);
  }
  REQUIRE(eventually([&] { return waiting.completion() != 0; }));
  CHECK(waiting.completion() == ENGRAM_STATUS_LOST);
  CHECK(waiting.lost() == ENGRAM_STREAM_DAEMON_LOST);
  // Replays that come later pass too, and so do those of a lane that was at rest.
  for (int replay = 0; replay < 3; ++replay) {
    waiting.reset();
    waiting.ring_doorbell();
    CHECK(eventually([&] { return waiting.completion() == ENGRAM_STATUS_LOST; }));
  }
  idle.ring_doorbell();
  CHECK(eventually([&] { return idle.completion() == ENGRAM_STATUS_LOST; }));
  CHECK(idle.lost() == ENGRAM_STREAM_DAEMON_LOST);
  Lane late(client);
  CHECK(late.status != 0);
}

TEST_CASE("a use that takes too long loses its lane for good, and no other") {
  FakeDaemon daemon(with_streams());
  Client client(daemon, 2000, ENGRAM_CONNECT_STREAM_SLOTS);
  Lane lane(client, 4, 50);
  Lane other(client);
  daemon.hold = true;
  lane.ring_doorbell();
  REQUIRE(eventually([&] { return lane.completion() == ENGRAM_STATUS_LOST; }));
  CHECK(lane.lost() == ENGRAM_STREAM_DEADLINE);
  // The daemon answers at last: into a lane whose latch says that nothing of it counts.
  lane.reset();
  daemon.hold = false;
  CHECK(eventually([&] { return std::atomic_ref(lane.slot().reply.stream_completed).load() == 1; }));
  CHECK(lane.lost() == ENGRAM_STREAM_DEADLINE);
  CHECK(other.use({5, 6, 7, 8}) == ENGRAM_STATUS_OK);
  CHECK(other.lost() == 0);
  other.close();
  lane.close();
  // Its place is not handed out again: rows could still be written there.
  CHECK(client.usage().arena_bytes > 0);
  Lane again(client);
  REQUIRE(again.status == 0);
  CHECK(again.lane.slot != lane.lane.slot);
  CHECK(again.lane.rows_offset != lane.lane.rows_offset);
}

TEST_CASE("a lane at rest has no deadline, and each use has one of its own") {
  constexpr uint32_t kDeadlineMs = 2000;
  FakeDaemon daemon(with_streams());
  Client client(daemon, 2000, ENGRAM_CONNECT_STREAM_SLOTS);
  Lane idle(client, 4, 20);
  Lane busy(client, 4, kDeadlineMs);
  const auto begun = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begun < std::chrono::milliseconds(kDeadlineMs * 3 / 2)) {
    daemon.hold = true;
    busy.ring_doorbell();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK(busy.completion() == 0);
    daemon.hold = false;
    REQUIRE(eventually([&] { return busy.completion() == ENGRAM_STATUS_OK; }));
    busy.reset();
  }
  CHECK(busy.lost() == 0);
  CHECK(idle.lost() == 0);
  CHECK(idle.completion() == 0);
}

TEST_CASE("the watchdog asks for the worker's attention") {
  FakeDaemon daemon(with_streams());
  Client client(daemon, 2000, ENGRAM_CONNECT_STREAM_SLOTS);
  Lane lane(client);
  REQUIRE(eventually([&] { return !daemon.requests().empty(); }));
  const engram_request lease = daemon.requests().at(0);
  CHECK(lease.operation == ENGRAM_OPERATION_ARM_STREAMS);
  CHECK(lease.row_count == 0);
  CHECK(lease.total_rows == 10'000);
  daemon.set_asleep(true);
  daemon.doorbell_count();
  daemon.hold = true;
  lane.ring_doorbell();
  CHECK(eventually([&] { return daemon.doorbell_count() > 0; }));
}

TEST_CASE("a lane may be closed after its session was freed, where the session is retained") {
  FakeDaemon daemon(with_streams());
  engram_error error{};
  const engram_connect_options options{0, 2000, -1, "test", ENGRAM_CONNECT_STREAM_SLOTS, 0};
  engram_session* session = engram_connect(daemon.path.c_str(), &options, &error);
  REQUIRE(session != nullptr);
  engram_lane lane{};
  REQUIRE(engram_lane_open(session, &kLayer, 4, 8, ENGRAM_LAYOUT_PACKED, 1000, &lane, &error) == 0);
  engram_session_memory memory;
  engram_session_read_memory(session, &memory);
  engram_session_retain(session);
  daemon.hold = true;
  auto& slot = *reinterpret_cast<engram_slot*>(static_cast<std::byte*>(memory.ring) + lane.reply_line_offset -
                                               offsetof(engram_slot, reply));
  std::atomic_ref(slot.doorbell).store(1);
  engram_session_free(session);
  // A stream that waits is let go, since nobody looks after it any more.
  CHECK(std::atomic_ref(slot.reply.completion).load() == ENGRAM_STATUS_LOST);
  CHECK(std::atomic_ref(slot.stream_lost).load() == ENGRAM_STREAM_DAEMON_LOST);
  // The memory is still there, for whoever has it registered with a device.
  CHECK(reinterpret_cast<engram_ring_header*>(memory.ring)->magic == ENGRAM_RING_MAGIC);
  engram_lane_close(session, &lane);
  engram_session_drop(session);
}
