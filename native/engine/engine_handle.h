// What the C ABI calls an engine, and how its functions keep exceptions inside: shared by the files that implement it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "engine/engine.h"

struct engram_engine {
  std::unique_ptr<engram::Engine> engine;
};

namespace engram {

inline void put_text(const std::string& text, char* error, std::uint64_t error_bytes) {
  if (error == nullptr || error_bytes == 0) return;
  const std::size_t bytes = std::min<std::size_t>(text.size(), error_bytes - 1);
  std::memcpy(error, text.data(), bytes);
  error[bytes] = '\0';
}

// Runs a function that returns a status and may fill in a sentence.
template <typename Function>
int guarded(char* error, std::uint64_t error_bytes, Function&& function) {
  std::string text;
  int status = -1;
  try {
    status = function(text);
  } catch (const std::bad_alloc&) {
    text = "out of memory";
  } catch (const std::exception& failure) {
    text = failure.what();
  }
  if (status != 0) put_text(text, error, error_bytes);
  return status;
}

}  // namespace engram
