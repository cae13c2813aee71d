#include "engine/row_sampler.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <map>
#include <new>

#include "cache/row_sample.h"
#include "cache/sample_filter.h"
#include "common/masked_thread.h"
#include "engine/layer.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::uint64_t kSourceSamples = 1u << 16;  // of one worker between two rounds of the thread
constexpr int kNiceness = 10;
constexpr std::uint32_t kBlockRows = 4096;
constexpr auto kPeriod = std::chrono::milliseconds(50);
constexpr auto kIdlePeriod = std::chrono::milliseconds(500);
constexpr std::int64_t kRecordingLeaseNs = 30'000'000'000;
constexpr std::uint64_t kMaxRecordedSamples = 1u << 24;
constexpr std::size_t kMaxPoints = 64;
constexpr std::uint64_t kMinImitatedRows = 256;  // below, a handful of reserved slots would tell in the result
// The highest sampling rate of the curve. A sampled row is looked up in every imitated cache, about two microseconds:
// 1/1024 keeps that to 2 ns of a background thread for each row served. Tables of few rows, which are demonstrations,
// are sampled more densely, so that they have a curve at all.
constexpr std::uint64_t kCurveThreshold = kSampleAll / 1024;
constexpr std::uint64_t kCurveTableRows = 1u << 13;

}  // namespace

RowSampler::RowSampler(std::uint32_t workers) : workers_(workers), sources_(new Source[workers]) {}

void RowSampler::observe(std::uint32_t worker, const Layer& layer, const std::int64_t* ids, std::uint32_t count,
                         std::uint64_t zeros) {
  Source& source = sources_[worker];
  source.lookups.add(count - zeros);
  // Acquire: the rings were made before the threshold was set.
  const std::uint64_t threshold = threshold_.load(std::memory_order_acquire);
  if (threshold == 0) return;
  const std::uint32_t salt = sample_salt(layer.handle);
  std::uint16_t positions[kBlockRows];
  for (std::uint32_t begin = 0; begin < count; begin += kBlockRows) {
    const std::uint32_t size = std::min(kBlockRows, count - begin);
    const std::uint32_t found =
        filter_sample(ids + begin, size, salt, static_cast<std::uint32_t>(threshold - 1), positions);
    if (found == 0) continue;
    const std::uint64_t written = source.written.load(std::memory_order_relaxed);
    const std::uint64_t room = kSourceSamples - (written - source.read.load(std::memory_order_acquire));
    const auto fitting = static_cast<std::uint32_t>(std::min<std::uint64_t>(found, room));
    for (std::uint32_t i = 0; i < fitting; ++i) {
      const auto row = static_cast<std::uint64_t>(ids[begin + positions[i]]);
      source.samples[(written + i) % kSourceSamples] = {row_key(layer.handle, row), layer.row_bytes,
                                                        sample_hash(salt, row)};
    }
    source.written.store(written + fitting, std::memory_order_release);
    if (fitting < found) source.lost.add(found - fitting);
  }
  if (!samples_waiting_.load(std::memory_order_relaxed)) {
    samples_waiting_.store(true, std::memory_order_relaxed);
    wake_.notify_one();
  }
}

bool RowSampler::start_curve(const std::vector<const Layer*>& layers, std::uint32_t simulated_rows,
                             std::string& error) {
  const std::lock_guard lock(mutex_);
  std::map<std::uint32_t, std::uint64_t> rows_of_size;
  std::uint64_t all_bytes = 0;
  std::uint64_t all_rows = 0;
  for (const Layer* layer : layers) {
    rows_of_size[layer->row_bytes] += layer->rows;
    all_bytes += layer->bytes();
    all_rows += layer->rows;
  }
  std::uint64_t highest =
      std::max(kCurveThreshold, kSampleAll / std::max<std::uint64_t>(1, all_rows / kCurveTableRows));
  highest = std::min(highest, kSampleAll);
  // 1 and 1.5 times each power of two, and everything.
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t power = std::bit_floor(all_bytes / 512 + 1); power < all_bytes; power *= 2) {
    for (const std::uint64_t bytes : {power, power + power / 2}) {
      if (bytes < all_bytes) sizes.push_back(bytes);
    }
  }
  sizes.push_back(all_bytes);
  std::vector<Point> curve;
  for (const std::uint64_t bytes : sizes) {
    Point point;
    for (const auto& [row_bytes, rows] : rows_of_size) {
      const double share = static_cast<double>(rows) * row_bytes / static_cast<double>(all_bytes);
      const auto capacity = static_cast<std::uint64_t>(static_cast<double>(bytes) * share / row_bytes);
      const std::uint64_t fitting =
          capacity <= simulated_rows ? kSampleAll : kSampleAll * simulated_rows / std::max<std::uint64_t>(capacity, 1);
      const std::uint64_t threshold = std::min(highest, std::max<std::uint64_t>(fitting, 1));
      const std::uint64_t imitated = capacity * threshold / kSampleAll;
      if (imitated < kMinImitatedRows) break;
      point.imitations.push_back({row_bytes, threshold, std::make_unique<CacheSimulation>(imitated)});
      point.rows += capacity;
      point.bytes += capacity * row_bytes;
      if (!point.imitations.back().cache->valid()) {
        error = "no memory for the miss curve";
        return false;
      }
    }
    if (point.imitations.size() == rows_of_size.size() && curve.size() < kMaxPoints) curve.push_back(std::move(point));
  }
  std::vector<std::size_t> references(rows_of_size.size(), 0);
  for (std::size_t i = 0; i < curve.size(); ++i) {
    for (std::size_t size = 0; size < references.size(); ++size) {
      if (curve[i].imitations[size].threshold == curve[0].imitations[size].threshold) references[size] = i;
    }
  }
  collect();  // what was asked for before belongs to the curve that ends here
  references_ = std::move(references);
  curve_ = std::move(curve);
  lookups_before_curve_ = sum(&Source::lookups);
  lost_before_curve_ = sum(&Source::lost);
  start_thread();
  set_threshold();
  return true;
}

std::uint64_t RowSampler::read_curve(engram_curve_point* points, std::uint64_t capacity) {
  const std::lock_guard lock(mutex_);
  collect();
  const std::uint64_t lookups_now = sum(&Source::lookups) - lookups_before_curve_;
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(capacity, curve_.size()); ++i) {
    engram_curve_point& out = points[i];
    out = {};
    out.rows = curve_[i].rows;
    out.row_capacity_bytes = curve_[i].bytes;
    out.lookups = lookups_now;
    out.lost = sum(&Source::lost) - lost_before_curve_;
    for (std::size_t size = 0; size < curve_[i].imitations.size(); ++size) {
      const Imitation& imitation = curve_[i].imitations[size];
      const Imitation& reference = curve_[references_[size]].imitations[size];
      const auto scaled = [](std::uint64_t misses, std::uint64_t threshold) {
        return static_cast<double>(misses) * static_cast<double>(kSampleAll) / static_cast<double>(threshold);
      };
      double misses = scaled(imitation.misses, imitation.threshold);
      if (i > references_[size] && imitation.reference_misses > 0) {
        misses = static_cast<double>(imitation.misses) / static_cast<double>(imitation.reference_misses) *
                 scaled(reference.misses, reference.threshold);
      }
      out.sampled += imitation.sampled;
      out.misses += misses;
    }
  }
  return curve_.size();
}

bool RowSampler::start_recording(std::uint64_t threshold, std::uint64_t capacity, std::string& error) {
  const std::lock_guard lock(mutex_);
  if (recording_.threshold != 0) {
    error = "a recording runs already";
    return false;
  }
  if (threshold == 0 || threshold > kSampleAll || capacity == 0 || capacity > kMaxRecordedSamples) {
    error = "a recording takes a share of 1 to 2^32 and a buffer of at most " + std::to_string(kMaxRecordedSamples) +
            " samples";
    return false;
  }
  recording_ = {};
  recording_.threshold = threshold;
  recording_.capacity = capacity;
  recording_.lookups_before = sum(&Source::lookups);
  recording_.lost_before = sum(&Source::lost);
  recording_.looked_after_ns = monotonic_ns();
  start_thread();
  set_threshold();
  return true;
}

std::int64_t RowSampler::take_samples(std::uint64_t threshold, std::uint64_t* keys, std::uint64_t capacity,
                                      engram_record_state* state) {
  const std::lock_guard lock(mutex_);
  collect();
  Recording& recording = recording_;
  if (recording.threshold == 0) return -1;
  recording.looked_after_ns = monotonic_ns();
  const std::uint64_t count = std::min<std::uint64_t>(capacity, recording.keys.size() - recording.taken);
  std::copy_n(recording.keys.begin() + static_cast<std::ptrdiff_t>(recording.taken), count, keys);
  recording.taken += count;
  if (recording.taken == recording.keys.size()) {
    recording.keys.clear();
    recording.taken = 0;
  }
  if (threshold != 0 && threshold < recording.threshold) {
    recording.threshold = threshold;
    set_threshold();
  }
  state->lookups = sum(&Source::lookups) - recording.lookups_before;
  state->lost = recording.lost + sum(&Source::lost) - recording.lost_before;
  state->left = recording.keys.size() - recording.taken;
  return static_cast<std::int64_t>(count);
}

void RowSampler::stop_recording() {
  const std::lock_guard lock(mutex_);
  end_recording();
}

void RowSampler::end_recording() {
  recording_ = {};
  set_threshold();
}

void RowSampler::set_threshold() {
  std::uint64_t threshold = recording_.threshold;
  for (const Point& point : curve_) {
    for (const Imitation& imitation : point.imitations) threshold = std::max(threshold, imitation.threshold);
  }
  threshold_.store(threshold, std::memory_order_release);
}

std::uint64_t RowSampler::sum(Counter Source::*counter) const {
  std::uint64_t sum = 0;
  for (std::uint32_t worker = 0; worker < workers_; ++worker) sum += (sources_[worker].*counter).read();
  return sum;
}

void RowSampler::start_thread() {
  for (std::uint32_t worker = 0; worker < workers_; ++worker) {
    if (sources_[worker].samples == nullptr) sources_[worker].samples.reset(new Sample[kSourceSamples]);
  }
  if (thread_.joinable()) return;
  thread_ = masked_thread([this] { run(); });
}

void RowSampler::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// Waits for samples and lets them gather for a period. A wake-up may slip through between the test and the wait, which
// therefore ends by itself too.
void RowSampler::run() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNiceness);
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, kIdlePeriod, [&] { return stop_ || samples_waiting_.load(std::memory_order_relaxed); });
    if (recording_.threshold != 0 && monotonic_ns() - recording_.looked_after_ns > kRecordingLeaseNs) end_recording();
    wake_.wait_for(lock, kPeriod, [&] { return stop_; });
    collect();
  }
}

void RowSampler::collect() {
  samples_waiting_.store(false, std::memory_order_relaxed);
  for (std::uint32_t worker = 0; worker < workers_; ++worker) {
    Source& source = sources_[worker];
    const std::uint64_t written = source.written.load(std::memory_order_acquire);
    std::uint64_t read = source.read.load(std::memory_order_relaxed);
    for (; read != written; ++read) feed(source.samples[read % kSourceSamples]);
    source.read.store(read, std::memory_order_release);
  }
}

void RowSampler::feed(const Sample& sample) {
  bool reference_missed = false;
  for (std::size_t i = 0; i < curve_.size(); ++i) {
    for (std::size_t size = 0; size < references_.size(); ++size) {
      Imitation& imitation = curve_[i].imitations[size];
      if (imitation.row_bytes != sample.row_bytes || sample.hash >= imitation.threshold) continue;
      const bool missed = !imitation.cache->look_up(sample.key);
      if (i == references_[size]) reference_missed = missed;
      ++imitation.sampled;
      imitation.misses += missed ? 1 : 0;
      imitation.reference_misses += reference_missed ? 1 : 0;
    }
  }
  if (recording_.threshold == 0 || sample.hash >= recording_.threshold) return;
  if (recording_.keys.size() - recording_.taken >= recording_.capacity) {
    ++recording_.lost;
  } else {
    recording_.keys.push_back(sample.key);
  }
}

}  // namespace engram
