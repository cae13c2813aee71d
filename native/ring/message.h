// Messages on the ring socket as a client sends and receives them: whole ones, within a deadline, their descriptors
// owned from the first moment on. Nothing that arrives is believed before it has been checked here or by the caller.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/unique_fd.h"
#include "engram/client.h"

namespace engram {

class Deadline {
 public:
  explicit Deadline(uint32_t timeout_ms);
  // Rounded up, so that 0 means that it has passed.
  int left_ms() const;

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

// Fills `error` in: the other side breaks the protocol.
int malformed(engram_error* error, const char* what);

// Whether the process that listens at the other end is on its way out. Its sockets go after its memory, which takes
// seconds for a large daemon, and until then connections are made that nobody will ever accept. False where that cannot
// be seen: without /proc, or with the daemon in another pid namespace.
bool is_peer_exiting(int socket);
int fail_of_exiting_peer(engram_error* error);

// 0, or a status with `error` filled in: ENGRAM_CLIENT_AGAIN where a signal came, ENGRAM_STATUS_TIMEOUT at the
// deadline, ENGRAM_STATUS_LOST where the daemon is gone.
int send(int socket, const void* bytes, std::size_t size, const Deadline& deadline, engram_error* error);
// The same for one message, whose header is right then. After any failure but these three `message` has come, as far as
// it could be taken.
int receive(int socket, const Deadline& deadline, Message& message, engram_error* error);
bool has_message(int socket);

// Checks a message's kind and size; a refusal in its place becomes a status and a sentence of its own.
int expect(const Message& message, uint16_t kind, std::size_t size, engram_error* error);

// A memory file that can shrink could end this process with SIGBUS, so it must be sealed against that.
bool is_fixed_memory(int fd, uint64_t bytes);

inline bool is_inside(uint64_t offset, uint64_t bytes, uint64_t whole) {
  return offset <= whole && bytes <= whole - offset;
}

}  // namespace engram
