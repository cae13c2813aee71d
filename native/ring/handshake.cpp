#include "ring/handshake.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "ring/error.h"
#include "ring/fork_registry.h"
#include "ring/message.h"

namespace engram {
namespace {

constexpr uint32_t kDefaultTimeoutMs = 5000;
constexpr uint64_t kMaxMappedBytes = uint64_t{1} << 40;
constexpr uint64_t kMaxStateBytes = 1 << 20;

const char* geometry_fault(const engram_ring_geometry& g) {
  if (g.slot_count == 0 || g.slot_count > ENGRAM_MAX_SLOTS || !std::has_single_bit(g.slot_count)) {
    return "slot_count is out of range";
  }
  if (g.stream_slot_count > ENGRAM_MAX_SLOTS - g.slot_count) return "stream_slot_count is out of range";
  if (g.ring_bytes > kMaxMappedBytes || g.arena_bytes > kMaxMappedBytes) return "the ring or the arena is too large";
  if (g.ring_bytes == 0 || g.arena_bytes == 0) return "the ring or the arena is empty";
  const uint64_t slots = uint64_t{g.slot_count} + g.stream_slot_count;
  const uint64_t submit_bytes = sizeof(engram_submit_block) + uint64_t{g.slot_count} * sizeof(uint32_t);
  if (g.submit_offset < sizeof(engram_ring_header) || g.submit_offset % 64 != 0 || g.slots_offset % 64 != 0 ||
      g.ids_offset % 64 != 0) {
    return "a part of the ring has the wrong alignment";
  }
  if (!is_inside(g.submit_offset, submit_bytes, g.ring_bytes) ||
      !is_inside(g.slots_offset, slots * ENGRAM_SLOT_BYTES, g.ring_bytes) ||
      !is_inside(g.ids_offset, g.ids_bytes, g.ring_bytes)) {
    return "a part of the ring lies outside";
  }
  if (g.submit_offset + submit_bytes > g.slots_offset || g.slots_offset + slots * ENGRAM_SLOT_BYTES > g.ids_offset) {
    return "two parts of the ring overlap";
  }
  if (g.max_reply_bytes == 0 || g.max_reply_bytes > g.arena_bytes) return "max_reply_bytes is out of range";
  return nullptr;
}

const char* welcome_fault(const engram_welcome& welcome) {
  if (welcome.version != ENGRAM_PROTOCOL_VERSION) return "it chose a version that was not offered";
  if (welcome.worker >= ENGRAM_MAX_WORKERS) return "worker is out of range";
  if (welcome.state_bytes < sizeof(engram_state) || welcome.state_bytes > kMaxStateBytes) {
    return "state_bytes is out of range";
  }
  return geometry_fault(welcome.geometry);
}

// An eventfd: an anonymous inode, which has no file type. A pipe could kill this process with SIGPIPE.
bool is_eventfd(int fd) {
  struct stat status;
  return ::fstat(fd, &status) == 0 && (status.st_mode & S_IFMT) == 0;
}

int open_socket(const char* path, const Deadline& deadline, UniqueFd& socket, engram_error* error) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const int length = std::snprintf(address.sun_path, sizeof address.sun_path, "%s.ring", path);
  if (length < 0 || static_cast<std::size_t>(length) >= sizeof address.sun_path) {
    return fail(error, ENGRAM_CLIENT_ARGUMENT, ENAMETOOLONG,
                "the socket path is too long: with .ring at most %zu bytes", sizeof address.sun_path - 1);
  }
  {
    const ForkPause pause;
    socket = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  }
  if (!socket) {
    const char* advice = errno == EMFILE ? " (ulimit -n)" : "";
    return fail(error, ENGRAM_CLIENT_SYSTEM, errno, "cannot open a socket: %m%s", advice);
  }
  // Bounds the connect where the daemon's backlog is full.
  const int left_ms = std::max(1, deadline.left_ms());
  const timeval timeout{left_ms / 1000, left_ms % 1000 * 1000};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (errno == EINTR) return fail(error, ENGRAM_CLIENT_AGAIN, errno, "interrupted by a signal");
    if (errno == EACCES) {
      return fail(error, ENGRAM_CLIENT_SYSTEM, errno, "no permission to use the socket %s; is this user in its group?",
                  address.sun_path);
    }
    return fail(error, ENGRAM_STATUS_LOST, errno, "no daemon answers at %s: %m", address.sun_path);
  }
  // Before the first wait, so that a thread that connects anew after a loss learns of it at once.
  if (is_peer_exiting(socket.get())) return fail_of_exiting_peer(error);
  return 0;
}

int take_welcome(Message& message, Handshake& handshake, engram_error* error) {
  if (const int status = expect(message, ENGRAM_KIND_WELCOME, sizeof(engram_welcome), error)) return status;
  std::memcpy(&handshake.welcome, message.bytes.data(), sizeof handshake.welcome);
  const engram_welcome& welcome = handshake.welcome;
  if (const char* fault = welcome_fault(welcome)) return malformed(error, fault);
  if (message.descriptors.size() != ENGRAM_FD_COUNT) return malformed(error, "it did not send five descriptors");
  handshake.ring = std::move(message.descriptors[ENGRAM_FD_RING]);
  handshake.arena = std::move(message.descriptors[ENGRAM_FD_ARENA]);
  handshake.state = std::move(message.descriptors[ENGRAM_FD_STATE]);
  handshake.doorbell = std::move(message.descriptors[ENGRAM_FD_DOORBELL]);
  if (!is_fixed_memory(handshake.ring.get(), welcome.geometry.ring_bytes) ||
      !is_fixed_memory(handshake.arena.get(), welcome.geometry.arena_bytes) ||
      !is_fixed_memory(handshake.state.get(), welcome.state_bytes)) {
    return malformed(error, "a descriptor is no sealed memory of the announced size");
  }
  if (!is_eventfd(handshake.doorbell.get())) return malformed(error, "the doorbell is no eventfd");
  // A full doorbell must not block a submission.
  const int flags = ::fcntl(handshake.doorbell.get(), F_GETFL);
  ::fcntl(handshake.doorbell.get(), F_SETFL, flags | O_NONBLOCK);
  const UniqueFd catalogue = std::move(message.descriptors[ENGRAM_FD_CATALOGUE]);
  return Catalogue::read(catalogue.get(), welcome.catalogue_bytes, handshake.catalogue, error);
}

}  // namespace

int shake_hands(const char* path, const engram_connect_options& options, Handshake& handshake, engram_error* error) {
  const Deadline deadline(options.timeout_ms != 0 ? options.timeout_ms : kDefaultTimeoutMs);
  if (const int status = open_socket(path, deadline, handshake.socket, error)) return status;
  engram_hello hello{};
  hello.message = {ENGRAM_MESSAGE_MAGIC, ENGRAM_PROTOCOL_VERSION, ENGRAM_KIND_HELLO, sizeof hello, 0};
  if ((options.flags & ENGRAM_CONNECT_STREAM_SLOTS) != 0) hello.message.flags |= ENGRAM_HELLO_STREAM_SLOTS;
  if ((options.flags & ENGRAM_CONNECT_WRITABLE_ARENA) != 0) hello.message.flags |= ENGRAM_HELLO_WRITABLE_ARENA;
  hello.version_min = ENGRAM_PROTOCOL_VERSION;
  hello.version_max = ENGRAM_PROTOCOL_VERSION;
  hello.arena_bytes = options.arena_bytes;
  const char* name = options.client_name != nullptr ? options.client_name : program_invocation_short_name;
  std::snprintf(hello.client_name, sizeof hello.client_name, "%s", name);
  const int socket = handshake.socket.get();
  if (const int status = send(socket, &hello, sizeof hello, deadline, error)) return status;
  Message message;
  if (const int status = receive(socket, deadline, message, error)) return status;
  return take_welcome(message, handshake, error);
}

int send_mapped(int socket, engram_error* error) {
  const engram_message mapped{ENGRAM_MESSAGE_MAGIC, ENGRAM_PROTOCOL_VERSION, ENGRAM_KIND_MAPPED, sizeof mapped, 0};
  int status;
  while ((status = send(socket, &mapped, sizeof mapped, Deadline(kDefaultTimeoutMs), error)) == ENGRAM_CLIENT_AGAIN) {
    continue;
  }
  return status;
}

}  // namespace engram
