#include "faults/fault_plan.h"

#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>

#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::array<const char*, kKinds> kNames = {"short", "eintr",       "eagain", "eio",   "flip",
                                                    "torn",  "misdirected", "layer",  "stale", "slow"};
constexpr std::int64_t kLookAgainNs = 20'000'000;  // at an @FILE

template <typename Number>
bool parse_number(std::string_view text, Number& number) {
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), number);
  return failure == std::errc{} && end == text.data() + text.size();
}

bool parse(const std::string& text, FaultPlan& plan, std::string& error) {
  std::stringstream list(text);
  std::string entry;
  while (std::getline(list, entry, ',')) {
    while (!entry.empty() && std::isspace(static_cast<unsigned char>(entry.back())) != 0) entry.pop_back();
    if (entry.empty()) continue;
    const std::size_t equals = entry.find('=');
    const std::string key = entry.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : entry.substr(equals + 1);
    bool good = false;
    if (key == "seed") {
      good = parse_number(value, plan.seed);
    } else if (key == "eio_at") {
      good = parse_number(value, plan.eio_at);
    } else if (key == "slow_ms") {
      good = parse_number(value, plan.slow_ms);
    } else if (key == "lasting") {
      good = parse_number(value, plan.lasting) && plan.lasting >= 0 && plan.lasting <= 1;
    } else if (key == "stale_file") {
      plan.stale_file = value;
      good = !value.empty();
    } else {
      const auto name = std::find(kNames.begin(), kNames.end(), key);
      if (name == kNames.end()) {
        error = "ENGRAMD_FAULTS: no fault is called '" + key + "'";
        return false;
      }
      double& rate = plan.rates[static_cast<std::size_t>(name - kNames.begin())];
      good = parse_number(value, rate) && rate >= 0 && rate <= 1;
    }
    if (!good) {
      error = "ENGRAMD_FAULTS: '" + value + "' is no value for " + key;
      return false;
    }
  }
  return true;
}

}  // namespace

bool Faults::prepare(std::string& error) {
  const char* given = std::getenv("ENGRAMD_FAULTS");
  std::string text = given != nullptr ? given : "";
  if (!text.empty() && text[0] == '@') {
    path_ = text.substr(1);
    std::ifstream file(path_);
    if (!file) {
      error = "ENGRAMD_FAULTS: " + path_ + " cannot be read";
      return false;
    }
    std::getline(file, text, '\0');
    remember_file();
  }
  const std::lock_guard lock(mutex_);
  return parse(text, plan_, error);
}

FaultPlan Faults::plan() {
  const std::lock_guard lock(mutex_);
  if (!path_.empty() && monotonic_ns() >= look_at_ns_) {
    look_at_ns_ = monotonic_ns() + kLookAgainNs;
    if (remember_file()) {
      std::ifstream file(path_);
      std::string text;
      std::getline(file, text, '\0');
      FaultPlan next;
      std::string error;
      if (parse(text, next, error)) plan_ = next;
    }
  }
  return plan_;
}

std::string Faults::report() const {
  std::string text;
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    text += (kind == 0 ? "" : " ") + std::string(kNames[kind]) + "=" + std::to_string(counts_[kind].load());
  }
  return text;
}

// Whether the file is another one than at the last look.
bool Faults::remember_file() {
  struct stat status {};
  if (stat(path_.c_str(), &status) != 0) return false;
  const std::int64_t mark = status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec;
  return std::exchange(mark_, mark) != mark;
}

Faults& faults() {
  static Faults all;
  return all;
}

}  // namespace engram
