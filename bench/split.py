"""What the split layout of resident rows costs a gather on the CPU: the engine's own copy loops, in this process.

    python bench/split.py [--rows N] [--repetitions N]

Uniform fresh ids; packed and split alternate, and what is printed are ratios of medians, split over packed. One thread.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from engramd._engine import ffi, lib

VALUE_BYTES, ROW_BYTES = 256, 264
BATCH_ROWS = (3072, 12288, 49152)
IDS = 49152 * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_300_000, help="rows of the table (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=15, help="of each measurement (default: %(default)s)")
    arguments = parser.parse_args()
    gather = lib.engram_bench_gather_create(arguments.rows, ROW_BYTES, max(BATCH_ROWS), 1)
    if gather == ffi.NULL:
        parser.error(f"no memory for {arguments.rows} rows")
    generator = np.random.default_rng(1)
    print("rows a batch   packed ns/row   split ns/row   split/packed")
    for batch_rows in BATCH_ROWS:
        packed, split = [], []
        for _ in range(arguments.repetitions):
            ids = generator.integers(0, arguments.rows, IDS)
            pointer = ffi.from_buffer("int64_t[]", ids)
            batches = IDS // batch_rows
            packed.append(lib.engram_bench_gather_run(gather, pointer, batch_rows, batches))
            split.append(lib.engram_bench_gather_run_split(gather, VALUE_BYTES, pointer, batch_rows, batches))
        nanoseconds = [statistics.median(times) / IDS * 1e9 for times in (packed, split)]
        ratio = nanoseconds[1] / nanoseconds[0]
        print(f"{batch_rows:12d}   {nanoseconds[0]:13.1f}   {nanoseconds[1]:12.1f}   {ratio:12.2f}")
    lib.engram_bench_gather_destroy(gather)


if __name__ == "__main__":
    main()
