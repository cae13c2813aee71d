// The daemon's side of a ring by itself: where its parts lie, and how it takes the doorbells of stream slots.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>

#include "common/machine_page.h"
#include "common/mapping.h"
#include "engine/ring_session.h"

using engram::Mapping;
using engram::RingSession;
using engram::SessionMemory;

namespace {

RingSession::Options some_options(SessionMemory* memory) {
  RingSession::Options options;
  options.id = 1;
  options.arena_bytes = 64 << 10;
  options.ids_bytes = 4 << 10;
  options.slot_count = 16;
  options.stream_slot_count = 4;
  options.memory = memory;
  return options;
}

// A session, and its ring as the client maps it.
struct Ring {
  explicit Ring(RingSession::Options options) {
    options.memory = &memory;
    std::string error;
    session = RingSession::create(options, error);
    INFO(error);
    REQUIRE(session != nullptr);
    mapping =
        Mapping::map(session->ring_descriptor(), session->geometry().ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
    REQUIRE(mapping);
  }
  engram_slot& stream_slot(std::uint32_t index) {
    auto* slots = reinterpret_cast<engram_slot*>(mapping.data() + session->geometry().slots_offset);
    return slots[session->geometry().slot_count + index];
  }
  void ring(std::uint32_t index, std::uint32_t value = 1) { std::atomic_ref(stream_slot(index).doorbell).store(value); }
  RingSession::StreamTake take(std::uint32_t index) { return session->take_stream(index, &slot, &request); }

  SessionMemory memory;
  std::unique_ptr<RingSession> session;
  Mapping mapping;
  std::uint32_t slot = 0;
  engram_request request{};
};

}  // namespace

TEST_CASE("ring and arena are whole pages of the machine, whatever their size") {
  for (const std::uint64_t page_bytes : {4096, 16384, 65536}) {
    for (const std::uint64_t arena_bytes : {65536, 69632, 100'000, 1 << 20}) {
      for (const std::uint32_t slot_count : {16, 64, 256}) {
        RingSession::Options options = some_options(nullptr);
        options.slot_count = slot_count;
        options.stream_slot_count = slot_count == 256 ? 0 : 32;
        options.arena_bytes = arena_bytes;
        CAPTURE(page_bytes);
        CAPTURE(arena_bytes);
        CAPTURE(slot_count);
        const engram_ring_geometry geometry = RingSession::plan(options, page_bytes);
        CHECK(geometry.ring_bytes % page_bytes == 0);
        CHECK(geometry.arena_bytes % page_bytes == 0);
        CHECK(geometry.arena_bytes <= arena_bytes);
        CHECK(geometry.arena_bytes + page_bytes > arena_bytes);
        CHECK(geometry.max_reply_bytes == geometry.arena_bytes / 4);
        CHECK(geometry.ids_bytes >= options.ids_bytes);
        CHECK(geometry.ids_offset + geometry.ids_bytes == geometry.ring_bytes);
        // As the client checks them (ring/handshake.cpp).
        CHECK(geometry.submit_offset >= sizeof(engram_ring_header));
        CHECK(geometry.submit_offset + sizeof(engram_submit_block) + slot_count * 4 <= geometry.slots_offset);
        CHECK(geometry.slots_offset + (slot_count + geometry.stream_slot_count) * sizeof(engram_slot) <=
              geometry.ids_offset);
        CHECK(geometry.slots_offset % 64 == 0);
        CHECK(geometry.ids_offset % 64 == 0);
      }
    }
  }
}

TEST_CASE("a session's memory files have the sizes of the plan") {
  Ring ring(some_options(nullptr));
  const engram_ring_geometry& geometry = ring.session->geometry();
  struct stat status;
  REQUIRE(fstat(ring.session->ring_descriptor(), &status) == 0);
  CHECK(static_cast<std::uint64_t>(status.st_size) == geometry.ring_bytes);
  CHECK(geometry.ring_bytes % engram::machine_page_bytes() == 0);
  REQUIRE(fstat(ring.session->arena_descriptor(), &status) == 0);
  CHECK(static_cast<std::uint64_t>(status.st_size) == geometry.arena_bytes);
  CHECK(ring.memory.bytes == geometry.ring_bytes + geometry.arena_bytes);
}

TEST_CASE("a doorbell is taken once, and stored back before the answer") {
  Ring ring(some_options(nullptr));
  CHECK(ring.take(0) == RingSession::StreamTake::nothing);
  CHECK(!ring.session->has_stream_doorbell());
  ring.stream_slot(2).request.row_count = 3;
  ring.ring(2);
  CHECK(ring.session->has_stream_doorbell());
  REQUIRE(ring.take(2) == RingSession::StreamTake::request);
  CHECK(ring.slot == 16 + 2);
  CHECK(ring.request.row_count == 3);
  CHECK(ring.stream_slot(2).doorbell == 0);
  CHECK(ring.stream_slot(2).reply.stream_taken == 1);
  CHECK(ring.take(2) == RingSession::StreamTake::nothing);
  CHECK(ring.session->in_flight() == 1);

  engram_failure outcome{};
  outcome.status = ENGRAM_STATUS_OK;
  ring.session->complete(ring.slot, outcome, 3, 0);
  CHECK(ring.stream_slot(2).reply.completion == ENGRAM_STATUS_OK);
  CHECK(ring.stream_slot(2).reply.stream_completed == 1);
  CHECK(ring.stream_slot(2).reply.stream_failed == 0);
  CHECK(ring.session->in_flight() == 0);

  // A failed use is counted, and stays counted.
  for (const std::uint32_t status : {ENGRAM_STATUS_ROW_ID, ENGRAM_STATUS_OK}) {
    ring.ring(2);
    REQUIRE(ring.take(2) == RingSession::StreamTake::request);
    outcome.status = status;
    ring.session->complete(ring.slot, outcome, 0, 0);
  }
  CHECK(ring.stream_slot(2).reply.stream_taken == 3);
  CHECK(ring.stream_slot(2).reply.stream_completed == 3);
  CHECK(ring.stream_slot(2).reply.stream_failed == 1);
}

TEST_CASE("a client that writes the counts does not change them") {
  Ring ring(some_options(nullptr));
  engram_failure outcome{};
  outcome.status = ENGRAM_STATUS_ROW_ID;
  for (std::uint64_t use = 1; use <= 3; ++use) {
    engram_reply& reply = ring.stream_slot(0).reply;
    reply.stream_taken = reply.stream_completed = reply.stream_failed = ~std::uint64_t{0};
    ring.ring(0);
    REQUIRE(ring.take(0) == RingSession::StreamTake::request);
    ring.session->complete(ring.slot, outcome, 0, 0);
    CHECK(reply.stream_taken == use);
    CHECK(reply.stream_completed == use);
    CHECK(reply.stream_failed == use);
  }
}

TEST_CASE("what is no doorbell, and one that rings while the slot is in use, are violations") {
  Ring ring(some_options(nullptr));
  for (const std::uint32_t value : {2u, 0x80000000u, 0xFFFFFFFFu}) {
    ring.ring(1, value);
    CHECK(ring.take(1) == RingSession::StreamTake::violation);
  }
  ring.ring(0);
  REQUIRE(ring.take(0) == RingSession::StreamTake::request);
  ring.ring(0);
  CHECK(ring.take(0) == RingSession::StreamTake::violation);
  // Such a doorbell is no reason to look again at once: nothing could be done about it.
  ring.ring(1, 0);
  CHECK(!ring.session->has_stream_doorbell());
}

TEST_CASE("a use that exceeds what the session may hold goes on ringing") {
  Ring ring(some_options(nullptr));
  const auto row_limit = static_cast<std::uint32_t>(ring.session->geometry().ids_bytes / sizeof(std::uint32_t));
  for (const std::uint32_t index : {0, 1}) ring.stream_slot(index).request.row_count = row_limit;
  ring.ring(0);
  ring.ring(1);
  REQUIRE(ring.take(0) == RingSession::StreamTake::request);
  const std::uint32_t first = ring.slot;
  CHECK(ring.take(1) == RingSession::StreamTake::nothing);
  CHECK(ring.stream_slot(1).doorbell == 1);
  engram_failure outcome{};
  outcome.status = ENGRAM_STATUS_OK;
  ring.session->complete(first, outcome, 0, 0);
  CHECK(ring.take(1) == RingSession::StreamTake::request);
}
