// The C ABI of a running engine's samples.
#include "engine/engine_handle.h"
#include "engram/sampling.h"

using engram::guarded;

extern "C" {

int engram_engine_start_curve(engram_engine* engine, uint32_t simulated_rows, char* error, uint64_t error_bytes) {
  return guarded(error, error_bytes, [&](std::string& text) {
    engram::EngineShared& shared = engine->engine->shared();
    std::vector<const engram::Layer*> layers;
    for (std::uint32_t handle = 1; shared.layer(handle) != nullptr; ++handle) {
      if (!shared.layer(handle)->retired()) layers.push_back(shared.layer(handle));
    }
    return shared.sampler->start_curve(layers, simulated_rows, text) ? 0 : -1;
  });
}

uint64_t engram_engine_read_curve(engram_engine* engine, engram_curve_point* points, uint64_t capacity) {
  return engine->engine->shared().sampler->read_curve(points, capacity);
}

int engram_engine_start_recording(engram_engine* engine, uint64_t threshold, uint64_t capacity, char* error,
                                  uint64_t error_bytes) {
  return guarded(error, error_bytes, [&](std::string& text) {
    return engine->engine->shared().sampler->start_recording(threshold, capacity, text) ? 0 : -1;
  });
}

int64_t engram_engine_take_samples(engram_engine* engine, uint64_t threshold, uint64_t* keys, uint64_t capacity,
                                   engram_record_state* state) {
  return engine->engine->shared().sampler->take_samples(threshold, keys, capacity, state);
}

void engram_engine_stop_recording(engram_engine* engine) {
  engine->engine->shared().sampler->stop_recording();
}

}  // extern "C"
