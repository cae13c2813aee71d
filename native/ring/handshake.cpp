#include "ring/handshake.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>

#include "ring/error.h"
#include "ring/fork_registry.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr uint32_t kDefaultTimeoutMs = 5000;
constexpr std::size_t kMaxDescriptors = 16;  // received at most; more than a welcome has, so that too many are noticed
constexpr uint64_t kMaxMappedBytes = uint64_t{1} << 40;
constexpr uint64_t kMaxStateBytes = 1 << 20;
constexpr int kLookAtPeerMs = 20;
constexpr uint32_t kMaxRowBytes = 65536;

class Deadline {
 public:
  explicit Deadline(uint32_t timeout_ms) : end_ns_(monotonic_ns() + int64_t{timeout_ms} * 1'000'000) {}
  // Rounded up, so that 0 means that it has passed.
  int left_ms() const {
    return static_cast<int>(std::max<int64_t>(0, (end_ns_ - monotonic_ns() + 999'999) / 1'000'000));
  }

 private:
  int64_t end_ns_;
};

struct Message {
  alignas(8) std::array<std::byte, ENGRAM_MESSAGE_MAX_BYTES> bytes;
  std::size_t size = 0;
  std::vector<UniqueFd> descriptors;

  engram_message head() const {
    engram_message head;
    std::memcpy(&head, bytes.data(), sizeof head);
    return head;
  }
};

int malformed(engram_error* error, const char* what) {
  return fail(error, ENGRAM_CLIENT_PROTOCOL, 0, "the other side of the socket is no engramd of protocol version %d: %s",
              ENGRAM_PROTOCOL_VERSION, what);
}

// Whether the process that listens at the other end is on its way out. Its sockets go after its memory, which takes
// seconds for a large daemon, and until then connections are made that nobody will ever accept. False where that cannot
// be seen: without /proc, or with the daemon in another pid namespace.
bool is_peer_exiting(int socket) {
  constexpr unsigned kExiting = 0x4;  // PF_EXITING
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid <= 0) return false;
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", peer.pid);
  UniqueFd file;
  {
    const ForkPause pause;
    file = UniqueFd(::open(path, O_RDONLY | O_CLOEXEC));
  }
  char text[512];
  const ssize_t count = file ? ::read(file.get(), text, sizeof text - 1) : 0;
  if (count <= 0) return false;
  text[count] = 0;
  // Behind the name, which may hold anything: state, five numbers, flags.
  const char* rest = std::strrchr(text, ')');
  char state = 0;
  unsigned flags = 0;
  if (rest == nullptr || std::sscanf(rest + 1, " %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2) return false;
  return state == 'Z' || state == 'X' || (flags & kExiting) != 0;
}

int wait_for(int socket, short events, const Deadline& deadline, engram_error* error) {
  while (true) {
    pollfd poll_entry{socket, events, 0};
    const int left_ms = deadline.left_ms();
    const int ready = ::poll(&poll_entry, 1, std::min(left_ms, kLookAtPeerMs));
    if (ready > 0) return 0;
    if (ready < 0 && errno == EINTR) return fail(error, ENGRAM_CLIENT_AGAIN, EINTR, "interrupted by a signal");
    if (ready < 0) return fail(error, ENGRAM_CLIENT_SYSTEM, errno, "poll: %m");
    if (is_peer_exiting(socket)) return fail(error, ENGRAM_STATUS_LOST, 0, "the daemon has died, its memory is going");
    if (left_ms <= kLookAtPeerMs) return fail(error, ENGRAM_STATUS_TIMEOUT, 0, "the daemon did not answer in time");
  }
}

// Takes the descriptors out of the control data, each into an owner at once.
void collect_descriptors(msghdr& header, std::vector<UniqueFd>& descriptors) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      descriptors.emplace_back(fd);
    }
  }
}

int receive(int socket, const Deadline& deadline, Message& message, engram_error* error) {
  if (const int status = wait_for(socket, POLLIN, deadline, error)) return status;
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control;
  iovec part{message.bytes.data(), message.bytes.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  message.descriptors.reserve(kMaxDescriptors);
  const ssize_t got = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0) {
    const int status = errno == EINTR || errno == EAGAIN ? ENGRAM_CLIENT_AGAIN : ENGRAM_STATUS_LOST;
    return fail(error, status, errno, "the daemon hung up: %m");
  }
  collect_descriptors(header, message.descriptors);
  if (got == 0) return fail(error, ENGRAM_STATUS_LOST, 0, "the daemon hung up");
  message.size = static_cast<std::size_t>(got);
  if (header.msg_flags & MSG_TRUNC) return malformed(error, "its message is too long");
  if (header.msg_flags & MSG_CTRUNC) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    return fail(error, ENGRAM_CLIENT_SYSTEM, EMFILE,
                "could take only %zu of the daemon's descriptors: this process has reached its limit of %llu open "
                "files (ulimit -n); raise it or close some",
                message.descriptors.size(), static_cast<unsigned long long>(limit.rlim_cur));
  }
  if (message.size < sizeof(engram_message)) return malformed(error, "its message is too short");
  const engram_message head = message.head();
  if (head.magic != ENGRAM_MESSAGE_MAGIC) return malformed(error, "its message has the wrong magic number");
  if (head.bytes != message.size) return malformed(error, "its message has the wrong length");
  // A daemon of another version says so in a refusal, whose text is worth more than its number.
  if (head.version != ENGRAM_PROTOCOL_VERSION && head.kind != ENGRAM_KIND_REFUSED) {
    return fail(error, ENGRAM_CLIENT_PROTOCOL, 0, "the daemon speaks message version %u, this client %d", head.version,
                ENGRAM_PROTOCOL_VERSION);
  }
  return 0;
}

int send(int socket, const void* bytes, std::size_t size, const Deadline& deadline, engram_error* error) {
  if (const int status = wait_for(socket, POLLOUT, deadline, error)) return status;
  if (::send(socket, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(size)) return 0;
  const int status = errno == EINTR || errno == EAGAIN ? ENGRAM_CLIENT_AGAIN : ENGRAM_STATUS_LOST;
  return fail(error, status, errno, "the daemon hung up: %m");
}

bool has_message(int socket) {
  pollfd entry{socket, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

// Any message in an answer's place: a refusal becomes its own status and sentence.
int expect(const Message& message, uint16_t kind, std::size_t size, engram_error* error) {
  const engram_message head = message.head();
  if (head.kind == ENGRAM_KIND_REFUSED && message.size == sizeof(engram_refused)) {
    engram_refused refused;
    std::memcpy(&refused, message.bytes.data(), sizeof refused);
    refused.text[sizeof refused.text - 1] = 0;
    const bool known = refused.status > ENGRAM_STATUS_OK && refused.status < ENGRAM_STATUS_LOST;
    const int status = known ? static_cast<int>(refused.status) : ENGRAM_CLIENT_PROTOCOL;
    return fail(error, status, 0, "the daemon refused: %s", refused.text);
  }
  if (head.kind != kind) return malformed(error, "it sent another kind of message than the expected one");
  if (message.size != size) return malformed(error, "its message has the wrong length");
  return 0;
}

bool inside(uint64_t offset, uint64_t bytes, uint64_t whole) {
  return offset <= whole && bytes <= whole - offset;
}

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
  if (!inside(g.submit_offset, submit_bytes, g.ring_bytes) ||
      !inside(g.slots_offset, slots * ENGRAM_SLOT_BYTES, g.ring_bytes) ||
      !inside(g.ids_offset, g.ids_bytes, g.ring_bytes)) {
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

// A memory file that can shrink could end this process with SIGBUS, so it must be sealed against that.
bool is_fixed_memory(int fd, uint64_t bytes) {
  struct stat status;
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || static_cast<uint64_t>(status.st_size) < bytes) {
    return false;
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
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

namespace {

// Sends a request and receives its answer, on an open session's socket.
int ask(int socket, const Deadline& deadline, const void* request, std::size_t bytes, Message& answer,
        engram_error* error) {
  // What is there is a late answer to a request that was given up.
  while (has_message(socket)) {
    Message late;
    if (const int status = receive(socket, deadline, late, error)) return status;
  }
  if (const int status = send(socket, request, bytes, deadline, error)) return status;
  // A signal in between must not leave the answer for the next request to find, so the wait is repeated here.
  int status;
  while ((status = receive(socket, deadline, answer, error)) == ENGRAM_CLIENT_AGAIN) continue;
  return status;
}

const char* map_fault(const engram_map& map) {
  if (map.rows == 0 || map.rows > kMaxMappedBytes || map.row_bytes == 0 || map.row_bytes > kMaxRowBytes ||
      map.value_bytes > map.row_bytes || map.bytes > kMaxMappedBytes) {
    return "a mapped layer's geometry is out of range";
  }
  const uint64_t scale_bytes = map.rows * (map.row_bytes - map.value_bytes);
  const bool fits =
      map.row_layout == ENGRAM_LAYOUT_SPLIT
          ? map.rows * map.value_bytes <= map.scales_offset && inside(map.scales_offset, scale_bytes, map.bytes)
          : map.row_layout == ENGRAM_LAYOUT_PACKED && map.rows * map.row_bytes <= map.bytes;
  return fits ? nullptr : "a mapped layer's rows lie outside";
}

}  // namespace

int request_catalogue(int socket, uint32_t timeout_ms, Catalogue& catalogue, engram_error* error) {
  const engram_message request{ENGRAM_MESSAGE_MAGIC, ENGRAM_PROTOCOL_VERSION, ENGRAM_KIND_CATALOGUE_REQUEST,
                               sizeof request, 0};
  Message message;
  int status = ask(socket, Deadline(timeout_ms), &request, sizeof request, message, error);
  if (status != 0) return status;
  status = expect(message, ENGRAM_KIND_CATALOGUE, sizeof(engram_catalogue_message), error);
  if (status != 0) return status;
  engram_catalogue_message answer;
  std::memcpy(&answer, message.bytes.data(), sizeof answer);
  if (message.descriptors.size() != 1) return malformed(error, "it did not send one descriptor");
  return Catalogue::read(message.descriptors[0].get(), answer.catalogue_bytes, catalogue, error);
}

int request_map(int socket, uint32_t timeout_ms, uint32_t handle, engram_map& map, UniqueFd& file,
                engram_error* error) {
  engram_map_request request{};
  request.message = {ENGRAM_MESSAGE_MAGIC, ENGRAM_PROTOCOL_VERSION, ENGRAM_KIND_MAP_REQUEST, sizeof request, 0};
  request.handle = handle;
  Message message;
  int status = ask(socket, Deadline(timeout_ms), &request, sizeof request, message, error);
  if (status != 0) return status;
  status = expect(message, ENGRAM_KIND_MAP, sizeof map, error);
  if (status != 0) return status;
  std::memcpy(&map, message.bytes.data(), sizeof map);
  map.text[sizeof map.text - 1] = 0;
  if (map.status != ENGRAM_STATUS_OK) {
    const bool known = map.status > ENGRAM_STATUS_OK && map.status < ENGRAM_STATUS_LOST;
    return fail(error, known ? static_cast<int>(map.status) : ENGRAM_CLIENT_PROTOCOL, 0, "it cannot be mapped: %s",
                map.text);
  }
  if (map.handle != handle) return malformed(error, "it answered for another layer");
  if (const char* fault = map_fault(map)) return malformed(error, fault);
  if (message.descriptors.size() != 1) return malformed(error, "it did not send one descriptor");
  if (!is_fixed_memory(message.descriptors[0].get(), map.bytes)) {
    return malformed(error, "a descriptor is no sealed memory of the announced size");
  }
  file = std::move(message.descriptors[0]);
  return 0;
}

int send_unmap(int socket, uint32_t timeout_ms, uint32_t handle, engram_error* error) {
  engram_map_request request{};
  request.message = {ENGRAM_MESSAGE_MAGIC, ENGRAM_PROTOCOL_VERSION, ENGRAM_KIND_UNMAP, sizeof request, 0};
  request.handle = handle;
  return send(socket, &request, sizeof request, Deadline(timeout_ms), error);
}

}  // namespace engram
