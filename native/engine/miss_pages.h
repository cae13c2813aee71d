// The pages that one batch has to read: each distinct page once, with the positions that wait for a row of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace engram {

struct MissPage {
  enum class State : std::uint8_t {
    waiting,  // not handed to the reader yet
    in_flight,
    arrived,  // read; `buffer` is kept while the batch may still add positions
    done,
    failed,
  };
  std::uint64_t page = 0;
  std::uint32_t first_row = 0;  // index + 1 into rows(); 0 = none
  std::uint32_t buffer = 0;
  std::int32_t error_number = 0;
  State state = State::waiting;
  bool read_again = false;  // a row's checksum failed after the first read
};

// A position of the batch that waits; a list per page.
struct MissRow {
  std::uint32_t position;
  std::uint32_t next;  // index + 1; 0 = end
};

class MissPages {
 public:
  void clear() {
    pages_.clear();
    rows_.clear();
    std::fill(table_.begin(), table_.end(), 0u);
  }
  bool empty() const { return pages_.empty(); }
  std::uint32_t size() const { return static_cast<std::uint32_t>(pages_.size()); }
  MissPage& at(std::uint32_t index) { return pages_[index]; }

  // The number of the page's entry, made where there is none.
  std::uint32_t find_or_add(std::uint64_t page) {
    if (pages_.size() * 2 >= table_.size()) grow();
    std::uint64_t place = home(page);
    while (table_[place] != 0) {
      if (pages_[table_[place] - 1].page == page) return table_[place] - 1;
      place = (place + 1) & (table_.size() - 1);
    }
    pages_.push_back({});
    pages_.back().page = page;
    table_[place] = static_cast<std::uint32_t>(pages_.size());
    return table_[place] - 1;
  }

  void add_row(std::uint32_t index, std::uint32_t position) {
    rows_.push_back({position, pages_[index].first_row});
    pages_[index].first_row = static_cast<std::uint32_t>(rows_.size());
  }

  // From here on only these positions wait for the page.
  void keep_rows(std::uint32_t index, const std::vector<std::uint32_t>& positions) {
    pages_[index].first_row = 0;
    for (const std::uint32_t position : positions) add_row(index, position);
  }

  // Calls visit(position) for each position that waits for the page.
  template <typename Visit>
  void visit_rows(const MissPage& page, Visit&& visit) const {
    for (std::uint32_t row = page.first_row; row != 0; row = rows_[row - 1].next) visit(rows_[row - 1].position);
  }

 private:
  std::uint64_t home(std::uint64_t page) const { return (page * 0x9E3779B97F4A7C15ull >> 20) & (table_.size() - 1); }
  void grow() {
    table_.assign(std::max<std::size_t>(64, table_.size() * 2), 0);
    for (std::uint32_t i = 0; i < pages_.size(); ++i) {
      std::uint64_t place = home(pages_[i].page);
      while (table_[place] != 0) place = (place + 1) & (table_.size() - 1);
      table_[place] = i + 1;
    }
  }

  std::vector<MissPage> pages_;
  std::vector<MissRow> rows_;
  std::vector<std::uint32_t> table_;  // open addressing; entry number + 1, or 0
};

}  // namespace engram
