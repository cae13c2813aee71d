// A double of the daemon's side of the ring, inside the test process. It stands in where the real daemon cannot be made
// to do what a test needs: hold completions back, send malformed welcomes, die on a word's change. Its rows are a
// function of the id: byte j of row i is (i * 31 + j) mod 256.
#pragma once
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/mapping.h"
#include "common/unique_fd.h"
#include "engram/wire.h"

namespace engram::testing {

constexpr uint32_t kRowBytes = 264;
constexpr uint32_t kValueBytes = 256;
constexpr uint64_t kRows = 1000;
constexpr uint32_t kHandle = 7;

inline uint8_t row_byte(int64_t id, uint64_t j) {
  return id < 0 ? 0 : static_cast<uint8_t>(id * 31 + j);
}

struct FakeOptions {
  uint64_t arena_bytes = 1 << 20;
  uint64_t max_reply_bytes = 1 << 18;
  uint64_t ids_bytes = 1 << 16;
  uint32_t slot_count = 8;
  uint32_t stream_slot_count = 0;
  std::function<void(engram_welcome&)> change_welcome;            // before it is sent
  std::function<void(std::vector<std::byte>&)> change_catalogue;  // before it is sealed
  std::function<void(engram_ring_header&)> change_header;         // before it is written
  std::function<void(std::array<UniqueFd, ENGRAM_FD_COUNT>&)> change_descriptors;
  std::vector<std::byte> raw_answer;  // sent in place of a welcome
  bool silent = false;                // never answers a hello
  bool refuse = false;
};

class FakeDaemon {
 public:
  explicit FakeDaemon(FakeOptions options = {}) : options_(std::move(options)) {
    char folder[] = "/tmp/engram-fake-XXXXXX";
    if (::mkdtemp(folder) == nullptr) std::abort();
    folder_ = folder;
    path = folder_ + "/d.sock";
    listener_ = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s.ring", path.c_str());
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) std::abort();
    if (::listen(listener_.get(), 16) != 0) std::abort();
    const UniqueFd state = memory(4096);
    state_ = Mapping::map(state.get(), 4096, PROT_READ | PROT_WRITE, MAP_SHARED);
    seal(state.get(), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
    state_fd_ = UniqueFd(::dup(state.get()));
    page().magic = ENGRAM_STATE_MAGIC;
    page().version = ENGRAM_PROTOCOL_VERSION;
    page().pid = ::getpid();
    page().owner = static_cast<uint32_t>(::getpid());
    page().phase = ENGRAM_PHASE_SERVING;
    thread_ = std::thread([this] { run(); });
  }
  ~FakeDaemon() {
    stop_ = true;
    thread_.join();
    ::unlink((path + ".ring").c_str());
    ::rmdir(folder_.c_str());
  }

  std::string path;
  std::atomic<bool> hold{false};    // takes requests, stream uses too, but completes none
  std::atomic<uint32_t> stale{0};   // completes so many requests with STALE
  std::atomic<uint32_t> status{1};  // completes all with this
  std::atomic<uint64_t> taken{0};
  // Called in the middle of a fetch that wants progress, once half of its rows are reported.
  std::function<void()> at_half;

  // What the kernel does to the robust futex when the process dies.
  void die() { std::atomic_ref(page().owner).store(ENGRAM_OWNER_DIED); }
  // What its handler for fatal signals does before a core dump.
  void crash() { std::atomic_ref(page().phase).store(ENGRAM_PHASE_DEAD); }
  void set_asleep(bool asleep) { std::atomic_ref(page().worker_asleep[0]).store(asleep ? 1 : 0); }
  void hang_up() { hang_up_ = true; }
  // Writes to the latest session's doorbell since the last call.
  uint64_t doorbell_count() {
    uint64_t count = 0;
    return ::read(doorbell_.get(), &count, sizeof count) == sizeof count ? count : 0;
  }
  std::vector<engram_request> requests() {
    const std::lock_guard guard(lock_);
    return requests_;
  }

  static std::vector<std::byte> make_catalogue() {
    const std::vector<int64_t> head_sizes{400, 600};
    engram_catalogue head{ENGRAM_CATALOGUE_MAGIC, ENGRAM_PROTOCOL_VERSION, 1, 0, 1, sizeof(engram_catalogue_record)};
    engram_catalogue_record record{};
    std::snprintf(record.name, sizeof record.name, "fake");
    record.rows = kRows;
    record.handle = kHandle;
    record.layer = 1;
    record.generation = 1;
    record.row_bytes = kRowBytes;
    record.value_bytes = kValueBytes;
    record.head_sizes_offset = sizeof head + sizeof record;
    record.head_count = static_cast<uint32_t>(head_sizes.size());
    std::vector<std::byte> bytes(sizeof head + sizeof record + head_sizes.size() * 8);
    head.bytes = bytes.size();
    std::memcpy(bytes.data(), &head, sizeof head);
    std::memcpy(bytes.data() + sizeof head, &record, sizeof record);
    std::memcpy(bytes.data() + sizeof head + sizeof record, head_sizes.data(), head_sizes.size() * 8);
    return bytes;
  }

 private:
  struct Connection {
    UniqueFd socket;
    Mapping ring;
    Mapping arena;
    bool is_open = false;  // has sent `mapped`
    engram_ring_geometry geometry{};
    uint32_t head = 0;
    std::vector<uint32_t> held;
  };

  static UniqueFd memory(uint64_t bytes) {
    UniqueFd fd(::memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) std::abort();
    return fd;
  }
  static void seal(int fd, int seals) {
    if (::fcntl(fd, F_ADD_SEALS, seals) != 0) std::abort();
  }
  engram_state& page() { return *reinterpret_cast<engram_state*>(state_.data()); }

  void run() {
    while (!stop_) {
      pollfd entry{listener_.get(), POLLIN, 0};
      if (::poll(&entry, 1, 0) > 0) accept();
      for (auto connection = connections_.begin(); connection != connections_.end();) {
        const bool keep = !hang_up_ && serve_messages(*connection);
        if (keep && connection->is_open) serve_ring(*connection);
        connection = keep ? connection + 1 : connections_.erase(connection);
      }
      ::usleep(50);
    }
  }

  void accept() {
    Connection connection;
    connection.socket = UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    connections_.push_back(std::move(connection));
  }

  bool serve_messages(Connection& connection) {
    std::array<std::byte, ENGRAM_MESSAGE_MAX_BYTES> bytes;
    const ssize_t got = ::recv(connection.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got == 0) return false;
    if (got < static_cast<ssize_t>(sizeof(engram_message))) return true;
    engram_message message;
    std::memcpy(&message, bytes.data(), sizeof message);
    if (message.kind == ENGRAM_KIND_HELLO) answer_hello(connection);
    if (message.kind == ENGRAM_KIND_MAPPED) connection.is_open = true;
    if (message.kind == ENGRAM_KIND_CATALOGUE_REQUEST) answer_catalogue(connection);
    return true;
  }

  UniqueFd catalogue(uint64_t& size) {
    std::vector<std::byte> bytes = make_catalogue();
    if (options_.change_catalogue) options_.change_catalogue(bytes);
    UniqueFd fd = memory(bytes.size());
    if (::pwrite(fd.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) std::abort();
    seal(fd.get(), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
    size = bytes.size();
    return fd;
  }

  static void send_with(int socket, const void* bytes, std::size_t size, const std::vector<int>& fds) {
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(ENGRAM_FD_COUNT * sizeof(int))> control{};
    iovec part{const_cast<void*>(bytes), size};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (!fds.empty()) {
      header.msg_control = control.data();
      header.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
      cmsghdr* rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
    }
    ::sendmsg(socket, &header, MSG_NOSIGNAL);
  }

  void answer_catalogue(Connection& connection) {
    engram_catalogue_message answer{};
    const UniqueFd fd = catalogue(answer.catalogue_bytes);
    answer.message = {ENGRAM_MESSAGE_MAGIC, ENGRAM_PROTOCOL_VERSION, ENGRAM_KIND_CATALOGUE, sizeof answer, 0};
    send_with(connection.socket.get(), &answer, sizeof answer, {fd.get()});
  }

  void answer_hello(Connection& connection) {
    if (options_.silent) return;
    if (!options_.raw_answer.empty()) {
      send_with(connection.socket.get(), options_.raw_answer.data(), options_.raw_answer.size(), {});
      return;
    }
    if (options_.refuse) {
      engram_refused refused{};
      refused.message = {ENGRAM_MESSAGE_MAGIC, ENGRAM_PROTOCOL_VERSION, ENGRAM_KIND_REFUSED, sizeof refused, 0};
      refused.status = ENGRAM_STATUS_BUSY;
      std::snprintf(refused.text, sizeof refused.text, "the limit of 3 sessions is reached");
      send_with(connection.socket.get(), &refused, sizeof refused, {});
      return;
    }
    engram_welcome welcome{};
    welcome.message = {ENGRAM_MESSAGE_MAGIC, ENGRAM_PROTOCOL_VERSION, ENGRAM_KIND_WELCOME, sizeof welcome, 0};
    welcome.version = ENGRAM_PROTOCOL_VERSION;
    welcome.session = 3;
    welcome.daemon_pid = ::getpid();
    welcome.state_bytes = 4096;
    engram_ring_geometry& g = welcome.geometry;
    g.slot_count = options_.slot_count;
    g.stream_slot_count = options_.stream_slot_count;
    g.submit_offset = 4096;
    g.slots_offset = 8192;
    g.ids_offset = g.slots_offset + (uint64_t{g.slot_count} + g.stream_slot_count) * ENGRAM_SLOT_BYTES;
    g.ids_bytes = options_.ids_bytes;
    g.ring_bytes = g.ids_offset + g.ids_bytes;
    g.arena_bytes = options_.arena_bytes;
    g.max_reply_bytes = options_.max_reply_bytes;
    connection.geometry = g;
    std::array<UniqueFd, ENGRAM_FD_COUNT> fds;
    fds[ENGRAM_FD_RING] = memory(g.ring_bytes);
    fds[ENGRAM_FD_ARENA] = memory(g.arena_bytes);
    fds[ENGRAM_FD_STATE] = UniqueFd(::dup(state_fd_.get()));
    fds[ENGRAM_FD_DOORBELL] = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    fds[ENGRAM_FD_CATALOGUE] = catalogue(welcome.catalogue_bytes);
    doorbell_ = UniqueFd(::dup(fds[ENGRAM_FD_DOORBELL].get()));
    connection.ring = Mapping::map(fds[ENGRAM_FD_RING].get(), g.ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
    connection.arena = Mapping::map(fds[ENGRAM_FD_ARENA].get(), g.arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
    seal(fds[ENGRAM_FD_RING].get(), F_SEAL_SHRINK | F_SEAL_GROW);
    seal(fds[ENGRAM_FD_ARENA].get(), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
    if (options_.change_welcome) options_.change_welcome(welcome);
    engram_ring_header header{ENGRAM_RING_MAGIC, ENGRAM_PROTOCOL_VERSION, welcome.session, welcome.geometry};
    if (options_.change_header) options_.change_header(header);
    std::memcpy(connection.ring.data(), &header, sizeof header);
    if (options_.change_descriptors) options_.change_descriptors(fds);
    std::vector<int> numbers;
    for (const UniqueFd& fd : fds) {
      if (fd) numbers.push_back(fd.get());
    }
    send_with(connection.socket.get(), &welcome, sizeof welcome, numbers);
  }

  void serve_ring(Connection& connection) {
    const engram_ring_geometry& g = connection.geometry;
    auto& block = *reinterpret_cast<engram_submit_block*>(connection.ring.data() + g.submit_offset);
    auto* queue = reinterpret_cast<uint32_t*>(&block + 1);
    const uint32_t tail = std::atomic_ref(block.submit_tail).load();
    for (; connection.head != tail; ++connection.head) {
      const uint32_t slot = queue[connection.head % g.slot_count];
      taken += 1;
      {
        const std::lock_guard guard(lock_);
        requests_.push_back(slot_of(connection, slot).request);
      }
      connection.held.push_back(slot);
    }
    for (uint32_t slot = g.slot_count; slot < g.slot_count + g.stream_slot_count; ++slot) {
      engram_slot& shared = slot_of(connection, slot);
      if (std::atomic_ref(shared.doorbell).exchange(0) == 0) continue;
      std::atomic_ref(shared.reply.stream_taken).fetch_add(1);
      connection.held.push_back(slot);
    }
    if (hold) return;
    for (const uint32_t slot : connection.held) complete(connection, slot);
    connection.held.clear();
  }

  static engram_slot& slot_of(Connection& connection, uint32_t slot) {
    return reinterpret_cast<engram_slot*>(connection.ring.data() + connection.geometry.slots_offset)[slot];
  }

  void complete(Connection& connection, uint32_t number) {
    engram_slot& slot = slot_of(connection, number);
    const engram_request request = slot.request;
    uint32_t result = status;
    if (stale > 0) {
      stale -= 1;
      result = ENGRAM_STATUS_STALE;
    }
    const std::byte* ids = connection.ring.data() + connection.geometry.ids_offset + request.ids_offset;
    for (uint32_t i = 0; result == ENGRAM_STATUS_OK && i < request.row_count; ++i) {
      if (at_half && i == request.row_count / 2 && (request.flags & ENGRAM_REQUEST_PROGRESS) != 0) {
        std::atomic_ref(slot.reply.rows_ready).store(i, std::memory_order_release);
        at_half();
      }
      int64_t id = 0;
      if (request.id_bytes == 4) {
        int32_t narrow;
        std::memcpy(&narrow, ids + i * 4, 4);
        id = narrow;
      } else {
        std::memcpy(&id, ids + i * 8, 8);
      }
      if (id < -1 || id >= static_cast<int64_t>(kRows)) {
        slot.reply.position = i;
        slot.reply.row_id = id;
        result = ENGRAM_STATUS_ROW_ID;
      } else if (request.operation == ENGRAM_OPERATION_FETCH) {
        auto* out = reinterpret_cast<uint8_t*>(connection.arena.data() + request.reply_offset);
        for (uint64_t j = 0; j < kRowBytes; ++j) {
          const uint64_t split =
              j < kValueBytes ? i * kValueBytes + j
                              : request.row_count * kValueBytes + i * (kRowBytes - kValueBytes) + (j - kValueBytes);
          out[request.layout == ENGRAM_LAYOUT_SPLIT ? split : i * kRowBytes + j] = row_byte(id, j);
        }
      }
    }
    if (number >= connection.geometry.slot_count) {
      std::atomic_ref(slot.reply.stream_completed).fetch_add(1);
      if (result != ENGRAM_STATUS_OK) std::atomic_ref(slot.reply.stream_failed).fetch_add(1);
    }
    std::atomic_ref(slot.reply.completion).store(result);
    if (std::atomic_ref(slot.waiting).load() != 0) {
      ::syscall(SYS_futex, &slot.reply.completion, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
  }

  FakeOptions options_;
  std::string folder_;
  UniqueFd listener_;
  UniqueFd state_fd_;
  UniqueFd doorbell_;
  Mapping state_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> hang_up_{false};
  std::mutex lock_;
  std::vector<engram_request> requests_;
  std::vector<Connection> connections_;
  std::thread thread_;
};

}  // namespace engram::testing
