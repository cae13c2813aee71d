"""Benchmarks: each figure beside the limit or the peer of the same run. `make bench` runs them."""
