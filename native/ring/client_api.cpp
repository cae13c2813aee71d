// The C interface over Session; see engram/client.h. No exception crosses it.
#include <strings.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
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
    const engram_connect_options defaults{
        .arena_bytes = 0, .timeout_ms = 0, .spin_us = -1, .client_name = nullptr, .flags = 0, .reserved = 0};
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

void engram_session_retain(engram_session* session) {
  of(session).add_reference();
}

void engram_session_drop(engram_session* session) {
  of(session).drop_reference();
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

void engram_session_read_memory(const engram_session* session, engram_session_memory* memory) {
  of(session).read_memory(*memory);
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

int engram_find_layer(engram_session* session, const char* name, uint32_t layer, const char* identity,
                      engram_layer* found, engram_error* error) {
  if (name == nullptr || found == nullptr) {
    return engram::fail(error, ENGRAM_CLIENT_ARGUMENT, EINVAL, "a layer needs the name of its table");
  }
  return of(session).with_catalogue([&](const Catalogue& catalogue) {
    for (const engram_catalogue_record& record : catalogue.records()) {
      if (record.layer != layer || std::strcmp(record.name, name) != 0) continue;
      char digits[2 * sizeof record.identity + 1];
      for (std::size_t i = 0; i < sizeof record.identity; ++i) {
        std::snprintf(digits + 2 * i, 3, "%02x", record.identity[i]);
      }
      if (identity != nullptr && ::strcasecmp(digits, identity) != 0) {
        return engram::fail(error, ENGRAM_CLIENT_ARGUMENT, 0, "table %s layer %u has identity %s, not %s", name, layer,
                            digits, identity);
      }
      *found = {record.handle, record.row_bytes, record.value_bytes, 0, record.rows};
      return 0;
    }
    return engram::fail(error, ENGRAM_STATUS_UNKNOWN_TABLE, 0, "the daemon serves no table %s with layer %u", name,
                        layer);
  });
}

int engram_session_refresh(engram_session* session, engram_error* error) {
  try {
    return of(session).refresh(error);
  } catch (const std::exception& exception) {
    return engram::fail(error, ENGRAM_CLIENT_SYSTEM, 0, "cannot read the catalogue: %s", exception.what());
  }
}

int engram_session_map(engram_session* session, uint32_t handle, engram_map* map, int* descriptor,
                       engram_error* error) {
  try {
    engram::UniqueFd file;
    const int status = of(session).map_layer(handle, *map, file, error);
    *descriptor = file.release();
    return status;
  } catch (const std::exception& exception) {
    return engram::fail(error, ENGRAM_CLIENT_SYSTEM, 0, "cannot map a layer: %s", exception.what());
  }
}

int engram_session_unmap(engram_session* session, uint32_t handle, engram_error* error) {
  return of(session).unmap_layer(handle, error);
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

int engram_lane_open(engram_session* session, const engram_layer* layer, uint32_t row_count, uint32_t id_bytes,
                     uint32_t layout, uint32_t deadline_ms, engram_lane* lane, engram_error* error) {
  try {
    return of(session).open_lane(*layer, row_count, id_bytes, layout, deadline_ms, *lane, error);
  } catch (const std::exception& exception) {
    return engram::fail(error, ENGRAM_CLIENT_SYSTEM, 0, "cannot open a lane: %s", exception.what());
  }
}

void engram_lane_close(engram_session* session, const engram_lane* lane) {
  of(session).close_lane(*lane);
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
