// Requests made inside the daemon: the event loop's, which end with a completion, and those that a thread waits for.
#include <chrono>
#include <cstdlib>
#include <new>

#include "engine/engine.h"

namespace engram {
namespace {

constexpr std::uint32_t kMaxLocalRows = 1u << 20;

void put_completion(LocalRequest& local, engram_completion* completion) {
  *completion = {};
  completion->tag = local.tag;
  completion->failure = local.outcome;
  if (local.outcome.status != ENGRAM_STATUS_OK) return;
  completion->bytes = local.reply_bytes;
  completion->rows = local.reply.release();
}

}  // namespace

void Engine::start_local(const std::shared_ptr<LocalRequest>& local) {
  workers_[next_local_worker_.fetch_add(1) % workers_.size()]->add_local(local);
}

std::uint32_t Engine::run_local(const std::shared_ptr<LocalRequest>& local, std::uint32_t timeout_ms) {
  start_local(local);
  std::unique_lock lock(local->mutex);
  const auto is_done = [&] { return local->outcome.status != ENGRAM_STATUS_EMPTY; };
  if (!local->done.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_done)) return ENGRAM_STATUS_TIMEOUT;
  return local->outcome.status;
}

std::uint32_t Engine::submit(const engram_request& given, const void* ids, std::uint64_t tag,
                             engram_completion* completion) {
  *completion = {};
  const Layer* layer = shared_.layer(given.handle);
  if (layer == nullptr) return ENGRAM_STATUS_UNKNOWN_TABLE;
  if (given.row_count > kMaxLocalRows || (given.id_bytes != 4 && given.id_bytes != 8)) {
    return ENGRAM_STATUS_BAD_REQUEST;
  }
  const auto local = std::make_shared<LocalRequest>();
  local->request = given;
  local->request.ids_offset = 0;
  local->request.reply_offset = 0;
  local->tag = tag;
  const auto* bytes = static_cast<const std::uint8_t*>(ids);
  local->ids.assign(bytes, bytes + std::uint64_t{given.row_count} * given.id_bytes);
  if (given.operation == ENGRAM_OPERATION_FETCH && given.row_count != 0) {
    local->reply_bytes = std::uint64_t{given.row_count} * layer->row_bytes;
    local->reply.reset(static_cast<std::uint8_t*>(std::malloc(local->reply_bytes)));
    if (local->reply == nullptr) throw std::bad_alloc();
  }
  {
    const std::lock_guard lock(at_once_mutex_);
    if (at_once_->serve_at_once(local)) {
      put_completion(*local, completion);
      return 0;
    }
  }
  local->completions = &shared_.completions;
  start_local(local);
  return 0;
}

bool Engine::next_completion(engram_completion* completion) {
  std::shared_ptr<LocalRequest> local;
  if (!shared_.completions.pop(&local)) return false;
  put_completion(*local, completion);
  return true;
}

}  // namespace engram
