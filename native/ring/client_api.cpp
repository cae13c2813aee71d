// The C interface over Session; see engram/client.h. No exception crosses it.
#include <algorithm>
#include <exception>

#include "engram/client.h"
#include "ring/error.h"
#include "ring/fetch.h"
#include "ring/session.h"

using engram::Catalogue;
using engram::Session;
using engram::Submission;

namespace {

// engram_session is never defined: a handle is the address of a Session.
Session& of(engram_session* session) {
  return *reinterpret_cast<Session*>(session);
}
const Session& of(const engram_session* session) {
  return *reinterpret_cast<const Session*>(session);
}

}  // namespace

extern "C" {

engram_session* engram_connect(const char* path, const engram_connect_options* options, engram_error* error) {
  try {
    const engram_connect_options defaults{.arena_bytes = 0, .timeout_ms = 0, .spin_us = -1, .client_name = nullptr};
    return reinterpret_cast<engram_session*>(Session::connect(path, options != nullptr ? *options : defaults, error));
  } catch (const std::exception& exception) {
    engram::fail(error, ENGRAM_CLIENT_SYSTEM, 0, "cannot open a session: %s", exception.what());
    return nullptr;
  }
}

void engram_session_close(engram_session* session) {
  of(session).close();
}

void engram_session_free(engram_session* session) {
  if (session != nullptr) of(session).free();
}

int engram_session_check(engram_session* session, engram_error* error) {
  return of(session).check(error);
}

const engram_welcome* engram_session_welcome(const engram_session* session) {
  return &of(session).welcome();
}

void engram_session_read_usage(engram_session* session, engram_session_usage* usage) {
  of(session).read_usage(*usage);
}

void engram_session_read_totals(engram_session* session, engram_session_totals* totals) {
  of(session).totals().read(*totals);
}

uint32_t engram_session_layers(engram_session* session, engram_catalogue_record* records, uint32_t capacity) {
  return of(session).with_catalogue([&](const Catalogue& catalogue) {
    const auto& all = catalogue.records();
    std::copy_n(all.begin(), std::min<std::size_t>(capacity, all.size()), records);
    return static_cast<uint32_t>(all.size());
  });
}

int64_t engram_session_head_sizes(engram_session* session, uint32_t handle, int64_t* sizes, uint32_t capacity) {
  return of(session).with_catalogue([&](const Catalogue& catalogue) -> int64_t {
    const auto* all = catalogue.head_sizes(handle);
    if (all == nullptr) return -1;
    std::copy_n(all->begin(), std::min<std::size_t>(capacity, all->size()), sizes);
    return static_cast<int64_t>(all->size());
  });
}

int engram_session_refresh(engram_session* session, engram_error* error) {
  try {
    return of(session).refresh(error);
  } catch (const std::exception& exception) {
    return engram::fail(error, ENGRAM_CLIENT_SYSTEM, 0, "cannot read the catalogue: %s", exception.what());
  }
}

uint64_t engram_session_ticket_rows(const engram_session* session, uint32_t row_bytes) {
  return of(session).ticket_rows(row_bytes);
}

int64_t engram_submit(engram_session* session, const engram_layer* layer, const void* ids, uint32_t id_bytes,
                      uint64_t row_count, uint32_t layout, int32_t wait_ms, engram_error* error) {
  Submission submission{};
  submission.layer = layer;
  submission.ids = ids;
  submission.row_count = row_count;
  submission.id_bytes = id_bytes;
  submission.layout = layout;
  return of(session).submit(submission, wait_ms, error);
}

const void* engram_wait(engram_session* session, int64_t ticket, int32_t timeout_ms, engram_error* error) {
  return of(session).wait(ticket, timeout_ms, error);
}

int engram_resubmit(engram_session* session, int64_t ticket, const engram_layer* layer, engram_error* error) {
  return of(session).resubmit(ticket, *layer, error);
}

void engram_release(engram_session* session, int64_t ticket) {
  of(session).release(ticket);
}

int engram_fetch_run(engram_session* session, engram_fetch* fetch, int32_t timeout_ms, engram_error* error) {
  return engram::run_fetch(of(session), *fetch, timeout_ms, error);
}

void engram_fetch_cancel(engram_session* session, engram_fetch* fetch) {
  engram::cancel_fetch(of(session), *fetch);
}

int64_t engram_find_bad_id(const void* ids, uint32_t id_bytes, uint64_t count, uint64_t rows) {
  return engram::find_bad_id(ids, id_bytes, count, rows);
}

}  // extern "C"
