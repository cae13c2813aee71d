"""A client that minds its own business while others misbehave: `victim.py SOCKET TABLE_FILE LAYER`.

Fetches batches of 48 rows, compares each with the packed table's own file, and writes one JSON line with the latencies
since the line before whenever it reads one from standard input. Ends with its input; exit status 1 after a wrong row.
"""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path

import engram_client
import numpy as np

ROW_BYTES, ROWS_PER_PAGE, PAGE_BYTES = 264, 15, 4096


def main() -> int:
    pages = np.frombuffer(Path(sys.argv[2]).read_bytes(), np.uint8).reshape(-1, PAGE_BYTES)
    rows = pages[:, : ROW_BYTES * ROWS_PER_PAGE].reshape(-1, ROW_BYTES)
    chosen = np.random.default_rng(3)
    latencies_us: list[float] = []
    wrong = 0
    with engram_client.connect(sys.argv[1]) as client:
        table = client.table(layer=int(sys.argv[3]))
        print("ready", flush=True)
        while True:
            ids = chosen.integers(0, 2000, 48)
            begin = time.perf_counter()
            got = table.fetch(ids, timeout=60)
            latencies_us.append((time.perf_counter() - begin) * 1e6)
            wrong += not np.array_equal(got, rows[ids])
            if len(latencies_us) % 16 == 0:
                time.sleep(0.001)
            if select.select([sys.stdin], [], [], 0)[0]:
                if not sys.stdin.readline():
                    return 1 if wrong else 0
                p50, p99 = np.percentile(latencies_us, [50, 99])
                worst = max(latencies_us)
                print(
                    json.dumps({"count": len(latencies_us), "p50": p50, "p99": p99, "worst": worst, "wrong": wrong}),
                    flush=True,
                )
                latencies_us.clear()


if __name__ == "__main__":
    sys.exit(main())
