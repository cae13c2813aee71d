// The ring client's connections: daemons that die, reload, refuse or are hostile, and what fork leaves, against a
// double of the daemon (see fake_daemon.h).
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "ring_client_fixture.h"

using namespace engram::testing;
using engram::UniqueFd;

TEST_CASE("the daemon's death ends a wait") {
  FakeDaemon daemon;
  daemon.hold = true;
  Client client(daemon);
  const int64_t ticket = client.submit({1});
  void (FakeDaemon::*end)() = nullptr;
  SUBCASE("owner died") {
    end = &FakeDaemon::die;
  }
  SUBCASE("crash with a core dump") {
    end = &FakeDaemon::crash;
  }
  SUBCASE("socket closed") {
    end = &FakeDaemon::hang_up;
  }
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    (daemon.*end)();
  });
  CHECK(client.wait(ticket, -1) == nullptr);
  CHECK(client.error.status == ENGRAM_STATUS_LOST);
  killer.join();
  CHECK(client.submit({1}) == -ENGRAM_STATUS_LOST);
  CHECK(engram_session_check(client.session, nullptr) == ENGRAM_STATUS_LOST);
}

TEST_CASE("rows of a completed ticket outlive the daemon") {
  FakeDaemon daemon;
  Client client(daemon);
  const int64_t ticket = client.submit({4});
  const uint8_t* rows = client.wait(ticket);
  REQUIRE(rows != nullptr);
  daemon.die();
  CHECK(rows_match(rows, {4}));
  CHECK(client.wait(ticket) == rows);
}

TEST_CASE("close ends other threads' waits") {
  FakeDaemon daemon;
  daemon.hold = true;
  Client client(daemon);
  const int64_t ticket = client.submit({1});
  std::thread closer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    engram_session_close(client.session);
  });
  CHECK(client.wait(ticket, -1) == nullptr);
  CHECK(client.error.status == ENGRAM_CLIENT_CLOSED);
  closer.join();
  engram_session_close(client.session);
  CHECK(client.submit({1}) == -ENGRAM_CLIENT_CLOSED);
}

TEST_CASE("a stale ticket is sent again") {
  FakeDaemon daemon;
  daemon.stale = 1;
  Client client(daemon);
  const std::vector<int64_t> ids{8, 9};
  const int64_t ticket = client.submit(ids);
  CHECK(client.wait(ticket) == nullptr);
  CHECK(client.error.status == ENGRAM_STATUS_STALE);
  CHECK(engram_session_refresh(client.session, &client.error) == 0);
  CHECK(engram_resubmit(client.session, ticket, &kLayer, &client.error) == 0);
  const uint8_t* rows = client.wait(ticket);
  REQUIRE(rows != nullptr);
  CHECK(rows_match(rows, ids));
  engram_layer other = kLayer;
  other.row_bytes = 128;
  CHECK(engram_resubmit(client.session, ticket, &other, &client.error) == ENGRAM_CLIENT_ARGUMENT);
}

TEST_CASE("the catalogue") {
  FakeDaemon daemon;
  Client client(daemon);
  engram_catalogue_record record;
  REQUIRE(engram_session_layers(client.session, &record, 1) == 1);
  CHECK(engram_session_layers(client.session, nullptr, 0) == 1);
  CHECK(std::string(record.name) == "fake");
  CHECK(record.rows == kRows);
  int64_t sizes[2];
  CHECK(engram_session_head_sizes(client.session, kHandle, sizes, 2) == 2);
  CHECK(sizes[1] == 600);
  CHECK(engram_session_head_sizes(client.session, 1, sizes, 2) == -1);
}

TEST_CASE("a child does not use its parent's session") {
  FakeDaemon daemon;
  Client client(daemon);
  const int64_t ticket = client.submit({1});
  REQUIRE(client.wait(ticket) != nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    engram_error error{};
    int faults = 0;
    faults += client.submit({1}) != -ENGRAM_CLIENT_CLOSED;
    faults += engram_wait(client.session, ticket, -1, &error) != nullptr || error.status != ENGRAM_CLIENT_CLOSED;
    faults += engram_session_check(client.session, nullptr) != ENGRAM_CLIENT_CLOSED;
    faults += engram_session_refresh(client.session, nullptr) != ENGRAM_CLIENT_CLOSED;
    engram_release(client.session, ticket);
    engram_session_close(client.session);
    engram_session_free(client.session);
    ::_exit(faults);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(engram_session_check(client.session, nullptr) == 0);
  const int64_t again = client.submit({2});
  CHECK(client.wait(again) != nullptr);
}

TEST_CASE("nobody answers, or not in time, or with a refusal") {
  engram_error error{};
  CHECK(engram_connect("/tmp/engram-no-such-socket", nullptr, &error) == nullptr);
  CHECK(error.status == ENGRAM_STATUS_LOST);
  CHECK(engram_connect(std::string(200, 'x').c_str(), nullptr, &error) == nullptr);
  CHECK(error.status == ENGRAM_CLIENT_ARGUMENT);
  {
    FakeOptions options;
    options.silent = true;
    FakeDaemon daemon(options);
    Client client(daemon, 50);
    CHECK(client.session == nullptr);
    CHECK(client.error.status == ENGRAM_STATUS_TIMEOUT);
  }
  FakeOptions options;
  options.refuse = true;
  FakeDaemon daemon(options);
  Client client(daemon);
  CHECK(client.session == nullptr);
  CHECK(client.error.status == ENGRAM_STATUS_BUSY);
  CHECK(std::string(client.error.text).find("limit of 3 sessions") != std::string::npos);
}

TEST_CASE("a hostile or foreign daemon gives an error") {
  std::vector<FakeOptions> cases;
  const auto with_welcome = [&](auto change) {
    FakeOptions options;
    options.change_welcome = change;
    cases.push_back(std::move(options));
  };
  with_welcome([](engram_welcome& w) { w.message.magic = 1; });
  with_welcome([](engram_welcome& w) { w.message.version = 2; });
  with_welcome([](engram_welcome& w) { w.message.kind = ENGRAM_KIND_CATALOGUE; });
  with_welcome([](engram_welcome& w) { w.message.bytes = 9; });
  with_welcome([](engram_welcome& w) { w.version = 2; });
  with_welcome([](engram_welcome& w) { w.worker = 64; });
  with_welcome([](engram_welcome& w) { w.state_bytes = 8192; });
  with_welcome([](engram_welcome& w) { w.state_bytes = 8; });
  with_welcome([](engram_welcome& w) { w.catalogue_bytes = UINT64_MAX; });
  with_welcome([](engram_welcome& w) { w.catalogue_bytes += 1; });
  with_welcome([](engram_welcome& w) { w.geometry.ring_bytes = UINT64_MAX; });
  with_welcome([](engram_welcome& w) { w.geometry.ring_bytes += 4096; });
  with_welcome([](engram_welcome& w) { w.geometry.arena_bytes *= 2; });
  with_welcome([](engram_welcome& w) { w.geometry.slot_count = 0; });
  with_welcome([](engram_welcome& w) { w.geometry.slot_count = 3; });
  with_welcome([](engram_welcome& w) { w.geometry.slot_count = 1u << 31; });
  with_welcome([](engram_welcome& w) { w.geometry.slot_count = 256; });
  with_welcome([](engram_welcome& w) { w.geometry.stream_slot_count = UINT32_MAX; });
  with_welcome([](engram_welcome& w) { w.geometry.submit_offset = 64; });
  with_welcome([](engram_welcome& w) { w.geometry.submit_offset = UINT64_MAX - 63; });
  with_welcome([](engram_welcome& w) { w.geometry.slots_offset += 4; });
  with_welcome([](engram_welcome& w) { w.geometry.ids_bytes = UINT64_MAX; });
  with_welcome([](engram_welcome& w) { w.geometry.ids_offset += 64; });
  with_welcome([](engram_welcome& w) { w.geometry.max_reply_bytes = w.geometry.arena_bytes + 1; });
  const auto with_header = [&](auto change) {
    FakeOptions options;
    options.change_header = change;
    cases.push_back(std::move(options));
  };
  with_header([](engram_ring_header& h) { h.magic = 0; });
  with_header([](engram_ring_header& h) { h.session += 1; });
  with_header([](engram_ring_header& h) { h.geometry.ids_bytes += 64; });
  const auto with_catalogue = [&](auto change) {
    FakeOptions options;
    options.change_catalogue = [change](std::vector<std::byte>& bytes) {
      engram_catalogue head;
      engram_catalogue_record record;
      std::memcpy(&head, bytes.data(), sizeof head);
      std::memcpy(&record, bytes.data() + sizeof head, sizeof record);
      change(head, record);
      std::memcpy(bytes.data(), &head, sizeof head);
      std::memcpy(bytes.data() + sizeof head, &record, sizeof record);
    };
    cases.push_back(std::move(options));
  };
  with_catalogue([](auto& head, auto&) { head.magic = 0; });
  with_catalogue([](auto& head, auto&) { head.version = 2; });
  with_catalogue([](auto& head, auto&) { head.record_count = UINT32_MAX; });
  with_catalogue([](auto& head, auto&) { head.record_count = 2; });
  with_catalogue([](auto& head, auto&) { head.record_bytes = 8; });
  with_catalogue([](auto& head, auto&) { head.bytes += 1; });
  with_catalogue([](auto&, auto& record) { std::memset(record.name, 'x', sizeof record.name); });
  with_catalogue([](auto&, auto& record) { record.row_bytes = 0; });
  with_catalogue([](auto&, auto& record) { record.value_bytes = record.row_bytes + 1; });
  with_catalogue([](auto&, auto& record) { record.rows = UINT64_MAX; });
  with_catalogue([](auto&, auto& record) { record.head_count = UINT32_MAX; });
  with_catalogue([](auto&, auto& record) { record.head_sizes_offset = UINT64_MAX; });
  with_catalogue([](auto&, auto& record) { record.head_sizes_offset += 8; });
  const auto with_descriptors = [&](auto change) {
    FakeOptions options;
    options.change_descriptors = change;
    cases.push_back(std::move(options));
  };
  with_descriptors([](auto& fds) { fds[ENGRAM_FD_CATALOGUE].reset(); });
  with_descriptors([](auto& fds) { fds[ENGRAM_FD_RING] = UniqueFd(::open("/dev/zero", O_RDWR)); });
  with_descriptors([](auto& fds) {  // could shrink under the client
    fds[ENGRAM_FD_ARENA] = UniqueFd(::memfd_create("bare", MFD_CLOEXEC));
    REQUIRE(::ftruncate(fds[ENGRAM_FD_ARENA].get(), 1 << 20) == 0);
  });
  with_descriptors([](auto& fds) {
    int pipe[2];
    REQUIRE(::pipe(pipe) == 0);
    ::close(pipe[0]);
    fds[ENGRAM_FD_DOORBELL] = UniqueFd(pipe[1]);
  });
  FakeOptions raw;
  for (const std::size_t size : {std::size_t{1}, sizeof(engram_welcome), std::size_t{4096}}) {
    raw.raw_answer.assign(size, std::byte{0xFF});
    cases.push_back(raw);
  }
  for (std::size_t i = 0; i < cases.size(); ++i) {
    CAPTURE(i);
    FakeDaemon daemon(cases[i]);
    Client client(daemon);
    CHECK(client.session == nullptr);
    CHECK(client.error.status == ENGRAM_CLIENT_PROTOCOL);
    CHECK(client.error.text[0] != 0);
  }
}

TEST_CASE("too few free descriptors give a clear error") {
  FakeDaemon daemon;
  const pid_t child = ::fork();
  if (child == 0) {
    // Room for the socket and two of the five descriptors.
    const int next = ::dup(0);
    ::close(next);
    const rlimit limit{static_cast<rlim_t>(next) + 3, static_cast<rlim_t>(next) + 3};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    engram_error error{};
    const bool refused = engram_connect(daemon.path.c_str(), nullptr, &error) == nullptr;
    const bool clear = error.status == ENGRAM_CLIENT_SYSTEM && std::strstr(error.text, "ulimit -n") != nullptr;
    ::_exit(refused && clear ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
