// GPU streams as the engine sees them: leases, doorbells, answers, and streams that misbehave.
#include <chrono>
#include <thread>

#include "engine_fixture.h"

using namespace engram_test;

namespace {

engram_request arm_request(std::uint64_t lease_ms) {
  engram_request request{};
  request.operation = ENGRAM_OPERATION_ARM_STREAMS;
  request.part_count = 1;
  request.total_rows = lease_ms;
  return request;
}

// A bare client with stream slots, in the place of both the host and the stream.
class StreamClient : public BareClient {
 public:
  explicit StreamClient(engram_engine* engine) : BareClient(engine, ENGRAM_HELLO_STREAM_SLOTS) {}

  std::uint32_t number(std::uint32_t index) const { return welcome.geometry.slot_count + index; }
  std::uint32_t arm(std::uint64_t lease_ms, std::uint32_t row_count = 0) {
    engram_request request = arm_request(lease_ms);
    request.row_count = row_count;
    prepare(0, request, {});
    submit_only(0);
    return wait(0);
  }
  void ring_stream(std::uint32_t index, std::uint32_t value = 1) {
    std::atomic_ref(slot(number(index)).doorbell).store(value, std::memory_order_seq_cst);
  }
  std::uint32_t use(std::uint32_t index, std::uint32_t handle, const std::vector<std::int64_t>& row_ids,
                    std::uint64_t reply_offset = 0) {
    prepare(number(index), handle, row_ids, std::uint64_t{index} * 1024, reply_offset);
    ring_stream(index);
    return wait(number(index));
  }
};

}  // namespace

TEST_CASE("a stream's doorbell is answered, from the cache and from the file") {
  const TableFile table(5000);
  for (const std::uint64_t dram_bytes : {0, 1 << 18, 1 << 22}) {
    TestEngine engine({&table}, small_options(dram_bytes));
    StreamClient client(engine.get());
    REQUIRE(client.welcome.geometry.stream_slot_count > 2);
    REQUIRE(client.arm(10'000) == ENGRAM_STATUS_OK);
    for (std::int64_t turn = 0; turn < 20; ++turn) {
      const auto index = static_cast<std::uint32_t>(turn % 3);
      const std::vector<std::int64_t> ids{turn * 7, -1, 4999 - turn, turn * 200};
      REQUIRE(client.use(index, engine.handles[0], ids, index * 4096) == ENGRAM_STATUS_OK);
      CHECK(reply_is(table, client.reply(index * 4096), ids));
      CHECK(client.slot(client.number(index)).doorbell == 0);
    }
    const engram_reply& reply = client.slot(client.number(0)).reply;
    CHECK(reply.stream_taken == 7);
    CHECK(reply.stream_completed == 7);
    CHECK(reply.stream_failed == 0);
  }
}

TEST_CASE("an error of a use names the id, and the next use is served") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 20));
  StreamClient client(engine.get());
  REQUIRE(client.arm(10'000) == ENGRAM_STATUS_OK);
  CHECK(client.use(1, engine.handles[0], {5, 6, 1000}) == ENGRAM_STATUS_ROW_ID);
  CHECK(client.slot(client.number(1)).reply.position == 2);
  CHECK(client.slot(client.number(1)).reply.row_id == 1000);
  CHECK(client.use(1, engine.handles[0], {5, 6, 7}) == ENGRAM_STATUS_OK);
  CHECK(reply_is(table, client.reply(0), {5, 6, 7}));
  CHECK(client.use(1, engine.handles[0] + 9, {5}) == ENGRAM_STATUS_UNKNOWN_TABLE);
  CHECK(client.slot(client.number(1)).reply.stream_completed == 3);
  CHECK(client.slot(client.number(1)).reply.stream_failed == 2);
}

TEST_CASE("streams come into play with the first lease") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 20));
  StreamClient client(engine.get());
  client.prepare(client.number(0), engine.handles[0], {1, 2}, 0, 0);
  client.ring_stream(0);
  client.ring_doorbell();
  CHECK(client.wait(client.number(0), 0.2) == 0);
  CHECK(client.fetch(engine.handles[0], {3}) == ENGRAM_STATUS_OK);
  CHECK(client.slot(client.number(0)).reply.completion == 0);
  REQUIRE(client.arm(10'000) == ENGRAM_STATUS_OK);
  CHECK(client.wait(client.number(0)) == ENGRAM_STATUS_OK);
}

TEST_CASE("after its lease a stream is late, not stuck") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 20));
  StreamClient client(engine.get());
  REQUIRE(client.arm(1) == ENGRAM_STATUS_OK);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  client.prepare(client.number(0), engine.handles[0], {1, 2}, 0, 0);
  client.ring_stream(0);
  client.ring_doorbell();  // what the client's watchdog does
  CHECK(client.wait(client.number(0)) == ENGRAM_STATUS_OK);
}

TEST_CASE("what makes no sense in a stream's request is refused, and the session lives on") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 20));
  StreamClient client(engine.get());
  CHECK(client.arm(1000, 1) == ENGRAM_STATUS_BAD_REQUEST);
  BareClient without(engine.get());
  without.prepare(0, arm_request(0), {});
  without.submit_only(0);
  CHECK(without.wait(0) == ENGRAM_STATUS_BAD_REQUEST);

  REQUIRE(client.arm(~std::uint64_t{0}) == ENGRAM_STATUS_OK);  // cut to the longest lease
  const auto refused = [&](auto&& change) {
    engram_request request = fetch_request(engine.handles[0], 2);
    change(request);
    engram_slot& slot = client.slot(client.number(3));
    slot.request = request;
    std::atomic_ref(slot.reply.completion).store(0);
    client.ring_stream(3);
    CHECK(client.wait(client.number(3)) == ENGRAM_STATUS_BAD_REQUEST);
  };
  refused([](auto& r) { r.operation = ENGRAM_OPERATION_ARM_STREAMS; });
  refused([](auto& r) { r.operation = 9; });
  refused([](auto& r) { r.id_bytes = 2; });
  refused([](auto& r) { r.layout = 9; });
  refused([](auto& r) { r.row_count = 0xFFFFFFFF; });
  refused([&](auto& r) { r.ids_offset = client.welcome.geometry.ids_bytes - 8; });
  refused([&](auto& r) { r.reply_offset = client.welcome.geometry.arena_bytes - 64; });
  refused([](auto& r) { r.reply_offset = ~std::uint64_t{63}; });
  CHECK(client.use(3, engine.handles[0], {8, 9}) == ENGRAM_STATUS_OK);
}

TEST_CASE("a doorbell that is none ends the session and nobody else's") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 16));
  StreamClient other(engine.get());
  REQUIRE(other.arm(10'000) == ENGRAM_STATUS_OK);
  for (const std::uint32_t value : {2u, 0xFFFFFFFFu}) {
    StreamClient client(engine.get());
    REQUIRE(client.arm(10'000) == ENGRAM_STATUS_OK);
    client.ring_stream(2, value);
    const engram_event event = next_violation(engine.get());
    CHECK(event.session == client.welcome.session);
    CHECK(std::string(event.text).find("doorbell") != std::string::npos);
    CHECK(other.use(0, engine.handles[0], {1, 2, 3}) == ENGRAM_STATUS_OK);
  }
}

TEST_CASE("a session that closes while its streams are served leaves nothing behind") {
  const TableFile table(5000);
  TestEngine engine({&table}, small_options(0));
  for (int round = 0; round < 30; ++round) {
    StreamClient client(engine.get());
    REQUIRE(client.arm(10'000) == ENGRAM_STATUS_OK);
    std::vector<std::int64_t> ids(100);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i) * 49;
    client.prepare(client.number(0), engine.handles[0], ids, 0, 0);
    client.ring_stream(0);
    client.close();
    REQUIRE(sessions_fall_below(engine.get(), 8));
  }
  CHECK(all_sessions_are_freed(engine.get()));
}

TEST_CASE("a daemon that stops answers a stream's use with that") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(0));
  StreamClient client(engine.get());
  REQUIRE(client.arm(10'000) == ENGRAM_STATUS_OK);
  REQUIRE(engram_engine_drain(engine.get(), 20'000) == 0);
  CHECK(client.use(0, engine.handles[0], {1}) == ENGRAM_STATUS_STOPPING);
}
