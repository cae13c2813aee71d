#include "ring/session_requests.h"

#include <cstring>
#include <utility>

#include "ring/error.h"

namespace engram {
namespace {

constexpr uint64_t kMaxMappedBytes = uint64_t{1} << 40;
constexpr uint32_t kMaxRowBytes = 65536;
constexpr uint32_t kGiveBackTimeoutMs = 1000;

const char* map_fault(const engram_map& map) {
  if (map.rows == 0 || map.rows > kMaxMappedBytes || map.row_bytes == 0 || map.row_bytes > kMaxRowBytes ||
      map.value_bytes > map.row_bytes || map.bytes > kMaxMappedBytes) {
    return "a mapped layer's geometry is out of range";
  }
  const uint64_t scale_bytes = map.rows * (map.row_bytes - map.value_bytes);
  const bool fits =
      map.row_layout == ENGRAM_LAYOUT_SPLIT
          ? map.rows * map.value_bytes <= map.scales_offset && is_inside(map.scales_offset, scale_bytes, map.bytes)
          : map.row_layout == ENGRAM_LAYOUT_PACKED && map.rows * map.row_bytes <= map.bytes;
  return fits ? nullptr : "a mapped layer's rows lie outside";
}

}  // namespace

int SessionRequests::ask(int socket, const Deadline& deadline, const void* request, std::size_t bytes, Message& answer,
                         engram_error* error) {
  if (is_owed_answer()) {
    Message late;
    if (const int status = take_answer(socket, deadline, late, error)) return status;
    give_back(socket, late);
  }
  int status;
  while ((status = send(socket, request, bytes, deadline, error)) == ENGRAM_CLIENT_AGAIN) continue;
  return status != 0 ? status : take_answer(socket, deadline, answer, error);
}

// A signal in between must not leave the answer for the next request to find, so the wait is repeated here.
int SessionRequests::take_answer(int socket, const Deadline& deadline, Message& answer, engram_error* error) {
  int status;
  while ((status = receive(socket, deadline, answer, error)) == ENGRAM_CLIENT_AGAIN) continue;
  is_owed_answer_.store(status == ENGRAM_STATUS_TIMEOUT, std::memory_order_relaxed);
  return status;
}

void SessionRequests::give_back(int socket, const Message& answer) {
  engram_map map;
  if (answer.size != sizeof map || answer.head().kind != ENGRAM_KIND_MAP) return;
  std::memcpy(&map, answer.bytes.data(), sizeof map);
  if (map.status == ENGRAM_STATUS_OK) send_unmap(socket, kGiveBackTimeoutMs, map.handle, nullptr);
}

void SessionRequests::take_late_answer(int socket) {
  if (!is_owed_answer() || !has_message(socket)) return;
  Message late;
  take_answer(socket, Deadline(0), late, nullptr);
  give_back(socket, late);
}

int SessionRequests::request_catalogue(int socket, uint32_t timeout_ms, Catalogue& catalogue, engram_error* error) {
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

int SessionRequests::request_map(int socket, uint32_t timeout_ms, uint32_t handle, engram_map& map, UniqueFd& file,
                                 engram_error* error) {
  engram_map_request request{};
  request.message = {ENGRAM_MESSAGE_MAGIC, ENGRAM_PROTOCOL_VERSION, ENGRAM_KIND_MAP_REQUEST, sizeof request, 0};
  request.handle = handle;
  Message message;
  int status = ask(socket, Deadline(timeout_ms), &request, sizeof request, message, error);
  if (status != 0) {
    give_back(socket, message);  // where its descriptor was too many for this process
    return status;
  }
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

int SessionRequests::send_unmap(int socket, uint32_t timeout_ms, uint32_t handle, engram_error* error) {
  engram_map_request request{};
  request.message = {ENGRAM_MESSAGE_MAGIC, ENGRAM_PROTOCOL_VERSION, ENGRAM_KIND_UNMAP, sizeof request, 0};
  request.handle = handle;
  return send(socket, &request, sizeof request, Deadline(timeout_ms), error);
}

}  // namespace engram
