"""Faulty reads under a real daemon: no wrong row ever, every fault retried or reported, everybody else served."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client import PageCorrupt, ReadFailed

SEED = int(os.environ.get("ENGRAM_SEED", "1"))
ROWS = int(os.environ.get("ENGRAM_N", "60000"))  # fetched while reads are faulted
RETRIED = ("short", "eintr", "eagain", "slow")
WRONG = ("flip", "misdirected", "layer", "stale")  # every row of the page is wrong
EACH = 0.0001
Rows = dict[int, np.ndarray[Any, np.dtype[np.uint8]]]


def check_error(error: PageCorrupt | ReadFailed, table: Any, ids: Any) -> None:
    """The error names a row that was asked for, its page, and the table."""
    assert error.row_id in ids, error
    assert error.page == error.row_id // 15
    assert table.name in str(error)


def chosen_ids(chosen: np.random.Generator, num_rows: int, count: int) -> Any:
    """Rows at random; of a large batch whole pages, so that many rows come with few reads."""
    if count <= 3000:
        return chosen.integers(0, num_rows, count)
    pages = chosen.integers(0, num_rows // 15, count // 15)
    return (pages[:, None] * 15 + np.arange(15)).ravel()


def fetch_until_served(table: Any, ids: Any, expected: Any, failures: list[str], deadline_s: float = 60) -> None:
    """Fetches until an answer comes, which must be the right one; notes the errors on the way."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            got = table.fetch(ids, timeout=30)
        except (PageCorrupt, ReadFailed) as error:
            failures.append(str(error))  # not the error: its traceback would keep every batch
            check_error(error, table, ids)
            continue
        assert np.array_equal(got, expected), "a wrong row"
        return
    raise AssertionError(f"not served within {deadline_s} s: {failures[-1]}")


@pytest.fixture(scope="module")
def older(engramd: Callable[..., Any], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a table in its second generation, a copy of layer 1's file of the first)."""
    folder = tmp_path_factory.mktemp("older")
    table = folder / "demo"
    assert engramd("pack", checkpoint, table).returncode == 0
    saved = folder / "old.pages"
    shutil.copy(table / "layer-1.g000001.pages", saved)
    assert engramd("pack", checkpoint, table).returncode == 0
    return table, saved


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["auto", "pread"])
def test_no_wrong_row_and_every_fault_retried_or_reported(
    faulty_daemon: Any, stats: Any, older: tuple[Path, Path], rows: Rows, reader: str
) -> None:
    """Each kind of fault at once, 1 in 1,000 reads; each request until it is served. Half of the wrong pages are right
    when they are read again."""
    table_path, old = older
    kinds = ("short", "eintr", "eagain", "eio", "flip", "torn", "misdirected", "layer", "stale", "slow")
    spec = f"seed={SEED},stale_file={old},slow_ms=5,lasting=0.5," + ",".join(f"{kind}={EACH}" for kind in kinds)
    daemon = faulty_daemon(spec, table_path, dram="0", reader=reader)
    assert "fault build" in daemon.log
    chosen = np.random.default_rng(SEED)
    failures: list[str] = []
    fetched = 0
    with engram_client.connect(daemon.socket) as client:
        tables = [client.table("demo", layer) for layer in sorted(rows)]
        while fetched < ROWS // 2:
            table = tables[int(chosen.integers(len(tables)))]
            ids = chosen_ids(chosen, table.num_rows, int(chosen.choice([1, 40, 256, 3000, 15_000])))
            fetch_until_served(table, ids, rows[table.layer][ids], failures)
            fetched += len(ids)
    seen = stats(daemon)
    injected = seen["faults"]
    layers = seen["tables"][0]["layers"]
    reported = sum(sum(layer["errors"].values()) for layer in layers)
    print(f"seed {SEED}: {fetched} rows, injected {injected}, {len(failures)} requests failed and were asked again")
    assert seen["fault_build"] is True
    # A failed request touches one faulted page or more; a torn page's good half is served.
    assert reported == len(failures) <= sum(injected[kind] for kind in (*WRONG, "torn", "eio"))
    # Every page that came wrong was read again, or failed the rows that were asked for.
    rereads, failed = (sum(layer[name] for layer in layers) for name in ("rereads", "rows_failed"))
    assert rereads + failed >= sum(injected[kind] for kind in (*WRONG, "eio"))
    assert rereads <= sum(injected[kind] for kind in (*WRONG, "torn"))
    assert failed >= len(failures)
    assert sum(injected.values()) > 0
    for layer in layers:
        parts = ("rows_zero", "dram_hits", "dram_misses", "rows_failed")
        assert layer["rows"] == sum(layer[part] for part in parts)


@pytest.mark.parametrize("reader", ["io_uring", "pread"])
@pytest.mark.parametrize("kind", RETRIED)
def test_transient_faults_are_retried_unseen(
    faulty_daemon: Any, stats: Any, rows: Rows, kind: str, reader: str
) -> None:
    daemon = faulty_daemon(f"seed={SEED},slow_ms=1,{kind}=0.3", dram="0", reader=reader)
    with engram_client.connect(daemon.socket) as client:
        table = client.table("demo", 1)
        ids = np.random.default_rng(SEED).integers(0, table.num_rows, 2000)
        assert np.array_equal(table.fetch(ids, timeout=60), rows[1][ids])
        assert np.array_equal(table.fetch(ids[:50], timeout=60), rows[1][ids[:50]])
    seen = stats(daemon)
    assert seen["faults"][kind] > 50
    assert all(not layer["errors"] for layer in seen["tables"][0]["layers"])


@pytest.mark.parametrize("kind", [*WRONG, "torn"])
def test_a_page_that_comes_wrong_once_is_read_again_unseen(
    faulty_daemon: Any, stats: Any, older: tuple[Path, Path], rows: Rows, kind: str
) -> None:
    """What was wrong on the way is no error, but is counted."""
    table_path, old = older
    daemon = faulty_daemon(f"seed={SEED},stale_file={old},{kind}=1", table_path, dram="0")
    with engram_client.connect(daemon.socket) as client:
        client.table("demo", 14).fetch([1])  # the reader has seen both layers' files
        table = client.table("demo", 1)
        for count in (1, 100, 4000):
            ids = np.random.default_rng(count).integers(0, table.num_rows, count)
            assert np.array_equal(table.fetch(ids, timeout=60), rows[1][ids])
    seen = stats(daemon)
    layers = seen["tables"][0]["layers"]
    rereads = sum(layer["rereads"] for layer in layers)
    assert 100 < rereads <= seen["faults"][kind]
    assert all(not layer["errors"] and not layer["rows_failed"] for layer in layers)
    assert "cannot be served" not in daemon.log


@pytest.mark.parametrize("kind", [*WRONG, "eio"])
def test_a_fault_hits_its_own_request_alone(
    faulty_daemon: Any, stats: Any, older: tuple[Path, Path], rows: Rows, tmp_path: Path, kind: str
) -> None:
    """While the disk is bad its rows fail, rows in DRAM go on being served, and once it is mended all are served."""
    table_path, old = older
    plan = tmp_path / "faults"
    plan.write_text("")
    daemon = faulty_daemon(f"@{plan}", table_path, dram="3MiB")
    error: type[Exception] = ReadFailed if kind == "eio" else PageCorrupt
    with engram_client.connect(daemon.socket) as client, engram_client.connect(daemon.socket) as other:
        layer = client.table("demo", 1)
        hot = np.arange(0, 300)
        cold = np.arange(9000, 9100)
        for _ in range(4):
            layer.fetch(hot)  # hot enough to stay
        other.table("demo", min(n for n in rows if n != 1)).fetch([1])  # the reader has seen both layers' files
        plan.write_text(f"stale_file={old},lasting=1,{kind}=1")
        time.sleep(0.1)
        for _ in range(3):
            with pytest.raises(error, match=r"demo layer 1.*page 6\d\d"):
                layer.fetch(cold)
        assert np.array_equal(other.table("demo", 1).fetch(hot), rows[1][hot]), "rows in DRAM need no disk"
        plan.write_text("")
        time.sleep(0.1)
        assert np.array_equal(layer.fetch(cold), rows[1][cold])
    seen = stats(daemon)
    (errors,) = (one["errors"] for one in seen["tables"][0]["layers"] if one["layer"] == 1)
    assert errors == {error.__name__: 3}
    lines = [line for line in daemon.log.splitlines() if "cannot be served" in line]
    assert lines
    assert len(lines) == len({line.split("page ")[1].split()[0] for line in lines}), "one line for each page"


def test_the_nth_read_fails(faulty_daemon: Any, rows: Rows) -> None:
    daemon = faulty_daemon("eio_at=3", dram="0")
    with engram_client.connect(daemon.socket) as client:
        table = client.table("demo", 1)
        for number in range(1, 6):
            ids = [number * 15]
            if number == 3:
                with pytest.raises(ReadFailed, match="Input/output error"):
                    table.fetch(ids)
            else:
                assert np.array_equal(table.fetch(ids), rows[1][ids])


def test_loading_survives_faults(faulty_daemon: Any, stats: Any, rows: Rows) -> None:
    """A table that is read into DRAM over a bad disk: what did not load is read when it is asked for."""
    daemon = faulty_daemon(f"seed={SEED},eio=0.02,short=0.3,eintr=0.3,eagain=0.2,flip=0.01", dram="64MiB")
    failures: list[str] = []
    with engram_client.connect(daemon.socket) as client:
        for layer in rows:
            table = client.table("demo", layer)
            for begin in range(0, table.num_rows, 199):
                ids = np.arange(begin, min(begin + 199, table.num_rows))
                fetch_until_served(table, ids, rows[layer][ids], failures)
    for layer in rows:
        daemon.wait_for_log(f"layer {layer} is resident")
    assert {layer["tier"] for layer in stats(daemon)["tables"][0]["layers"]} == {"resident"}


def test_a_list_of_faults_that_makes_no_sense_is_refused(engramd: Any, fault_path: Path, table: Path) -> None:
    import subprocess
    import sys

    for spec, words in (("shrot=1", "no fault is called 'shrot'"), ("eio=2", "'2' is no value for eio")):
        done = subprocess.run(
            [sys.executable, "-m", "engramd.cli.main", "serve", str(table), "--socket", f"/tmp/engram-{os.getpid()}-f"],
            env={**os.environ, "PYTHONPATH": str(fault_path), "PYTHONSAFEPATH": "1", "ENGRAMD_FAULTS": spec},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert words in done.stderr


def test_an_ordinary_build_injects_nothing(start_daemon: Any, stats: Any, rows: Rows) -> None:
    daemon = start_daemon(environment={"ENGRAMD_FAULTS": "eio=1"}, dram="0")
    with engram_client.connect(daemon.socket) as client:
        assert np.array_equal(client.table("demo", 1).fetch([5]), rows[1][[5]])
    assert stats(daemon)["fault_build"] is False
    assert "fault build" not in daemon.log


@pytest.mark.parametrize("reader", ["io_uring", "pread"])
def test_a_file_cut_under_the_daemon(start_daemon: Any, stats: Any, rows: Rows, reader: str, copy: Path) -> None:
    """What is cut off fails, what is left is served, and all of it again once the file is whole."""
    file = copy / "layer-1.g000001.pages"
    whole = file.read_bytes()
    daemon = start_daemon(copy, dram="0", reader=reader)
    with engram_client.connect(daemon.socket) as client:
        layer = client.table("demo", 1)
        os.truncate(file, 100 * 4096 + 100)
        assert np.array_equal(layer.fetch(np.arange(1500)), rows[1][:1500])
        for _ in range(2):
            with pytest.raises(ReadFailed, match=r"page 100 .*row 1500"):
                layer.fetch([3, 1500])
        with pytest.raises(ReadFailed):
            layer.fetch([layer.num_rows - 1])
        with open(file, "r+b") as again:
            again.write(whole)
        every = np.arange(layer.num_rows)
        assert np.array_equal(layer.fetch(every), rows[1])
    assert daemon.log.count("page 100 cannot be served") == 1


def test_a_file_replaced_or_overwritten_under_the_daemon(
    start_daemon: Any, engramd: Any, rows: Rows, copy: Path
) -> None:
    """A new file at the path is not the daemon's: it keeps its own. Other content in the same file is noticed."""
    file = copy / "layer-1.g000001.pages"
    whole = file.read_bytes()
    daemon = start_daemon(copy, dram="0")
    with engram_client.connect(daemon.socket) as client:
        layer = client.table("demo", 1)
        os.link(file, copy / "kept")
        (copy / "other").write_bytes(bytes(len(whole)))
        os.rename(copy / "other", file)
        ids = np.arange(0, layer.num_rows, 7)
        assert np.array_equal(layer.fetch(ids), rows[1][ids])
        for content in (bytes(4096), whole[:4096], os.urandom(4096)):
            with open(copy / "kept", "r+b") as overwritten:
                overwritten.seek(20 * 4096)
                overwritten.write(content)
            with pytest.raises(PageCorrupt, match=r"page 20 .*row 30\d"):
                layer.fetch(np.arange(290, 310))
            assert np.array_equal(layer.fetch([299, 315]), rows[1][[299, 315]])
        with open(copy / "kept", "r+b") as mended:
            mended.write(whole)
        assert np.array_equal(layer.fetch(np.arange(290, 310)), rows[1][290:310])


def test_others_are_served_while_reads_are_slow(faulty_daemon: Any, rows: Rows, tmp_path: Path) -> None:
    """Slow reads of one client hold up neither another's rows in DRAM nor its deadline."""
    plan = tmp_path / "faults"
    plan.write_text("")
    daemon = faulty_daemon(f"@{plan}", dram="3MiB")
    with engram_client.connect(daemon.socket) as slow, engram_client.connect(daemon.socket) as quick:
        hot = np.arange(100)
        table = quick.table("demo", 1)
        for _ in range(4):
            table.fetch(hot)
        plan.write_text("slow=1,slow_ms=3000")
        time.sleep(0.1)
        cold = slow.table("demo", 1)
        thread = threading.Thread(target=lambda: cold.fetch(np.arange(9000, 9060)))
        begin = time.monotonic()
        thread.start()
        for _ in range(20):
            assert np.array_equal(table.fetch(hot, timeout=30), rows[1][hot])
        assert time.monotonic() - begin < 3.0, "rows in DRAM waited for the disk"
        with pytest.raises(engram_client.RequestTimeout):
            cold.fetch([9500], timeout=0.2)
        thread.join(60)
        assert not thread.is_alive()
        plan.write_text("")
        # The slot that timed out comes back when its read has landed.
        assert np.array_equal(cold.fetch([9500], timeout=30), rows[1][[9500]])


def test_one_clients_prefetches_leave_room_for_anothers(faulty_daemon: Any) -> None:
    """While the drive is slow, what one session asks for beyond its quota is dropped, and another's is not."""
    daemon = faulty_daemon("slow=1,slow_ms=30000", dram="3MiB", prefetch_rows=1000)
    with engram_client.connect(daemon.socket) as greedy, engram_client.connect(daemon.socket) as modest:

        def reader() -> tuple[int, int]:
            found = modest.stats()["reader"]
            return found["prefetch_queued_rows"], found["prefetch_dropped_rows"]

        for first in (0, 2000, 4000):
            greedy.table("demo", 1).prefetch(np.arange(first, first + 600))
        modest.table("demo", 1).prefetch(np.arange(10_000, 10_900))
        deadline = time.monotonic() + 60
        while sum(reader()) < 3 * 600 + 900:
            assert time.monotonic() < deadline, reader()
            time.sleep(0.01)
        assert reader() == (600 + 900, 2 * 600)
