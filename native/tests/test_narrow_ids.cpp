#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "ring/narrow_ids.h"

TEST_CASE("ids that fit in four bytes arrive unchanged, whatever the number") {
  for (const std::uint64_t count : {0, 1, 15, 16, 17, 511, 512, 513, 2000}) {
    std::vector<std::int64_t> ids(count);
    std::iota(ids.begin(), ids.end(), -1);
    if (count > 1) ids.back() = INT32_MAX;
    std::vector<std::int32_t> narrow(count + 1, 77);
    REQUIRE(engram::narrow_ids(ids.data(), count, narrow.data()));
    for (std::uint64_t i = 0; i < count; ++i) REQUIRE(narrow[i] == ids[i]);
    CHECK(narrow[count] == 77);
  }
}

TEST_CASE("one id that does not fit is noticed, wherever it stands") {
  const std::int64_t wide[] = {std::int64_t{INT32_MAX} + 1,
                               std::int64_t{INT32_MIN} - 1,
                               std::int64_t{1} << 32,
                               (std::int64_t{1} << 32) - 1,
                               INT64_MAX,
                               INT64_MIN};
  for (const std::int64_t id : wide) {
    for (const std::uint64_t position : {0, 1, 511, 512, 1299}) {
      std::vector<std::int64_t> ids(1300, 5);
      ids[position] = id;
      std::vector<std::int32_t> narrow(1300);
      CHECK_FALSE(engram::narrow_ids(ids.data(), ids.size(), narrow.data()));
    }
  }
}
