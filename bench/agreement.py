"""l. Whether the sampled curves agree with simulations of every look-up by the same policy.

`engramd plan` at the true geometry, against one head of each n-gram order with a sixteenth of the room (as in question
e); `engramd stats --mrc` of a daemon that has all rows of a small table in DRAM, so that it is asked at full speed,
against all of its look-ups. Differences in points; and the share of samples that came too fast for a recording.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import engram_client
import numpy as np

from bench.cache_quality import COLUMNS, SAMPLE, SIZES_GIB
from bench.environment import PUBLISHED_CONFIG, ROW_BYTES, Ids, Settings, Table, documents, hasher_for, tokenizer_path
from bench.record_cost import recording
from engramd.cache_simulation import KEY_ROW_BITS, CacheSimulation, simulate
from engramd.measure.daemon import ENGRAMD, Daemon
from engramd.measure.report import Question
from engramd.plan.recording import read

BATCH_TOKENS = 2048
RATES = (1 / 64, 1.0)


def engramd_json(*arguments: str | Path) -> dict[str, Any]:
    done = subprocess.run([*ENGRAMD, *map(str, arguments), "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"engramd {arguments[0]}: {done.stderr.strip()}")
    return dict(json.loads(done.stdout))


def plan_agrees(settings: Settings, question: Question, texts: list[Ids]) -> None:
    """Cases of `engramd plan`."""
    tokens, config = settings.scratch / "agreement.npz", settings.scratch / "agreement.json"
    np.savez(tokens, tokens=np.concatenate(texts), doc_lengths=np.array([len(text) for text in texts]))
    config.write_text(json.dumps(PUBLISHED_CONFIG))
    sizes = ",".join(f"{size}GiB" for size in SIZES_GIB)
    plan = engramd_json("plan", tokens, "--tokenizer", tokenizer_path(), "--config", config, "--sizes", sizes)
    hasher = hasher_for(PUBLISHED_CONFIG)
    ids = np.concatenate([hasher.row_ids(text)[:, 0, COLUMNS] for text in texts])
    for size, point in zip(SIZES_GIB, plan["curve"], strict=True):
        exact = simulate(ids, (size << 30) // ROW_BYTES // SAMPLE)
        for name, ours, hits, requests in (
            ("whole", point["hit_ratio_whole"], exact.hits, exact.requests),
            ("second half", point["hit_ratio"], exact.second_half_hits, exact.second_half_requests),
        ):
            other = hits / requests
            question.add(
                f"plan, {size} GiB, {name}", "hit ratio", [ours], "every look-up", [other], points=100 * (ours - other)
            )
    tokens.unlink()
    config.unlink()


def curve_agrees(settings: Settings, question: Question, texts: list[Ids], files: Table) -> None:
    """Cases of `engramd stats --mrc`, and what recordings lose."""
    hasher = hasher_for(files.config)
    ids = np.concatenate([hasher.row_ids(text) for text in texts])
    chunks = [ids[at : at + BATCH_TOKENS] for at in range(0, len(ids), BATCH_TOKENS)]
    with (
        Daemon(files.path, files.row_bytes() * 2) as daemon,
        engram_client.connect(daemon.socket) as client,
    ):
        daemon.wait_until_resident()
        tables = [client.table(layer=layer) for layer in hasher.layer_ids]
        out = [np.empty((BATCH_TOKENS, ids.shape[2], ROW_BYTES), np.uint8) for _ in tables]

        def fetch_all() -> float:
            began = time.perf_counter()
            for chunk in chunks:
                for index, table in enumerate(tables):
                    table.fetch(np.ascontiguousarray(chunk[:, index]), out=out[index][: len(chunk)])
            return ids.size / (time.perf_counter() - began)

        rate = fetch_all()
        curve = engramd_json("stats", "--socket", daemon.socket, "--mrc")["mrc"]
        question.note(f"asked for {rate:,.0f} rows a second; the curve lost {curve['lost']:,} samples")
        file = settings.scratch / "agreement.rec"
        for share in RATES:
            with recording(daemon, file, "--rate", str(share), "--memory", "1GiB"):
                rate = fetch_all()
            found = read(str(file))
            file.unlink()
            lost = 100 * found.lost / max(1, found.keys.size + found.lost)
            question.note(f"record --rate {share:g} at {rate:,.0f} rows a second: {lost:.2f} % of the samples lost")
    layers = np.arange(1, ids.shape[1] + 1, dtype=np.int64)[:, None] << KEY_ROW_BITS
    points = [point for point in curve["points"] if point["bytes"] < files.row_bytes()]
    for point in points[:: max(1, len(points) // 5)]:
        hits = 0
        with CacheSimulation(point["rows"]) as cache:
            for chunk in chunks:
                # As the daemon's batches: the first layer's rows of a chunk, then the second's.
                hits += cache.run((chunk.astype(np.int64) | layers).transpose(1, 0, 2))
        exact = hits / ids.size
        question.add(
            f"stats --mrc, {point['bytes'] / (1 << 20):,.0f} MiB", "hit ratio", [point["hit_ratio"]], "every look-up",
            [exact], points=100 * (point["hit_ratio"] - exact),
        )  # fmt: skip


def measure(settings: Settings, files: Table) -> Question:
    question = Question("l", "Sampled curves against simulations of every look-up")
    texts, source = documents(settings.trace, 1_000_000 if settings.quick else 4_000_000)
    question.note(source)
    plan_agrees(settings, question, texts)
    wanted, some = 100_000 if settings.quick else 500_000, []
    for text in texts:
        if wanted > 0:
            some.append(text[:wanted])
            wanted -= len(some[-1])
    curve_agrees(settings, question, some, files)
    return question
