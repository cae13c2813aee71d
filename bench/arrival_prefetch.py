"""What prefetch at arrival brings: the share of a prompt's first-chunk rows that are in DRAM when it is scheduled.

A queue of prompts is played against a real daemon whose cache starts cold: `queue` prompts wait at any moment, the
first of them is processed (its rows are fetched as one chunk, then its tokens take their time at `tokens_per_s`), and
a new one arrives. The same prompts are played without and with an ArrivalPrefetcher, in turns. What is in DRAM is what
the daemon counted (dram_hits of rows), rows that earlier prompts brought included, so both shares are whole answers.

Demand goes before prefetch, so where misses alone keep the drive busy nothing can be read ahead: 48 rows a token and a
share of misses of 0.7 make `tokens_per_s` x 34 reads a second, which should stay well below what the drive can do.

    .venv/bin/python -m bench.arrival_prefetch [--trace FILE.npz] [--budget-percent 10] [--queue 8]

Prompts are the trace's documents, or Python's own library, cut at `chunk` tokens. The table is a synthetic one with the
real geometry and fewer rows; it is made once, in --scratch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
from engram_client.hasher import NgramHasher
from engram_engines.prefetch import ArrivalPrefetcher

from bench.environment import Ids, Table, documents, hasher_for, make_table
from engramd.measure.daemon import Daemon, total


def cut_prompts(texts: list[Ids], chunk_tokens: int, wanted: int) -> list[Ids]:
    """The first `wanted` prompts of at least 16 and at most chunk_tokens tokens, one for each document."""
    return [text[:chunk_tokens] for text in texts if len(text) >= 16][:wanted]


def play(
    files: Table, hasher: NgramHasher, prompts: list[Ids], settings: argparse.Namespace, with_prefetch: bool
) -> dict[str, Any]:
    """One run from a cold cache. Shares, and the time that first-chunk fetches took."""
    budget_bytes = files.row_bytes() * settings.budget_percent // 100
    with Daemon(files.path, budget_bytes) as daemon, engram_client.connect(daemon.socket) as client:
        tables = [client.table(layer=layer) for layer in hasher.layer_ids]
        prefetcher = ArrivalPrefetcher(daemon.socket, hasher) if with_prefetch else None
        queue: deque[int] = deque()
        fetch_s: list[float] = []
        waiting = iter(range(len(prompts)))

        def arrive() -> None:
            number = next(waiting, None)
            if number is not None:
                queue.append(number)
                if prefetcher is not None:
                    prefetcher.arrived(number, prompts[number])

        for _ in range(settings.queue):
            arrive()
        # The first prompts have just arrived: the engine is busy with earlier ones, as it is later on.
        time.sleep(settings.queue * settings.chunk / settings.tokens_per_s / 2)
        while queue:
            number = queue.popleft()
            tokens = prompts[number]
            if prefetcher is not None:
                prefetcher.reached(number, len(tokens))
            ids = hasher.row_ids(tokens)
            began = time.perf_counter()
            tickets = [table.submit(np.ascontiguousarray(ids[:, i])) for i, table in enumerate(tables)]
            for ticket in tickets:
                with ticket:
                    ticket.wait()
            fetch_s.append(time.perf_counter() - began)
            arrive()
            time.sleep(len(tokens) / settings.tokens_per_s)
        stats = client.stats()
        counters = prefetcher.counters() if prefetcher is not None else {}
        if prefetcher is not None:
            prefetcher.close()
    rows = total(stats, "rows")
    return {
        "share_in_dram": total(stats, "dram_hits") / rows,
        "rows": rows,
        "fetch_ms_p50": statistics.median(fetch_s) * 1e3,
        "fetch_ms_p95": float(np.percentile(fetch_s, 95)) * 1e3,
        "prefetch_reads": total(stats, "prefetch_reads"),
        "prefetcher": counters,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.arrival_prefetch", description=__doc__.split("\n\n")[0])
    parser.add_argument("--trace", type=Path, metavar="FILE", help="token ids as an .npz; else Python's own library")
    parser.add_argument("--prompts", type=int, default=200, metavar="N")
    parser.add_argument("--chunk", type=int, default=2048, metavar="TOKENS", help="longest prompt: one prefill chunk")
    parser.add_argument("--queue", type=int, default=8, metavar="N", help="prompts that wait at any moment")
    parser.add_argument("--tokens-per-s", type=float, default=1500.0, help="prefill speed of the engine")
    parser.add_argument("--budget-percent", type=int, default=10, metavar="P", help="DRAM, of the table's rows")
    parser.add_argument("--repetitions", type=int, default=1, metavar="N")
    parser.add_argument("--vocab-size", type=int, default=1_000_000, metavar="N", help="the table has 48 x N rows")
    parser.add_argument("--scratch", type=Path, default=Path("build/bench"), metavar="DIR", help="on the drive to test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    settings = parse(arguments)
    files = make_table(settings.scratch, settings.vocab_size)
    hasher = hasher_for(files.config)
    texts, source = documents(settings.trace, settings.prompts * settings.chunk * 4)
    prompts = cut_prompts(texts, settings.chunk, settings.prompts)
    print(
        f"{len(prompts)} prompts, {sum(map(len, prompts)):,} tokens of {source}; {settings.queue} wait at a time, "
        f"{settings.tokens_per_s:,.0f} tokens/s; budget {settings.budget_percent} % of {files.row_bytes():,} B of rows"
    )
    results: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    for _ in range(settings.repetitions):
        for name, runs in results.items():
            runs.append(play(files, hasher, prompts, settings, with_prefetch=name == "with"))
    for name, runs in results.items():
        share = statistics.median(run["share_in_dram"] for run in runs)
        p50 = statistics.median(run["fetch_ms_p50"] for run in runs)
        p95 = statistics.median(run["fetch_ms_p95"] for run in runs)
        line = f"{name:8} prefetch: {share:6.1%} of first-chunk rows in DRAM"
        print(f"{line}; their fetch p50 {p50:.1f} ms, p95 {p95:.1f} ms")
    print(f"the prefetcher's own counters, last run: {results['with'][-1]['prefetcher']}")
    if settings.json is not None:
        settings.json.write_text(json.dumps({"prompts": len(prompts), "source": source, **results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
