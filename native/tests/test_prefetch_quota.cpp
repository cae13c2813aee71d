#include <doctest/doctest.h>

#include "engine/prefetch_quota.h"

using engram::PrefetchQuota;

TEST_CASE("a session's prefetches are bounded, and leave room for others") {
  PrefetchQuota quota;
  CHECK(quota.take(1, 60, 100));
  CHECK(quota.take(1, 40, 100));
  CHECK_FALSE(quota.take(1, 1, 100));
  CHECK(quota.take(2, 100, 100));
  CHECK(quota.queued() == 200);
  quota.give_back(1, 60);
  CHECK(quota.take(1, 60, 100));
  CHECK_FALSE(quota.take(1, 1, 100));
  quota.give_back(1, 100);
  quota.give_back(2, 100);
  CHECK(quota.queued() == 0);
  CHECK(quota.take(1, 100, 100));
}

TEST_CASE("all sessions together are bounded too, and the daemon's own prefetches by that alone") {
  PrefetchQuota quota;
  CHECK(quota.take(0, PrefetchQuota::kAllRows - 10, 100));
  CHECK_FALSE(quota.take(1, 11, 100));
  CHECK(quota.take(1, 10, 100));
  CHECK_FALSE(quota.take(0, 1, 100));
  quota.give_back(0, PrefetchQuota::kAllRows - 10);
  CHECK(quota.queued() == 10);
}
