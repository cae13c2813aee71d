"""Tier policies of tables and layers: what they place where, what they refuse, what changes while the daemon serves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest

DEADLINE_S = 60.0


@pytest.fixture
def configured(tmp_path: Path, table: Path) -> Callable[..., Path]:
    """`configured(dram, table_lines, layer_1_lines, layer_14_lines)` writes the configuration and returns its path."""

    def write(dram: int, lines: str = "", first: str = "", last: str = "") -> Path:
        text = f'dram = {dram}\n[[table]]\nname = "demo"\npath = "{table}"\n{lines}\n'
        for layer, layer_lines in ((1, first), (14, last)):
            if layer_lines:
                text += f"[[table.layer]]\nlayer = {layer}\n{layer_lines}\n"
        path = tmp_path / "engramd.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def layers(engramd: Callable[..., Any]) -> Callable[[Any], dict[int, dict[str, Any]]]:
    """`layers(daemon)` gives the statistics of each layer, once none is loading."""

    def read(daemon: Any) -> dict[int, dict[str, Any]]:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            stats = json.loads(engramd("stats", "--socket", daemon.socket, "--json").stdout)
            found = {layer["layer"]: layer for layer in stats["tables"][0]["layers"]}
            if all(layer["tier"] != "loading" for layer in found.values()):
                return found
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return read


def fetch_all(daemon: Any, rows: dict[int, np.ndarray]) -> None:
    """Every row of both layers is exact."""
    with engram_client.connect(daemon.socket) as client:
        for layer, expected in rows.items():
            for first in range(0, len(expected), 4096):
                ids = np.arange(first, min(first + 4096, len(expected)))
                assert (client.table(layer=layer).fetch(ids) == expected[ids]).all()


def test_a_resident_layer_beside_a_cached_one(
    start_daemon: Any, configured: Any, layers: Any, rows: dict[int, np.ndarray]
) -> None:
    size, share = rows[1].nbytes, 1 << 20
    daemon = start_daemon(config=str(configured(size + share, first='tier = "resident"')), dram=None)
    found = layers(daemon)
    assert (found[1]["tier"], found[1]["tier_policy"], found[1]["dram_bytes"]) == ("resident", "resident", size)
    assert (found[14]["tier"], found[14]["tier_policy"], found[14]["dram_bytes"]) == ("cached", "auto", share)
    fetch_all(daemon, rows)
    after = layers(daemon)
    assert (after[1]["nvme_reads"], after[1]["dram_misses"]) == (0, 0)
    assert after[14]["dram_misses"] == after[14]["rows"]
    with engram_client.connect(daemon.socket) as client:
        dram = client.stats()["dram"]
        assert dram["used_bytes"] <= dram["budget_bytes"] + size // 100  # digests and bitmap of the resident rows


def test_cached_stays_cached_whatever_the_budget(start_daemon: Any, configured: Any, layers: Any) -> None:
    daemon = start_daemon(config=str(configured(256 << 20, 'tier = "cached"', last='tier = "auto"')), dram=None)
    assert {layer: found["tier"] for layer, found in layers(daemon).items()} == {1: "cached", 14: "resident"}


def test_shares_make_caches_of_their_own(
    start_daemon: Any, configured: Any, layers: Any, rows: dict[int, np.ndarray]
) -> None:
    """What one layer is asked for takes nothing from a layer whose cache is its own."""
    config = configured(2_000_000, 'tier = "cached"', first="dram_share = 0.25")
    daemon = start_daemon(config=str(config), dram=None)
    assert [found["dram_bytes"] for found in layers(daemon).values()] == [500_000, 1_500_000]
    hot = np.arange(800)
    with engram_client.connect(daemon.socket) as client:
        client.table(layer=1).fetch(hot)
        for first in range(0, len(rows[14]), 4096):
            client.table(layer=14).fetch(np.arange(first, min(first + 4096, len(rows[14]))))
        before = layers(daemon)[1]["dram_hits"]
        assert (client.table(layer=1).fetch(hot) == rows[1][hot]).all()
    assert layers(daemon)[1]["dram_hits"] - before >= 790  # nearly all: index buckets may be full


def test_what_does_not_fit_is_refused(configured: Any, engramd: Any, rows: dict[int, np.ndarray]) -> None:
    config = configured(1 << 20, 'tier = "resident"')
    needed = sum(layer.nbytes for layer in rows.values())
    done = engramd("serve", "--config", config, "--check-config")
    assert done.returncode == 1
    assert f"resident layers (1, 14) take {needed} bytes, the DRAM budget is {1 << 20}" in done.stderr
    assert f"raise dram to {needed} or more" in done.stderr
    assert engramd("serve", "--config", configured(needed, 'tier = "resident"'), "--check-config").returncode == 0
    config = configured(needed, 'tier = "resident"', last='tier = "cached"\ndram_share = 0.9')
    done = engramd("serve", "--config", config, "--check-config")
    assert done.returncode == 1
    assert "shares of caches" in done.stderr
    config.write_text(config.read_text().replace("layer = 14", "layer = 15"))
    done = engramd("serve", "--config", config, "--check-config")
    assert "table demo has no layer 15 to give a tier to, only 1, 14" in done.stderr


def test_tiers_change_while_it_serves(
    start_daemon: Any, configured: Any, engramd: Any, layers: Any, rows: dict[int, np.ndarray]
) -> None:
    size = rows[1].nbytes
    daemon = start_daemon(config=str(configured(size + (1 << 20), first='tier = "resident"')), dram=None)
    loaded = layers(daemon)[1]["background_reads"]

    def reload() -> Any:
        return engramd("reload", "--config", "--socket", daemon.socket)

    configured(size + (1 << 20), 'tier = "resident"')
    done = reload()
    assert done.returncode == 1
    assert "tier stays demo: auto, layer 1 resident: resident layers (1, 14) take" in done.stderr
    assert layers(daemon)[14]["tier"] == "cached"
    # With a budget that covers them, in one file.
    configured(3 * size, 'tier = "resident"')
    done = reload()
    assert done.returncode == 0, done.stderr
    assert f"tier = demo: resident\ndram = {3 * size}\n" == done.stdout
    found = layers(daemon)
    assert {found[1]["tier"], found[14]["tier"]} == {"resident"}
    assert found[1]["background_reads"] == loaded, "a layer that stays resident is not read again"
    done = engramd("budget", str(size), "--socket", daemon.socket)
    assert done.returncode == 1
    assert "raise dram to" in done.stderr
    configured(1 << 20, 'tier = "cached"')
    assert reload().returncode == 0
    assert {layer["tier"] for layer in layers(daemon).values()} == {"cached"}
    fetch_all(daemon, rows)
    with engram_client.connect(daemon.socket) as client:
        stats = client.stats()
        assert stats["dram"]["used_bytes"] <= 1 << 20
        assert stats["config"]["table"][0]["tier"] == "cached"


def test_a_generation_that_does_not_fit_is_refused(
    start_daemon: Any, engramd: Any, checkpoint: Path, tmp_path: Path
) -> None:
    table, other = tmp_path / "demo", tmp_path / "other"
    assert engramd("pack", checkpoint, table).returncode == 0
    config = tmp_path / "engramd.toml"
    with engram_client.connect(start_daemon(table).socket) as client:
        rows = client.table(layer=1).num_rows + client.table(layer=14).num_rows
    config.write_text(f'dram = {rows * 264}\n[[table]]\npath = "{table}"\ntier = "resident"\n')
    daemon = start_daemon(config=str(config), dram=None)
    assert engramd("synth", other, "--vocab-size", "2600", "--seed", "8").returncode == 0
    assert engramd("pack", other, table).returncode == 0
    done = engramd("reload", "demo", "--socket", daemon.socket)
    assert done.returncode == 1
    assert "stays at generation 1: resident layers (1, 14) take" in done.stderr
    with engram_client.connect(daemon.socket) as client:
        assert client.table(layer=1).generation == 1
        client.table(layer=1).fetch(np.arange(100))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[table]]\npath = "/a"\ntier = "warm"\n', ":3: tier of table 1: 'warm' is none of auto, resident, cached"),
        ('[[table]]\npath = "/a"\ndram_share = 2\n', ":3: dram_share of table 1: 2 is not a number from 0.001 to 1"),
        ('[[table]]\npath = "/a"\ntier = "resident"\ndram_share = 0.1\n', ":4: dram_share of table 1: a resident"),
        ('[[table]]\npath = "/a"\n[[table.layer]]\ntier = "cached"\n', "None is not the number of a layer"),
        (
            '[[table]]\npath = "/a"\ntier = "auto"\n[[table.layer]]\nlayer = 1\n[[table.layer]]\ntier="x"\nlayer=2\n',
            ":7: tier of table 1, layer entry 2: 'x' is none of",
        ),
        ('[[table]]\npath = "/a"\n[[table.layer]]\nlayer = 1\n[[table.layer]]\nlayer = 1\n', "layer 1 has two entries"),
        ('[[table]]\npath = "/a"\n[[table.layer]]\nlayer = 1\ntire = "auto"\n', ":5: tire of table 1, layer entry 1"),
        (
            '[[table]]\npath = "/a"\ndram_share = 0.6\n[[table]]\npath = "/b"\ndram_share = 0.6\n',
            "the shares of dram add up to 1.2, more than all of it (a: 0.6, b: 0.6)",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_explained(mistake_of: Callable[[str], str], text: str, words: str) -> None:
    assert words in mistake_of(text)
