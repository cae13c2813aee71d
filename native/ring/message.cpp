#include "ring/message.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "ring/error.h"
#include "ring/fork_registry.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::size_t kMaxDescriptors = 16;  // received at most; more than a welcome has, so that too many are noticed
constexpr int kLookAtPeerMs = 5;

int wait_for(int socket, short events, const Deadline& deadline, engram_error* error) {
  while (true) {
    pollfd poll_entry{socket, events, 0};
    const int left_ms = deadline.left_ms();
    const int ready = ::poll(&poll_entry, 1, std::min(left_ms, kLookAtPeerMs));
    if (ready > 0) return 0;
    if (ready < 0 && errno == EINTR) return fail(error, ENGRAM_CLIENT_AGAIN, EINTR, "interrupted by a signal");
    if (ready < 0) return fail(error, ENGRAM_CLIENT_SYSTEM, errno, "poll: %m");
    if (is_peer_exiting(socket)) return fail_of_exiting_peer(error);
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

}  // namespace

Deadline::Deadline(uint32_t timeout_ms) : end_ns_(monotonic_ns() + int64_t{timeout_ms} * 1'000'000) {}

int Deadline::left_ms() const {
  return static_cast<int>(std::max<int64_t>(0, (end_ns_ - monotonic_ns() + 999'999) / 1'000'000));
}

int malformed(engram_error* error, const char* what) {
  return fail(error, ENGRAM_CLIENT_PROTOCOL, 0, "the other side of the socket is no engramd of protocol version %d: %s",
              ENGRAM_PROTOCOL_VERSION, what);
}

int fail_of_exiting_peer(engram_error* error) {
  return fail(error, ENGRAM_STATUS_LOST, 0, "the daemon has died, its memory is going");
}

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

bool is_fixed_memory(int fd, uint64_t bytes) {
  struct stat status;
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || static_cast<uint64_t>(status.st_size) < bytes) {
    return false;
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

}  // namespace engram
