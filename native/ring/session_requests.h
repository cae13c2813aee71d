// What an open session asks of its daemon over the socket: the catalogue, and maps of resident layers.
//
// Answers come in the order of the requests. So one that has not come in time is awaited before the next request is
// sent and is nobody's answer then; a map that it brings is given back, since the daemon counts it until it is told.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/unique_fd.h"
#include "engram/client.h"
#include "ring/catalogue.h"
#include "ring/message.h"

namespace engram {

// One thread at a time, but for is_owed_answer. All return 0, or a status with `error` filled in;
// ENGRAM_STATUS_TIMEOUT where no answer came.
class SessionRequests {
 public:
  int request_catalogue(int socket, uint32_t timeout_ms, Catalogue& catalogue, engram_error* error);
  // The status may also be that of the daemon's refusal.
  int request_map(int socket, uint32_t timeout_ms, uint32_t handle, engram_map& map, UniqueFd& file,
                  engram_error* error);
  // Says that the layer is mapped no more. No answer.
  int send_unmap(int socket, uint32_t timeout_ms, uint32_t handle, engram_error* error);

  // Whether an answer may still come that nobody waits for. Any thread.
  bool is_owed_answer() const { return is_owed_answer_.load(std::memory_order_relaxed); }
  // Deals with it where it has come; waits for nothing.
  void take_late_answer(int socket);

 private:
  int ask(int socket, const Deadline& deadline, const void* request, std::size_t bytes, Message& answer,
          engram_error* error);
  int take_answer(int socket, const Deadline& deadline, Message& answer, engram_error* error);
  void give_back(int socket, const Message& answer);

  std::atomic<bool> is_owed_answer_{false};
};

}  // namespace engram
