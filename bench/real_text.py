"""d. Real text end to end: hash, cache and drive at several budgets, against the roofline and against peers.

The roofline of a budget is the slower of two limits of the same run: all rows at the in-process gather's rate, and the
pages that the daemon really read at fio's rate, the mean of just before and just after. Where those two are further
apart than a tenth, the drive has changed meanwhile and the repetition says nothing: it is made again. Peers get the
same ids, cold, inside a memory cgroup of the budget.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from collections import deque
from pathlib import Path

import engram_client
import numpy as np
import numpy.typing as npt

from bench.drive import DEPTHS
from bench.environment import (
    ROW_BYTES,
    Settings,
    Table,
    documents,
    drop_pages,
    fio,
    hasher_for,
    memory_group,
)
from engramd.measure.daemon import Daemon, total
from engramd.measure.gather import LocalGather
from engramd.measure.report import Question

PERCENTS = (1, 5, 10, 25, 50, 100)
CHUNK_TOKENS = 512
PEER_PERCENT = 10
ENGRAMDB = "engramdb-python==0.3.0"
PEER_CHUNK = 12_288
STEADY = 0.1  # by how much fio's rates before and after a pass may differ
# What a peer's process needs beside rows: its interpreter, numpy and buffers.
PEER_OVERHEAD_BYTES = 192 << 20


def one_pass(client: engram_client.Client, texts: list[npt.NDArray[np.int64]], config: dict[str, object]) -> float:
    """Rows a second over the text, hashing included: each chunk asks both layers, two requests in flight."""
    hasher = hasher_for(config)
    tables = [client.table(layer=layer) for layer in hasher.layer_ids]
    tickets: deque[engram_client.Ticket] = deque()
    rows = 0
    began = time.perf_counter()
    for text in texts:
        for start in range(0, len(text), CHUNK_TOKENS):
            history = text[max(0, start - 3) : start]
            ids = hasher.row_ids(text[start : start + CHUNK_TOKENS], history=history)
            rows += ids.size
            for index, table in enumerate(tables):
                if len(tickets) == 2:
                    with tickets.popleft() as ticket:
                        ticket.wait()
                tickets.append(table.submit(np.ascontiguousarray(ids[:, index])))
    while tickets:
        with tickets.popleft() as ticket:
            ticket.wait()
    return rows / (time.perf_counter() - began)


def measure(settings: Settings, files: Table) -> Question:
    question = Question("d", "Real text end to end, rows a second, hashing included, two requests queued")
    texts, source = documents(settings.trace, settings.tokens)
    # A sample from the whole trace: its documents are mixed, so the first ones serve.
    hasher = hasher_for(files.config)
    ids = np.concatenate([hasher.row_ids(text) for text in texts])
    distinct = sum(len(np.unique(ids[:, index])) for index in range(ids.shape[1]))
    question.note(
        f"{source}; {ids.size:,} rows, {100 * distinct / ids.size:.1f} % distinct; table {files.row_bytes():,} B"
    )

    path = files.data_files()[0]
    depth = max(DEPTHS, key=lambda one: fio(path, one, 1).rows_per_s)
    gather = LocalGather(min(4_000_000, files.row_count()), PEER_CHUNK, 1)
    rng = np.random.default_rng(13)
    fresh = rng.integers(0, len(gather.rows), PEER_CHUNK * 100)
    repetitions = min(settings.repetitions, 3) if settings.quick else settings.repetitions
    try:
        for state in ("cold", "second pass"):
            for percent in PERCENTS:
                measure_budget(settings, files, question, percent, state, texts, gather, fresh, depth, repetitions)
    finally:
        gather.close()
    measure_peers(settings, files, question, texts, ids, repetitions)
    return question


def measure_budget(
    settings: Settings,
    files: Table,
    question: Question,
    percent: int,
    state: str,
    texts: list[npt.NDArray[np.int64]],
    gather: LocalGather,
    fresh: npt.NDArray[np.int64],
    depth: int,
    repetitions: int,
) -> None:
    budget = files.row_bytes() * percent // 100
    ours: list[float] = []
    limit: list[float] = []
    missed: list[float] = []
    first_s: list[float] = []
    unsteady = 0
    while len(ours) < repetitions and unsteady < 2 * repetitions:
        drive_before = fio(files.data_files()[0], depth, 1).rows_per_s
        with Daemon(files.path, budget) as daemon, engram_client.connect(daemon.socket, spin_us=0) as client:
            if percent == 100:
                if state == "cold":
                    question_note = "at 100 % rows become resident in the background; the cold pass runs meanwhile"
                    if question_note not in question.notes:
                        question.note(question_note)
                else:
                    daemon.wait_until_resident()
            if state != "cold":
                one_pass(client, texts, files.config)
            before = client.stats()
            rate = one_pass(client, texts, files.config)
            after = client.stats()
        rows = total(after, "rows") - total(before, "rows")
        reads = total(after, "nvme_reads") - total(before, "nvme_reads")
        gather_rate = gather.run(fresh, PEER_CHUNK)
        drive_after = fio(files.data_files()[0], depth, 1).rows_per_s
        if reads and abs(drive_after / drive_before - 1) > STEADY:
            unsteady += 1
            continue
        ours.append(rate)
        limit.append(rows / max(rows / gather_rate, reads * 2 / (drive_before + drive_after)))
        missed.append((total(after, "dram_misses") - total(before, "dram_misses")) / rows)
        first_s.append(rows / rate)
    name = f"budget {percent} %, {state}"
    if unsteady:
        question.note(f"{name}: {unsteady} repetitions were left out, since the drive's rate changed under them")
    if not ours:
        return
    question.add(
        name, "rows/s", ours, "roofline", limit,
        missed=float(np.median(missed)), seconds=float(np.median(first_s)),
    )  # fmt: skip


def engramdb_python(settings: Settings) -> str | None:
    """The Python of an environment with EngramDB, made on demand."""
    folder = settings.scratch / "engramdb"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", ENGRAMDB, "numpy"], capture_output=True, check=False
        )
        if done.returncode:
            return None
        (folder / "ready").touch()
    return os.fspath(python)


def write_shards(files: Table, folder: Path) -> list[Path]:
    """The rows alone, in the shard files that EngramDB's Store reads; one folder for each layer."""
    folders = []
    for path in files.data_files():
        target = folder / f"shards-{path.stem}"
        folders.append(target)
        if (target.with_suffix(".done")).exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        config = files.config.get("text_config", files.config)
        rows = config["engram_num_embeddings"][len(folders) - 1]
        per_shard = -(-rows // 64)
        pages = np.memmap(path, np.uint8, "r").reshape(-1, 4096)[:, : 15 * ROW_BYTES]
        for shard in range(64):
            begin, end = shard * per_shard, min(rows, (shard + 1) * per_shard)
            first, last = begin // 15, -(-end // 15)
            packed = np.ascontiguousarray(pages[first:last]).reshape(-1, ROW_BYTES)
            packed[begin - first * 15 : end - first * 15].tofile(target / f"shard_{shard:03d}.bin")
        target.with_suffix(".done").touch()
    return folders


def measure_peers(
    settings: Settings,
    files: Table,
    question: Question,
    texts: list[npt.NDArray[np.int64]],
    ids: npt.NDArray[np.int32],
    repetitions: int,
) -> None:
    """Ours at 10 % from cold beside each peer from cold in a cgroup of the same budget, and each with all in memory."""
    budget = files.row_bytes() * PEER_PERCENT // 100
    by_layer = np.ascontiguousarray(ids.transpose(1, 0, 2).reshape(ids.shape[1], -1).astype(np.int64))
    some = min(by_layer.shape[1], 24 * (4096 if settings.quick else 40_960))
    ids_path = settings.scratch / "peer-ids.npy"
    np.save(ids_path, by_layer[:, :some])
    tokens = some // ids.shape[2]
    part: list[npt.NDArray[np.int64]] = []
    for text in texts:
        if tokens > 0:
            part.append(text[:tokens])
            tokens -= len(part[-1])
    pages = [os.fspath(path) for path in files.data_files()]
    peers: dict[str, tuple[str, str, list[str]]] = {
        "numpy memmap, MADV_RANDOM": (sys.executable, "memmap", pages),
        "O_DIRECT QD64, no cache": (sys.executable, "direct", pages),
    }
    python = engramdb_python(settings) if settings.peers else None
    if python is not None:
        shards = [os.fspath(path) for path in write_shards(files, settings.scratch / f"shards-{settings.vocab_size}")]
        peers[f"Store.fetch, 64 shards, {ENGRAMDB}"] = (python, "store", shards)
        peers[f"IoUringPageReader, 256 a call, {ENGRAMDB}"] = (python, "ring", pages)
    else:
        question.note(f"{ENGRAMDB} could not be installed (or --no-peers was given): its figures are left out")

    with memory_group(budget + PEER_OVERHEAD_BYTES) as group:
        if group is None:
            question.note("no memory cgroup is writable here: peers have the whole page cache of the machine")
        else:
            question.note(f"peers are held to {budget + PEER_OVERHEAD_BYTES:,} B by the cgroup {group}")
        procs = os.fspath(group / "cgroup.procs") if group is not None else "-"

        def peer(name: str, where: str) -> float:
            executable, kind, paths = peers[name]
            environment = {**os.environ, "RAYON_NUM_THREADS": "32"}
            command = [executable, os.fspath(Path(__file__).with_name("peer.py")), kind, os.fspath(ids_path)]
            command += [str(PEER_CHUNK), where, *paths]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
            result = json.loads(done.stdout)
            return float(result["rows"] / result["seconds"])

        def all_files(name: str) -> list[Path]:
            return [
                file for path in map(Path, peers[name][2]) for file in (path.glob("*.bin") if path.is_dir() else [path])
            ]

        for name in peers:
            ours, theirs = [], []
            try:
                for _ in range(repetitions):
                    left = drop_pages(all_files(name))
                    theirs.append(peer(name, procs))
                    with (
                        Daemon(files.path, budget) as daemon,
                        engram_client.connect(daemon.socket, spin_us=0) as client,
                    ):
                        ours.append(one_pass(client, part, files.config))
                question.add(f"{PEER_PERCENT} %, cold", "rows/s", ours, name, theirs, pages_left=left)
            except (RuntimeError, OSError) as error:
                question.note(f"{name}, cold: {error}")

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if files.row_bytes() * 2.3 > memory:
        question.note("no room to have the table both resident and in the page cache: the warm comparison is left out")
        return
    with Daemon(files.path, files.row_bytes() * 2) as daemon, engram_client.connect(daemon.socket) as client:
        daemon.wait_until_resident()
        for name in peers:
            if peers[name][1] == "direct":
                continue
            try:
                peer(name, "-")
                ours, theirs = [], []
                for _ in range(repetitions):
                    theirs.append(peer(name, "-"))
                    ours.append(one_pass(client, part, files.config))
                question.add("all in memory", "rows/s", ours, name, theirs)
            except (RuntimeError, OSError) as error:
                question.note(f"{name}, warm: {error}")
