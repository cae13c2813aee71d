"""g. What happens before serving: pack and verify against the drive's sequential rate, start-up, the hasher."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import engram_client
import numpy as np

from bench.environment import Settings, Table, documents, drop_pages, fio, hasher_for, run_engramd
from engramd.measure.daemon import Daemon
from engramd.measure.report import Question, interleave


def measure(settings: Settings, files: Table) -> Question:
    question = Question("g", "Offline work and start-up")
    path = files.data_files()[0]
    seconds = 1 if settings.quick else 3

    def sequential(_: int) -> float:
        return fio(path, 8, seconds, "read", "1m").rows_per_s

    def verify(_: int) -> float:
        drop_pages(files.data_files())
        return float(files.file_bytes()) / run_engramd("verify", files.path)

    figures = interleave({"ours": verify, "fio": sequential}, min(settings.repetitions, 3))
    question.add("verify, cold", "bytes/s", figures["ours"], "fio sequential 1 MiB QD8", figures["fio"])

    checkpoint, packed = settings.scratch / "pack-checkpoint", settings.scratch / "pack-table"
    for folder in (checkpoint, packed):
        shutil.rmtree(folder, ignore_errors=True)
    run_engramd("synth", checkpoint, "--vocab-size", str(settings.small_vocab_size))

    def pack(_: int) -> float:
        shutil.rmtree(packed, ignore_errors=True)
        shards = list(checkpoint.glob("*.safetensors"))
        drop_pages(shards)
        return sum(shard.stat().st_size for shard in shards) / run_engramd("pack", checkpoint, packed)

    figures = interleave({"ours": pack, "fio": sequential}, min(settings.repetitions, 3))
    question.add(
        "pack, cold, bytes of the checkpoint", "bytes/s", figures["ours"], "fio sequential read", figures["fio"]
    )
    for folder in (checkpoint, packed):
        shutil.rmtree(folder, ignore_errors=True)

    starts, first_rows = [], []
    for _ in range(settings.repetitions):
        with Daemon(files.path, 64 << 20) as daemon:
            began = time.perf_counter()
            with engram_client.connect(daemon.socket) as client:
                client.table(layer=1).fetch(np.arange(48))
            starts.append(daemon.ready_s)
            first_rows.append(time.perf_counter() - began)
    python = min(_python_start_s() for _ in range(3))
    question.add("start-up to ready", "s", starts, "an empty Python with numpy and zmq", [python] * len(starts))
    question.note(f"connect and first 48 cold rows: {np.median(first_rows) * 1e3:.1f} ms")

    hasher = hasher_for(files.config)
    texts, source = documents(settings.trace, 200_000)
    tokens = np.concatenate(texts)
    rates = []
    for _ in range(settings.repetitions):
        began = time.perf_counter()
        for start in range(0, len(tokens), 8192):
            hasher.row_ids(tokens[start : start + 8192])
        rates.append(len(tokens) / (time.perf_counter() - began))
    question.note(
        f"hasher: {np.median(rates) / 1e6:.2f} M tokens/s on one thread over {source}; bench/hasher.py compares "
        "it with numpy"
    )
    return question


def _python_start_s() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy, zmq"], check=True)
    return time.perf_counter() - began
