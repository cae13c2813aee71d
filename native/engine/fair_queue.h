// A queue that serves its owners in turn: each pop takes the oldest item of the owner whose turn it is, so an owner
// with many items waiting keeps nobody else waiting. Made for few owners (the sessions of one worker).
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

namespace engram {

template <typename Item>
class FairQueue {
 public:
  bool empty() const { return owners_.empty(); }

  void push(std::uint64_t owner, Item item) {
    const auto place =
        std::find_if(owners_.begin(), owners_.end(), [owner](const Owner& one) { return one.id == owner; });
    if (place != owners_.end()) {
      place->items.push_back(std::move(item));
    } else {
      owners_.push_back({owner, {}});
      owners_.back().items.push_back(std::move(item));
    }
  }

  // The same item until it is popped.
  Item& front() { return owners_.front().items.front(); }

  void pop() {
    Owner owner = std::move(owners_.front());
    owners_.pop_front();
    owner.items.pop_front();
    if (!owner.items.empty()) owners_.push_back(std::move(owner));
  }

 private:
  struct Owner {
    std::uint64_t id;
    std::deque<Item> items;  // not empty
  };
  std::deque<Owner> owners_;  // the first one's turn
};

}  // namespace engram
