"""Background verification by the daemon: finds damage no request has met, keeps its place, is mended by repair."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest

from engramd.daemon.scrub import RUN_BYTES
from tests.damage import flip_bit

PAGE = 4096


def test_damage_is_found_reported_and_mended_while_serving(
    start_daemon: Any, engramd: Callable[..., Any], control: Any, checkpoint: Path, copy: Path
) -> None:
    daemon = start_daemon(copy, dram="0")
    online = ["verify", copy, "--online", "--socket", daemon.socket]
    good = engramd(*online)
    assert good.returncode == 0, good.stderr
    assert "never" not in good.stdout
    file = copy / "layer-14.g000001.pages"
    for page in (77, 78):
        flip_bit(file, page * PAGE + 1000)
    found = engramd(*online)
    assert found.returncode == 1
    assert "layer 14 page 77: row 115" in found.stderr
    assert "2 pages are bad" in found.stderr
    assert "Traceback" not in found.stderr
    assert engramd(*online, "--report").returncode == 1
    assert engramd("verify", "demo", "--online", "--socket", daemon.socket, "--report").returncode == 1
    stats = json.loads(engramd("stats", "--socket", daemon.socket, "--json").stdout)
    assert stats["scrub"]["bad_pages"] == 2
    assert engramd(*online).returncode == 1
    assert daemon.log.count("scrubbing finds that page 77") == 1, "once for each page"
    client = control(daemon.socket)
    ids = (78 * 15 + 3).to_bytes(4, "little")
    reply, _ = client.request("fetch", ids, table="demo", layer=14, width=4)
    assert reply["error"] == "PageCorrupt"
    mended = engramd("repair", copy, "--from", checkpoint)
    assert mended.returncode == 0, mended.stderr
    assert "2 rewritten" in mended.stdout
    assert client.request("fetch", ids, table="demo", layer=14, width=4)[0]["ok"], "served again without a restart"
    clean = engramd(*online)
    assert clean.returncode == 0, clean.stderr


def test_the_place_is_kept_over_a_restart(
    start_daemon: Any, engramd: Callable[..., Any], copy: Path, tmp_path: Path
) -> None:
    """A slow pass goes on where it stopped, with what it had found."""
    pages = (copy / "layer-1.g000001.pages").stat().st_size // PAGE
    state = tmp_path / "state"
    flip_bit(copy / "layer-1.g000001.pages", 3 * PAGE + 1000)
    daemon = start_daemon(copy, dram="0", state=str(state))
    # Begun by hand in the middle, as a stop would leave it: the first minutes of a daemon's life are without scrubbing.
    assert daemon.stop() == 0
    saved = json.loads((state / "scrub.json").read_text())
    assert stat.S_IMODE((state / "scrub.json").stat().st_mode) == 0o600
    assert saved["version"] == 1
    manifest = json.loads((copy / "manifest.json").read_text())
    key = f"{manifest['table_id']}:1:1"
    saved["layers"][key] = {
        "position": pages - 10, "passes": 0, "finished_at": 0.0, "bad_pages": 0, "bad": [], "found_pages": 1,
        "found": [[3, 45]],
    }  # fmt: skip
    (state / "scrub.json").write_text(json.dumps(saved))
    again = start_daemon(copy, dram="0", state=str(state))
    report = engramd("verify", copy, "--online", "--report", "--socket", again.socket)
    assert f"now at page {pages - 10}" in report.stdout
    assert "page 3: row 45" in report.stderr
    assert again.stop() == 0
    (state / "scrub.json").write_text("{")
    third = start_daemon(copy, dram="0", state=str(state))
    assert "scrubbing begins anew" in third.log
    assert engramd("verify", copy, "--online", "--socket", third.socket).returncode == 1
    assert third.stop() == 0
    saved = json.loads((state / "scrub.json").read_text())
    assert saved["layers"][key]["passes"] == 1
    assert [page for page, _ in saved["layers"][key]["bad"]] == [3]


def test_a_stranger_may_look_but_not_start(start_daemon: Any, as_nobody: Any, copy: Path) -> None:
    import msgpack
    import zmq

    daemon = start_daemon(copy, dram="0")
    for path in (daemon.socket, daemon.socket + ".ring"):
        os.chmod(path, 0o666)
    os.chmod(os.path.dirname(daemon.socket), 0o755)

    def ask() -> str:
        context: zmq.Context[Any] = zmq.Context(1)
        asking = context.socket(zmq.DEALER)
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.RCVTIMEO, 20000)
        asking.connect(f"ipc://{daemon.socket}")
        texts = []
        for start in (0, 1):
            asking.send(msgpack.packb({"v": 1, "id": start, "verb": "scrub", "table": "demo", "start": start}))
            texts.append(str(msgpack.unpackb(asking.recv())))
        return "\n".join(texts)

    looked, started = as_nobody(ask).split("\n")
    assert "'ok': True" in looked
    assert "not permitted to uid 65534" in started


@pytest.fixture
def two_tables(engramd: Callable[..., Any], checkpoint: Path, table: Path, tmp_path: Path) -> tuple[str, str]:
    """`asked` and `other`, to be served beside each other. Once a pass that was asked for is over, the quiet after the
    daemon's start is over too, and the other table's turn comes."""
    assert engramd("pack", checkpoint, tmp_path / "other").returncode == 0
    return f"asked={table}", f"other={tmp_path / 'other'}"


@pytest.mark.parametrize("rate", [0, 1 << 20])
def test_the_rate_is_kept(
    start_daemon: Any, engramd: Callable[..., Any], two_tables: tuple[str, str], rate: int
) -> None:
    """In the background, while nobody needs the drive. Without a rate nothing is read there."""
    daemon = start_daemon(*two_tables, dram="0", scrub=str(rate))
    assert engramd("verify", "asked", "--online", "--socket", daemon.socket).returncode == 0
    with engram_client.connect(daemon.socket) as client:
        if rate:
            wait_for_scrubbing(client)
        before, began = scrubbed_bytes(client), time.monotonic()
        time.sleep(1.5)
        after, took = scrubbed_bytes(client), time.monotonic() - began
        assert client.stats()["scrub"]["rate_bytes_s"] == rate
        assert client.stats()["scrub"]["passes"] == 2
    assert after - before <= rate * took + (RUN_BYTES if rate else 0)


def test_demand_comes_first(faulty_daemon: Any, engramd: Callable[..., Any], two_tables: tuple[str, str]) -> None:
    """While requests need the drive a tenth of the rate is left, so that a pass ends all the same."""
    rate = 64 << 20
    daemon = faulty_daemon("slow=1,slow_ms=60000", *two_tables, dram="0", scrub=str(rate))
    with engram_client.connect(daemon.socket) as client:
        demand = client.table("asked", layer=1).submit(np.arange(0, 1500, 15))  # 100 pages, of which none comes
        assert engramd("verify", "asked", "--online", "--socket", daemon.socket).returncode == 0
        wait_for_scrubbing(client)
        before, began = scrubbed_bytes(client), time.monotonic()
        time.sleep(1.0)
        after, took = scrubbed_bytes(client), time.monotonic() - began
        seen = client.stats()
        assert seen["reader"]["in_flight"] * 4 > seen["reader"]["in_flight_cap"], "else this test shows nothing"
        assert seen["scrub"]["passes"] == 2, "of the table that was asked for alone"
        assert before < after <= before + 0.1 * rate * took + RUN_BYTES
        demand.release()


def scrubbed_bytes(client: engram_client.Client) -> int:
    """What passes that have begun have read."""
    return int(client.stats()["scrub"]["position_pages"]) * PAGE


def wait_for_scrubbing(client: engram_client.Client) -> None:
    """Returns once a pass that nobody has asked for is under way."""
    deadline = time.monotonic() + 60
    while not scrubbed_bytes(client):
        assert time.monotonic() < deadline, "nothing is scrubbed in the background"
        time.sleep(0.01)


def test_scrubbing_of_an_unknown_table(start_daemon: Any, engramd: Callable[..., Any], table: Path) -> None:
    daemon = start_daemon(table, dram="0", scrub="0")
    done = engramd("verify", "nothing", "--online", "--socket", daemon.socket)
    assert done.returncode == 1
    assert "no table 'nothing' is served; there is: demo" in done.stderr
    assert engramd("verify", table, "--report").returncode == 1


def drive_bytes(pid: int) -> int:
    """What the process has had read from the drive, by the kernel's count."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError("no read_bytes line")


def test_reads_for_scrubbing_are_counted(start_daemon: Any, engramd: Callable[..., Any], copy: Path) -> None:
    daemon = start_daemon(copy, dram="0")

    def counted_pages() -> int:
        stats = json.loads(engramd("stats", "--socket", daemon.socket, "--json").stdout)
        layers = stats["tables"][0]["layers"]
        return sum(layer["nvme_reads"] + layer["prefetch_reads"] + layer["background_reads"] for layer in layers)

    pages_before, bytes_before = counted_pages(), drive_bytes(daemon.pid)
    assert engramd("verify", copy, "--online", "--socket", daemon.socket).returncode == 0
    pages, read = counted_pages() - pages_before, drive_bytes(daemon.pid) - bytes_before
    assert pages == sum(file.stat().st_size for file in copy.glob("*.pages")) // PAGE
    # What else the process reads meanwhile (its own modules, once) is small beside it.
    assert pages * PAGE <= read <= pages * PAGE * 1.02 + (1 << 20)
