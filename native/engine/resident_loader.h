// Loads layers that are to be resident, in the background: large sequential reads, every row checked, one low-priority
// thread. A page that fails stays out; its rows go on being served from the drive (and fail there, until it is mended).
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "engine/event_queue.h"
#include "engine/layer.h"

namespace engram {

class ResidentLoader {
 public:
  struct Work {
    Layer* layer;
    std::shared_ptr<ResidentRows> rows;
  };

  ResidentLoader(std::vector<Work> work, EventQueue& events) : work_(std::move(work)), events_(events) {}
  ~ResidentLoader() { stop(); }

  void start();
  void stop();

 private:
  void run();
  void load(Layer& layer, ResidentRows& resident);
  std::uint64_t take_over(const Layer& layer, ResidentRows& resident);

  std::vector<Work> work_;
  EventQueue& events_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace engram
