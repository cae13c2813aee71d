"""`engramd record` and `engramd stats --mrc` against a real daemon."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest
from numpy.typing import NDArray

from engramd._engine import ffi, lib
from engramd.cli.control_client import ControlClient
from engramd.errors import EngramdError
from engramd.plan import live_curve, recording
from tests.conftest import DEADLINE_S

LAYERS = (1, 14)
ROWS = 24 * 2000  # at least, in each layer of the table


def demand(seed: int, count: int) -> NDArray[np.int64]:
    """Row ids with a few hot ones, and some -1."""
    random = np.random.default_rng(seed)
    ids = (ROWS * random.power(0.2, count)).astype(np.int64)
    ids[random.random(count) < 0.05] = -1
    return ids


def start_recording(socket: str, file: Path, *arguments: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A recorder that has begun to record."""
    command = [sys.executable, "-m", "engramd.cli.main", "record", str(file), "--socket", socket, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    deadline = time.monotonic() + DEADLINE_S
    with ControlClient(socket) as control:
        while time.monotonic() < deadline:
            # Takes nothing away, since there is no demand yet.
            with contextlib.suppress(EngramdError):
                control.ask("record_take")
                return process
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
    process.kill()
    raise AssertionError("the recorder does not start")


def finish(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    return output


def test_a_recording_holds_the_rows_asked_for(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    daemon = start_daemon(dram="4MiB")
    path = tmp_path / "all.rec"
    batches = [(layer, demand(seed, count)) for seed, (layer, count) in enumerate([(1, 5), (14, 3000), (1, 20_000)])]
    process = start_recording(daemon.socket, path, "--rate", "1")
    try:
        with engram_client.connect(daemon.socket) as client:
            tables = {layer: client.table(layer=layer) for layer in LAYERS}
            for layer, ids in batches:
                tables[layer].fetch(ids)
                tables[layer].prefetch(ids)  # is not demand
        output = finish(process)
    finally:
        process.kill()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    found = recording.read(str(path))
    handles = {layer.layer: layer.handle for layer in found.layers}
    expected = np.concatenate([ids[ids >= 0] + (handles[layer] << 40) for layer, ids in batches])
    assert found.keys.tolist() == expected.tolist()
    assert (found.lookups, found.lost, found.threshold) == (expected.size, 0, 1 << 32)
    assert f"{expected.size:,} of {expected.size:,} look-ups" in output
    stream = recording.to_stream(found, str(path))
    assert stream.all_lookups == pytest.approx(expected.size, abs=len(stream.classes))
    assert {(column.layer, column.order, column.head) for column in stream.classes} == {
        (layer, order, head) for layer in LAYERS for order in (2, 3, 4) for head in range(8)
    }


def test_the_rate_falls_when_the_memory_is_full(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    daemon = start_daemon(dram="4MiB")
    path = tmp_path / "some.rec"
    process = start_recording(daemon.socket, path, "--rate", "1", "--memory", "64KiB")
    try:
        with engram_client.connect(daemon.socket) as client:
            table = client.table(layer=1)
            asked = [demand(seed, 5_000) for seed in range(10)]
            for ids in asked:
                table.fetch(ids)
        finish(process)
    finally:
        process.kill()
    found = recording.read(str(path))
    ids = np.concatenate(asked)
    every = ids[ids >= 0].astype(np.uint64) + np.uint64(found.layers[0].handle << 40)
    assert (found.lookups, found.lost) == (every.size, 0)
    assert 0 < found.keys.size <= 8192
    assert found.threshold < 1 << 32
    assert found.keys.tolist() == recording.thin(every, found.threshold).tolist()


def test_the_rate_falls_where_samples_come_too_fast(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    daemon = start_daemon(dram="64MiB")
    path = tmp_path / "fast.rec"
    process = start_recording(daemon.socket, path, "--rate", "1", "--memory", "1GiB")
    ids = np.random.default_rng(1).integers(0, ROWS, 1_000_000)  # many times what a worker keeps for the sampler
    try:
        with engram_client.connect(daemon.socket) as client:
            for _ in range(4):
                client.table(layer=1).fetch(ids)
        output = finish(process)
    finally:
        process.kill()
    found = recording.read(str(path))
    assert found.lookups == 4 * ids.size
    assert found.threshold < 1 << 32
    assert found.lost > 0
    assert f"{found.lost:,} more came too fast" in output
    # What was taken and what was lost are together what this rate samples of the look-ups.
    keys = np.tile(ids, 4).astype(np.uint64) + np.uint64(found.layers[0].handle << 40)
    sampled = recording.thin(keys, found.threshold).size
    assert recording.thin(found.keys.copy(), found.threshold).size == found.keys.size
    assert found.keys.size + found.lost == pytest.approx(sampled, rel=0.1)


def test_a_recording_outlives_the_daemon(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    daemon = start_daemon(dram="4MiB")
    path = tmp_path / "cut.rec"
    ids = demand(1, 5_000)
    asked = np.count_nonzero(ids >= 0)
    terminal, theirs = pty.openpty()
    process = start_recording(daemon.socket, path, "--rate", "1", stderr=theirs)
    os.close(theirs)
    try:
        with engram_client.connect(daemon.socket) as client:
            client.table(layer=1).fetch(ids)
        shown = b""
        while f"{asked:,} rows".encode() not in shown:
            assert select.select([terminal], [], [], DEADLINE_S)[0], shown
            shown += os.read(terminal, 65536)
        daemon.kill()
        assert process.wait(DEADLINE_S) == 1
        with contextlib.suppress(OSError):  # the other side is closed
            while True:
                shown += os.read(terminal, 65536)
        assert b"the file has what came before" in shown
    finally:
        process.kill()
        os.close(terminal)
    assert recording.read(str(path)).lookups == asked


def test_recordings_are_refused(
    engramd: Callable[..., subprocess.CompletedProcess[str]], start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    daemon = start_daemon()
    with ControlClient(daemon.socket) as control:
        control.ask("record_start", threshold=1 << 20, capacity=100)
        done = engramd("record", tmp_path / "x", "--socket", daemon.socket, "--seconds", "1")
        assert done.returncode == 1
        assert "runs already" in done.stderr
        control.ask("record_stop")
        with pytest.raises(EngramdError, match="no recording runs"):
            control.ask("record_take")
        for fields in ({"threshold": 0}, {"threshold": (1 << 32) + 1}, {"capacity": 0}, {"capacity": 1 << 40}):
            with pytest.raises(EngramdError, match="must be an integer"):
                control.ask("record_start", **{"threshold": 1, "capacity": 1, **fields})
    for arguments in (("--rate", "0"), ("--rate", "2"), ("--memory", "1"), ("--seconds", "-1")):
        assert engramd("record", tmp_path / "x", "--socket", daemon.socket, *arguments).returncode == 1
    assert not list(tmp_path.glob("x*"))


def test_a_recording_goes_on_over_a_reload(
    engramd: Callable[..., subprocess.CompletedProcess[str]],
    start_daemon: Callable[..., Any],
    checkpoint: Path,
    copy: Path,
    tmp_path: Path,
) -> None:
    daemon = start_daemon(copy, dram="4MiB")
    path = tmp_path / "x.rec"
    ids = [demand(seed, 8_000) for seed in range(2)]
    process = start_recording(daemon.socket, path, "--rate", "1")
    try:
        with engram_client.connect(daemon.socket) as client:
            layer = client.table(layer=1)
            layer.fetch(ids[0])
            assert engramd("pack", checkpoint, copy).returncode == 0
            assert engramd("reload", "demo", "--socket", daemon.socket).returncode == 0
            layer.fetch(ids[1])
        finish(process)
    finally:
        process.kill()
    found = recording.read(str(path))
    asked = [one[one >= 0] for one in ids]
    assert (found.keys & np.uint64((1 << 40) - 1)).tolist() == np.concatenate(asked).tolist()
    generations = {layer.handle: layer.generation for layer in found.layers}
    assert [generations[int(key) >> 40] for key in found.keys] == [1] * asked[0].size + [2] * asked[1].size
    stream = recording.to_stream(found, str(path))
    assert len(stream.classes) == 48
    assert stream.rows == sum(layer.rows for layer in found.layers if layer.generation == 2)
    assert engramd("plan", "--recorded", path, "--sizes", "4MiB").returncode == 0


def test_one_of_several_tables(engramd: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    small = recording.RecordedLayer(1, "small", 1, 100, 32, "0" * 64, 1, 0, ())
    large = recording.RecordedLayer(2, "large", 1, 5000, 264, "1" * 64, 1, 0, ())
    keys = np.concatenate([np.arange(100) + (1 << 40), np.arange(300) % 150 + (2 << 40)]).astype(np.uint64)
    found = recording.Recording((small, large), 1 << 32, 400, 40, 1.0, keys)
    path = tmp_path / "x.rec"
    recording.write(str(path), found)
    done = engramd("plan", "--recorded", path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "--name" in done.stderr
    assert "it has large, small" in engramd("plan", "--recorded", path, "--name", "other").stderr
    done = engramd("plan", "--recorded", path, "--name", "large", "--sizes", "264000", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["lookups"], plan["sampled"], plan["row_bytes"]) == (300, 300, 264)
    assert plan["curve"][0]["hit_ratio"] == 1.0  # the second half asks for the rows of the first


def test_a_recording_of_nothing_says_so(
    engramd: Callable[..., subprocess.CompletedProcess[str]], start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "x.rec"
    done = engramd("record", path, "--socket", start_daemon().socket, "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    for verb in ("plan", "heat"):
        done = engramd(verb, "--recorded", path)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "holds no sample of its 0 look-ups" in done.stderr


def test_a_damaged_recording_is_recognised(tmp_path: Path) -> None:
    layer = recording.RecordedLayer(1, "demo", 1, 100, 264, "0" * 64, 1, 0, ())
    path = tmp_path / "x.rec"
    keys = np.arange(50, dtype=np.uint64) + np.uint64(1 << 40)
    recording.write(str(path), recording.Recording((layer,), 1 << 32, 50, 0, 1.0, keys))
    whole = path.read_bytes()
    assert recording.read(str(path)).keys.tolist() == keys.tolist()
    random = np.random.default_rng(1)
    for _ in range(200):
        damaged = bytearray(whole)
        if random.random() < 0.3:
            del damaged[int(random.integers(len(whole))) :]
        else:
            damaged[int(random.integers(len(whole)))] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(EngramdError, match=r"x\.rec"):
            recording.read(str(path))
    keys[7] = (1 << 40) + 100
    recording.write(str(path), recording.Recording((layer,), 1 << 32, 50, 0, 1.0, keys))
    with pytest.raises(EngramdError, match="does not describe"):
        recording.read(str(path))


def test_a_plan_from_a_recording_and_from_a_running_daemon(
    engramd: Callable[..., subprocess.CompletedProcess[str]], start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    daemon = start_daemon(dram="4MiB")
    path = tmp_path / "x.rec"
    process = start_recording(daemon.socket, path, "--rate", "1")
    try:
        with engram_client.connect(daemon.socket) as client:
            table = client.table(layer=14)
            for seed in range(5):
                table.fetch(demand(seed, 8_000))
            finish(process)
            command = [sys.executable, "-m", "engramd.cli.main", "plan", "--live", "--socket", daemon.socket]
            command += ["--seconds", "3", "--sizes", "12MiB", "--json"]
            live = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            # Slowly: where samples come too fast a recording lowers its rate, and then 12 MiB are too small a cache.
            while live.poll() is None:
                table.fetch(demand(1, 2_000))
                time.sleep(0.01)
            errors = live.communicate(timeout=DEADLINE_S)[1]
    finally:
        process.kill()
    # So small a table is recorded whole by default, until samples come too fast: enough for a curve.
    assert live.returncode == 0, errors
    done = engramd("plan", "--recorded", path, "--sizes", "1MiB,4MiB", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    # Nobody asked for layer 1, so nothing is said about it.
    assert set(plan["curve"][0]["by_layer"]) == {"14"}
    assert {step["layer"] for need in plan["needs"] for step in need["steps"]} == {14}
    assert engramd("plan", "--recorded", path, "--sizes", "1MiB,4MiB").returncode == 0
    every = np.concatenate([demand(seed, 8_000) for seed in range(5)])
    every = every[every >= 0] + (2 << 40)
    simulation = lib.engram_simulation_create((1 << 20) // 264)
    hits = lib.engram_simulation_run(simulation, ffi.from_buffer("int64_t[]", every), every.size)
    lib.engram_simulation_destroy(simulation)
    assert plan["curve"][0]["hit_ratio_whole"] == pytest.approx(hits / every.size, abs=0.002)


def test_the_daemons_own_curve(
    engramd: Callable[..., subprocess.CompletedProcess[str]], start_daemon: Callable[..., Any]
) -> None:
    daemon = start_daemon(dram="4MiB")
    # Few enough that not even an idle sampler loses any.
    batches = [demand(seed, 8_000) for seed in range(20)]
    with engram_client.connect(daemon.socket) as client:
        tables = [client.table(layer=layer) for layer in LAYERS]
        for turn, ids in enumerate(batches):
            tables[turn % 2].fetch(ids)
    done = engramd("stats", "--socket", daemon.socket, "--mrc", "--json")
    assert done.returncode == 0, done.stderr
    curve = json.loads(done.stdout)["mrc"]
    every = np.concatenate([ids[ids >= 0] + ((1 + turn % 2) << 40) for turn, ids in enumerate(batches)])
    assert curve["lookups"] == every.size
    assert curve["lost"] == 0
    assert len(curve["points"]) >= 3
    for point in curve["points"]:
        simulation = lib.engram_simulation_create(point["rows"])
        hits = lib.engram_simulation_run(simulation, ffi.from_buffer("int64_t[]", every), every.size)
        lib.engram_simulation_destroy(simulation)
        assert point["hit_ratio"] == pytest.approx(hits / every.size, abs=0.02), point
    text = engramd("stats", "--socket", daemon.socket, "--mrc")
    assert "this daemon's budget" in text.stdout


def test_the_curve_begins_anew_with_rows_of_another_size(
    engramd: Callable[..., subprocess.CompletedProcess[str]],
    start_daemon: Callable[..., Any],
    checkpoint: Path,
    tmp_path: Path,
    copy: Path,
) -> None:
    daemon = start_daemon(copy, dram="4MiB")

    def curve() -> dict[str, Any]:
        return dict(json.loads(engramd("stats", "--socket", daemon.socket, "--mrc", "--json").stdout)["mrc"])

    with engram_client.connect(daemon.socket) as client:
        client.table(layer=1).fetch(demand(1, 8_000))
    before = curve()
    tensors = tmp_path / "values.toml"  # rows of 256 bytes: without the scales
    tensors.write_text(
        "".join(f'[[layers]]\nlayer = {layer}\nvalue = "layers.{layer}.engram.embed.weight"\n' for layer in LAYERS)
    )
    done = engramd("pack", checkpoint, copy, "--tensors", tensors)
    assert done.returncode == 0, done.stderr
    assert engramd("reload", "demo", "--socket", daemon.socket).returncode == 0
    ids = demand(2, 30_000)
    with engram_client.connect(daemon.socket) as client:
        assert client.table(layer=1).row_bytes == 256
        client.table(layer=1).fetch(ids)
    after = curve()
    asked = ids[ids >= 0]
    assert (before["lookups"], after["lookups"]) == (np.count_nonzero(demand(1, 8_000) >= 0), asked.size)
    assert {point["bytes"] % 256 for point in after["points"]} == {0}
    largest = after["points"][-1]
    assert largest["hit_ratio"] == pytest.approx(1 - np.unique(asked).size / asked.size, abs=0.02)


def test_a_curve_that_began_anew_has_no_earlier_one() -> None:
    def answer(lookups: int, *misses: int) -> dict[str, Any]:
        points = [{"rows": 10, "bytes": 2640, "misses": one, "hit_ratio": 0.5} for one in misses]
        return {"lookups": lookups, "lost": 0, "points": points}

    followed = live_curve.as_json(answer(150, 60), answer(100, 50))
    assert (followed["recent_lookups"], followed["points"][0]["recent_hit_ratio"]) == (50, 0.8)
    for earlier in (answer(300, 50), answer(100, 50, 40)):
        anew = live_curve.as_json(answer(150, 60), earlier)
        assert (anew["recent_lookups"], anew["points"][0]["recent_hit_ratio"]) == (150, 0.6)


def test_without_a_curve(
    engramd: Callable[..., subprocess.CompletedProcess[str]], start_daemon: Callable[..., Any]
) -> None:
    daemon = start_daemon(miss_curve="off")
    done = engramd("stats", "--socket", daemon.socket, "--mrc")
    assert done.returncode == 1
    assert "--miss-curve off" in done.stderr
