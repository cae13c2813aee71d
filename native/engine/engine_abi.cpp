// The C ABI of the engine. No exception leaves it: what can throw here is memory and threads running out.
#include "engine/engine_handle.h"
#include "io/fault_reader.h"

using engram::guarded;
using engram::put_text;

extern "C" {

engram_engine* engram_engine_create(const engram_engine_options* options, char* error, uint64_t error_bytes) {
  engram_engine* made = nullptr;
  guarded(error, error_bytes, [&](std::string& text) {
    auto engine = engram::Engine::create(*options, text);
    if (engine == nullptr) return -1;
    made = new engram_engine{std::move(engine)};
    return 0;
  });
  return made;
}

int engram_engine_add_layers(engram_engine* engine, const engram_layer_options* options, uint64_t count,
                             const uint32_t* replaced, uint64_t replaced_count, uint32_t* handles, char* error,
                             uint64_t error_bytes) {
  return guarded(error, error_bytes, [&](std::string& text) {
    return engine->engine->add_layers({options, count}, {replaced, replaced_count}, handles, text) ? 0 : -1;
  });
}

int engram_engine_start(engram_engine* engine, char* error, uint64_t error_bytes) {
  return guarded(error, error_bytes, [&](std::string& text) { return engine->engine->start(text) ? 0 : -1; });
}

int engram_engine_retire_layer(engram_engine* engine, uint32_t handle, uint32_t timeout_ms) {
  return guarded(nullptr, 0,
                 [&](std::string&) { return static_cast<int>(engine->engine->retire_layer(handle, timeout_ms)); });
}

int engram_engine_place(engram_engine* engine, uint64_t dram_bytes, char* error, uint64_t error_bytes) {
  return guarded(error, error_bytes,
                 [&](std::string& text) { return engine->engine->place(dram_bytes, text) ? 0 : -1; });
}

int engram_engine_set_policy(engram_engine* engine, uint32_t handle, const engram_layer_policy* policy) {
  return guarded(nullptr, 0,
                 [&](std::string&) { return static_cast<int>(engine->engine->set_policy(handle, *policy)); });
}

int engram_engine_map_layer(engram_engine* engine, uint32_t handle, engram_resident_memory* memory, char* error,
                            uint64_t error_bytes) {
  return guarded(error, error_bytes,
                 [&](std::string& text) { return engine->engine->map_layer(handle, memory, text) ? 0 : -1; });
}

int engram_engine_unmap_layer(engram_engine* engine, uint32_t handle) {
  return guarded(nullptr, 0, [&](std::string&) { return static_cast<int>(engine->engine->unmap_layer(handle)); });
}

int engram_engine_check_place(engram_engine* engine, uint64_t dram_bytes, char* error, uint64_t error_bytes) {
  return guarded(error, error_bytes,
                 [&](std::string& text) { return engine->engine->check_place(dram_bytes, text) ? 0 : -1; });
}

uint64_t engram_engine_hot_rows(engram_engine* engine, uint32_t handle, uint64_t* cursor, uint64_t* rows,
                                uint64_t capacity) {
  return engine->engine->hot_rows(handle, cursor, rows, capacity);
}

int engram_engine_warm(engram_engine* engine, uint32_t handle, const uint64_t* rows, uint32_t count,
                       uint32_t timeout_ms) {
  return guarded(nullptr, 0,
                 [&](std::string&) { return static_cast<int>(engine->engine->warm(handle, rows, count, timeout_ms)); });
}

int engram_engine_state_descriptor(engram_engine* engine) {
  return engine->engine->shared().state->descriptor();
}

int engram_engine_event_descriptor(engram_engine* engine) {
  return engine->engine->shared().events.descriptor();
}

int engram_engine_next_event(engram_engine* engine, engram_event* event) {
  return engine->engine->shared().events.pop(event) ? 1 : 0;
}

int engram_engine_open_session(engram_engine* engine, int64_t pid, uint32_t uid, uint64_t arena_bytes, uint32_t flags,
                               engram_welcome* welcome, engram_session_descriptors* descriptors, char* error,
                               uint64_t error_bytes) {
  return guarded(error, error_bytes, [&](std::string& text) {
    return static_cast<int>(engine->engine->open_session(pid, uid, arena_bytes, flags, welcome, descriptors, text));
  });
}

int engram_engine_start_session(engram_engine* engine, uint64_t session, char* error, uint64_t error_bytes) {
  return guarded(error, error_bytes,
                 [&](std::string& text) { return static_cast<int>(engine->engine->start_session(session, text)); });
}

void engram_engine_close_session(engram_engine* engine, uint64_t session) {
  guarded(nullptr, 0, [&](std::string&) {
    engine->engine->close_session(session);
    return 0;
  });
}

int engram_engine_submit(engram_engine* engine, const engram_request* request, const void* ids, uint64_t tag,
                         engram_completion* completion) {
  return guarded(nullptr, 0, [&](std::string&) {
    return static_cast<int>(engine->engine->submit(*request, ids, tag, completion));
  });
}

int engram_engine_completion_descriptor(engram_engine* engine) {
  return engine->engine->shared().completions.descriptor();
}

int engram_engine_next_completion(engram_engine* engine, engram_completion* completion) {
  return engine->engine->next_completion(completion) ? 1 : 0;
}

void engram_rows_free(uint8_t* rows) {
  engram::FreeRows{}(rows);
}

uint64_t engram_engine_layer_counters(engram_engine* engine, engram_layer_counters* counters, uint64_t capacity) {
  return engine->engine->layer_counters(counters, capacity);
}

uint64_t engram_engine_session_counters(engram_engine* engine, engram_session_counters* counters, uint64_t capacity) {
  return engine->engine->session_counters(counters, capacity);
}

uint64_t engram_engine_budget_bytes(const engram_engine* engine) {
  return engine->engine->budget_bytes();
}

void engram_engine_read_counters(engram_engine* engine, engram_engine_counters* counters) {
  guarded(nullptr, 0, [&](std::string&) {
    engine->engine->read_counters(counters);
    return 0;
  });
}

uint64_t engram_engine_latency_histogram(engram_engine* engine, uint32_t latency_class, engram_latency_bucket* buckets,
                                         uint64_t capacity, uint64_t* sum_ns) {
  return engine->engine->latency_histogram(latency_class, buckets, capacity, sum_ns);
}

uint64_t engram_fault_report(char* text, uint64_t text_bytes) {
  const std::string report = engram::fault_report();
  put_text(report, text, text_bytes);
  return report.size();
}

int engram_engine_drain(engram_engine* engine, uint32_t timeout_ms) {
  return engine->engine->drain(timeout_ms) ? 0 : -1;
}

void engram_engine_destroy(engram_engine* engine) {
  delete engine;
}

}  // extern "C"
