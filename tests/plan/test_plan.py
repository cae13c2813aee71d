"""`engramd plan` against simulations written here, and its refusals."""

from __future__ import annotations

import heapq
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engram_client import NgramHasher
from numpy.typing import NDArray

from engramd._engine import ffi, lib
from engramd.errors import EngramdError
from engramd.plan import assumptions
from engramd.table import manifest

from .conftest import save_tokens

Engramd = Callable[..., subprocess.CompletedProcess[str]]
SIZES = (1 << 20, 4 << 20, 12 << 20)


def shortened(documents: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Few enough tokens for simulations in Python."""
    return [document[:2500] for document in documents[:3]]


@pytest.fixture(scope="session")
def keys(documents: list[NDArray[np.int64]], tokenizer: str, table: Path) -> NDArray[np.int64]:
    """Every look-up of the documents in order, layer << 40 | row id."""
    found = manifest.load(str(table))
    assert found.hash is not None
    hasher = NgramHasher.from_config(found.hash, tokenizer)
    parts = []
    for document in shortened(documents):
        ids = hasher.row_ids(document).astype(np.int64)
        ids += np.arange(1, 1 + len(hasher.layer_ids))[None, :, None] << 40
        parts.append(ids.reshape(-1))
    return np.concatenate(parts)


@pytest.fixture(scope="session")
def planned(engramd: Engramd, token_file: Path, tokenizer: str, table: Path) -> Callable[..., dict[str, Any]]:
    """`planned(*arguments)` runs `engramd plan --json` on the token file."""

    def run(*arguments: str) -> dict[str, Any]:
        done = engramd("plan", token_file, "--tokenizer", tokenizer, "--table", table, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return run


def belady_hits(keys: NDArray[np.int64], rows: int) -> int:
    """Hits of Belady's MIN, by a heap of next uses."""
    sequence = keys.tolist()
    next_use = [len(sequence)] * len(sequence)
    seen: dict[int, int] = {}
    for position in range(len(sequence) - 1, -1, -1):
        next_use[position] = seen.get(sequence[position], len(sequence))
        seen[sequence[position]] = position
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for position, key in enumerate(sequence):
        hits += key in cached
        cached[key] = next_use[position]
        heapq.heappush(farthest, (-next_use[position], key))
        while len(cached) > rows:
            use, victim = heapq.heappop(farthest)
            if cached.get(victim) == -use:
                del cached[victim]
    return hits


def policy_hits(keys: NDArray[np.int64], rows: int) -> int:
    """Hits of the engine's own policy."""
    simulation = lib.engram_simulation_create(rows)
    try:
        return int(lib.engram_simulation_run(simulation, ffi.from_buffer("int64_t[]", keys), keys.size))
    finally:
        lib.engram_simulation_destroy(simulation)


def test_the_whole_stream_is_simulated_exactly(
    engramd: Engramd,
    documents: list[NDArray[np.int64]],
    keys: NDArray[np.int64],
    tokenizer: str,
    table: Path,
    tmp_path: Path,
) -> None:
    path = save_tokens(tmp_path / "short.npz", shortened(documents))
    sizes = ",".join(map(str, SIZES))
    done = engramd("plan", path, "--tokenizer", tokenizer, "--table", table, "--sizes", sizes, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["rate"] == 1
    assert plan["lookups"] == plan["sampled"] == keys.size
    for point, size in zip(plan["curve"], SIZES, strict=True):
        rows = size // 264
        assert (point["rows"], point["bytes"]) == (rows, rows * 264)
        assert point["hit_ratio_whole"] == pytest.approx(policy_hits(keys, rows) / keys.size, abs=1e-12)
        assert lib.engram_cache_rows(point["dram_bytes"], 264) >= rows
        assert point["hit_ratio_whole"] <= point["belady_whole"]
    rows = SIZES[0] // 264
    assert plan["curve"][0]["belady_whole"] == pytest.approx(belady_hits(keys, rows) / keys.size, abs=1e-12)


def test_a_sample_tells_nearly_the_same(planned: Callable[..., dict[str, Any]]) -> None:
    sizes = ",".join(map(str, SIZES))
    exact, sampled = (
        planned("--sizes", sizes, "--samples", "1000000000"),
        planned("--sizes", sizes, "--samples", "800000"),
    )
    assert sampled["rate"] < 0.3
    for one, other in zip(exact["curve"], sampled["curve"], strict=True):
        for name in ("hit_ratio", "hit_ratio_whole", "belady", "belady_whole"):
            assert other[name] == pytest.approx(one[name], abs=0.015), (one["bytes"], name)


def test_classes_add_up(planned: Callable[..., dict[str, Any]]) -> None:
    point = planned("--sizes", "4MiB", "--samples", "1000000000")["curve"][0]
    assert set(point["by_order"]) == {"2", "3", "4"}
    assert np.mean(list(point["by_order"].values())) == pytest.approx(point["hit_ratio"], abs=1e-9)
    assert np.mean(list(point["by_layer"].values())) == pytest.approx(point["hit_ratio"], abs=1e-9)
    assert point["by_order"]["2"] > point["by_order"]["3"] > point["by_order"]["4"]


def test_needs_follow_from_the_hit_ratio(planned: Callable[..., dict[str, Any]]) -> None:
    plan = planned("--sizes", "4MiB", "--tokens-per-s", "10000", "--drive-iops", "400000")
    needs = {need["name"]: need for need in plan["needs"]}
    assert needs["SSD only"]["iops"] == pytest.approx(480_000)
    assert needs["all DRAM"]["iops"] == 0
    assert all(step["fits"] for step in needs["all DRAM"]["steps"])
    middle = plan["needs"][1]
    assert middle["iops"] == pytest.approx(480_000 * (1 - plan["curve"][0]["hit_ratio"]), rel=1e-6)
    # 70 % of the drive's reads are planned with.
    assert plan["smallest"]["iops"] <= 280_000
    assert plan["smallest"]["tokens_per_s"] >= 9000
    assert [cost["name"] for cost in plan["cost"]] == ["all DRAM", "tiered", "SSD only"]


def test_late_steps_ask_a_drive_for_less(planned: Callable[..., dict[str, Any]]) -> None:
    plan = planned("--sizes", "4MiB", "--tokens-per-s", "10000", "--drive-iops", "450000")
    step_us = 8000.0
    for need in plan["needs"]:
        exposed_us = sum(step["exposed_us"] for step in need["steps"])
        share = share_of(need)
        # What the steps leave at the load of that very rate; no drive is planned with more than its 70 %.
        assert share == pytest.approx(min(step_us / (step_us + exposed_us), 0.7 / max(need["load"], 0.7)), rel=1e-3)
    all_from_drive = plan["needs"][0]
    assert all_from_drive["load"] > 1
    (first, last) = all_from_drive["steps"]
    load = share_of(all_from_drive) * all_from_drive["load"]
    reading_us = (90 + first["reads"] / 0.45) / (1 - load)
    assert first["usual_us"] == pytest.approx(reading_us + 10 + 0.08 * 1536 + 1536 * 264 / 20e3, rel=1e-3)
    assert last["usual_us"] == pytest.approx(first["usual_us"])


def share_of(need: dict[str, Any]) -> float:
    """Of 10,000 tokens a second."""
    return float(need["tokens_per_s"]) / 10_000


def test_the_drive_that_doctor_measured(
    engramd: Engramd, planned: Callable[..., dict[str, Any]], table: Path, tmp_path: Path
) -> None:
    path = tmp_path / "doctor.json"
    path.write_text(engramd("doctor", table, "--json").stdout)
    measured = [finding["figures"] for finding in json.loads(path.read_text()) if finding["figures"]]
    if not measured:
        pytest.skip("io_uring is forbidden here: doctor measures no drive")
    (figures,) = measured
    drive = planned("--sizes", "4MiB", "--drive", str(path))["assumptions"]["drive"]
    assert {key: drive[key] for key in ("iops", "read_us", "p99_us")} == pytest.approx(
        {key: figures[key] for key in ("iops", "read_us", "p99_us")}
    )
    assert str(path) in drive["name"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "no drive was measured"),
        ('[{"figures": {"iops": 5.0}}, {"figures": 3}, 7]', "no drive was measured"),
        ("7", "neither a JSON object"),
        ('{"read_us": 5}', "holds no iops"),
        ('{"iops": -5}', "drive.iops"),
        ('{"iops": "many"}', "drive.iops"),
        ("{", "not valid JSON"),
    ],
)
def test_wrong_drives_are_named(
    engramd: Engramd, token_file: Path, tokenizer: str, table: Path, text: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "drive.json"
    path.write_text(text)
    done = engramd("plan", token_file, "--tokenizer", tokenizer, "--table", table, "--drive", path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert expected in done.stderr


def test_prices_and_measured_rates(planned: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(
        "[prices]\nserver = 1000\ndram_per_gib = 0\ndrive = 0\nlifetime_years = 1\nwatts = 0\ndram_watts_per_gib = 0\n"
        "[rates]\nall_dram = 500\n"
    )
    first = planned("--sizes", "4MiB", "--assumptions", str(path))["cost"][0]
    assert first["measured"]
    assert first["tokens_per_dollar"] == pytest.approx(500 * 3600 * 24 * 365.25 / 1000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[prices]\nserver = -1\n", "prices.server"),
        ("[prices]\nlifetime_years = 0\n", "prices.lifetime_years"),
        ("[drive]\nutilisation = 2\n", "drive.utilisation"),
        ("[drive]\nspeed = 2\n", "drive.speed"),
        ("[traffic]\ntokens_per_s = nan\n", "traffic.tokens_per_s"),
        ("[somewhere]\n", "somewhere"),
        ("[", "not a TOML file"),
    ],
)
def test_wrong_assumptions_are_named(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(EngramdError, match=expected.replace(".", r"\.")):
        assumptions.load(str(path))


def test_text_and_picture(engramd: Engramd, token_file: Path, tokenizer: str, table: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws the picture")
    for name, begin in (("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml")):
        done = engramd(
            "plan", token_file, "--tokenizer", tokenizer, "--table", table, "--samples", "200000",
            "--picture", tmp_path / name,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "tokens per $" in done.stdout
        assert "Assumptions" in done.stdout
        assert (tmp_path / name).read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "one of them"),
        (("missing.npz", "--tokenizer", "t.json", "--config", "c.json"), "c.json"),
        (("x.npy",), "--tokenizer"),
        (("--recorded", "missing.rec"), "missing.rec"),
        (("--recorded", "r", "--live"), "one of them"),
        (("--live", "--socket", "/nowhere.sock"), "/nowhere.sock"),
        (("x.npy", "--picture", "x.jpg"), ".png"),
        (("x.npy", "--samples", "1"), "--samples"),
    ],
)
def test_refusals(engramd: Engramd, arguments: tuple[str, ...], expected: str) -> None:
    done = engramd("plan", *arguments)
    assert done.returncode == 1
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_token_files_that_are_none(engramd: Engramd, tokenizer: str, table: Path, tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "floats.npy": np.zeros(3),
        "square.npy": np.zeros((3, 3), np.int32),
        "empty.npy": np.zeros(0, np.int32),
        "negative.npy": np.array([1, -5, 3]),
        "large.npy": np.array([1, 10**7]),
    }
    for name, array in cases.items():
        np.save(tmp_path / name, array)
    np.savez(tmp_path / "unnamed.npz", x=np.zeros(3, np.int32))
    np.savez(tmp_path / "lengths.npz", tokens=np.zeros(3, np.int32), doc_lengths=np.array([1, 1]))
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 no zip")
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    for path in sorted(tmp_path.iterdir()):
        done = engramd("plan", path, "--tokenizer", tokenizer, "--table", table)
        assert done.returncode == 1, path
        assert done.stderr.count("\n") == 1, done.stderr
