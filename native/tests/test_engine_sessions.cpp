// The engine's sessions: what it refuses, whom it drops, what it leaves behind, over its C ABI as the daemon uses it.
#include <cstring>
#include <string>

#include "engine_fixture.h"

using namespace engram_test;

TEST_CASE("what makes no sense is refused, and the session lives on") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 20));
  BareClient client(engine.get());
  const engram_request good = fetch_request(engine.handles[0], 2);
  const auto submit = [&](const engram_request& request) {
    client.prepare(0, request, {});
    client.submit_only(0);
    return client.wait(0);
  };
  std::memset(client.ids(), 0, 64);
  CHECK(submit(good) == ENGRAM_STATUS_OK);
  auto bad = good;
  bad.handle = 99;
  CHECK(submit(bad) == ENGRAM_STATUS_UNKNOWN_TABLE);
  const auto refused = [&](auto&& change) {
    engram_request changed = good;
    change(changed);
    CHECK(submit(changed) == ENGRAM_STATUS_BAD_REQUEST);
  };
  const engram_ring_geometry geometry = client.welcome.geometry;
  refused([](auto& r) { r.operation = 77; });
  refused([](auto& r) { r.id_bytes = 3; });
  refused([](auto& r) { r.layout = 9; });
  refused([](auto& r) { r.ids_offset = 4; });
  refused([](auto& r) { r.reply_offset = 32; });
  refused([](auto& r) { r.ids_offset = ~std::uint64_t{7}; });
  refused([](auto& r) { r.reply_offset = ~std::uint64_t{63}; });
  refused([&](auto& r) { r.ids_offset = geometry.ids_bytes - 8; });
  refused([&](auto& r) { r.reply_offset = geometry.arena_bytes - 64; });
  refused([](auto& r) { r.row_count = 0xFFFFFFFF; });
  refused([&](auto& r) { r.row_count = static_cast<std::uint32_t>(geometry.max_reply_bytes / 264 + 1); });
  refused([](auto& r) { r.part_count = 0; });
  refused([](auto& r) { r.part_index = 1; });
  refused([](auto& r) { r.flags = 2; });
  refused([](auto& r) { r.reserved = 1; });
  CHECK(submit(good) == ENGRAM_STATUS_OK);
}

TEST_CASE("a violation ends the session and nobody else's") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 16));
  BareClient other(engine.get());
  const auto violates = [&](auto&& act) {
    BareClient client(engine.get());
    act(client);
    const engram_event event = next_violation(engine.get());
    CHECK(event.session == client.welcome.session);
    CHECK(other.fetch(engine.handles[0], {1, 2, 3}) == ENGRAM_STATUS_OK);
  };
  violates([](BareClient& client) { client.submit_only(16); });
  violates([](BareClient& client) { client.submit_only(0xFFFFFFFF); });
  violates([](BareClient& client) { client.set_tail(17); });
  violates([](BareClient& client) { client.set_tail(0xFFFFFFFF); });
}

TEST_CASE("sessions come and go without a trace") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 20));
  for (int round = 0; round < 200; ++round) {
    BareClient client(engine.get());
    client.prepare(0, engine.handles[0], {round}, 0, 0);
    client.submit_only(0);
    if (round % 2 == 0) CHECK(client.wait(0) == ENGRAM_STATUS_OK);
    client.close();
    // Stay clear of the limit on sessions.
    REQUIRE(sessions_fall_below(engine.get(), 8));
  }
  CHECK(all_sessions_are_freed(engine.get()));
}

TEST_CASE("limits on sessions and arenas are refused by name") {
  const TableFile table(1000);
  engram_engine_options options = small_options(0);
  options.session_limit = 2;
  TestEngine engine({&table}, options);
  BareClient first(engine.get());
  BareClient second(engine.get());
  engram_welcome welcome{};
  engram_session_descriptors descriptors{};
  char error[256] = "";
  CHECK(engram_engine_open_session(engine.get(), 1, 1, 0, 0, &welcome, &descriptors, error, sizeof error) ==
        ENGRAM_STATUS_BUSY);
  CHECK(std::string(error).find("2 sessions") != std::string::npos);
}

TEST_CASE("the client can neither write the arena nor resize, punch or reseal anything") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(0));
  BareClient client(engine.get());
  const auto bytes = client.welcome.geometry.arena_bytes;
  CHECK(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, client.arena_fd.get(), 0) == MAP_FAILED);
  CHECK(mprotect(client.arena.data(), 4096, PROT_READ | PROT_WRITE) != 0);
  const int state = engram_engine_state_descriptor(engine.get());
  for (const int descriptor : {client.ring_fd.get(), client.arena_fd.get(), state}) {
    CHECK(ftruncate(descriptor, 0) != 0);
    CHECK(fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) != 0);
    CHECK(pwrite(descriptor, "x", 1, 0) != 1);
    CHECK(fcntl(descriptor, F_ADD_SEALS, F_SEAL_WRITE) != 0);
  }
  CHECK(client.fetch(engine.handles[0], {1, 2, 3}) == ENGRAM_STATUS_OK);
}

TEST_CASE("draining answers what runs and refuses what comes") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(0));
  BareClient client(engine.get());
  REQUIRE(engram_engine_drain(engine.get(), 20'000) == 0);
  CHECK(client.fetch(engine.handles[0], {1}) == ENGRAM_STATUS_STOPPING);
}

TEST_CASE("a file of the wrong size is refused, and the other layers with it") {
  const TableFile table(1000);
  const engram_engine_options options = small_options(0);
  char error[256] = "";
  engram_engine* engine = engram_engine_create(&options, error, sizeof error);
  REQUIRE(engine != nullptr);
  const int file = table.descriptor();
  engram_layer_options layers[2] = {table.layer_options(&file), table.layer_options(&file)};
  layers[1].rows = 5000;
  std::uint32_t handles[2] = {};
  CHECK(engram_engine_add_layers(engine, layers, 2, nullptr, 0, handles, error, sizeof error) != 0);
  CHECK(std::string(error).find("bytes") != std::string::npos);
  // Neither has been added, and no handle is used up.
  layers[1].rows = layers[0].rows;
  REQUIRE(engram_engine_add_layers(engine, layers, 2, nullptr, 0, handles, error, sizeof error) == 0);
  CHECK(handles[0] == 1);
  CHECK(handles[1] == 2);
  engram_engine_destroy(engine);
}
