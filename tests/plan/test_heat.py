"""`engramd heat` against plain counts, and `engramd warm` against a real daemon."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client import NgramHasher
from numpy.typing import NDArray

from engramd._engine import lib
from engramd.heat import heat_file
from engramd.table import manifest

from .conftest import save_tokens

Engramd = Callable[..., subprocess.CompletedProcess[str]]
ROWS = 24 * 2000  # at least, in each layer of the table


@pytest.fixture(scope="session")
def hasher(tokenizer: str, table: Path) -> NgramHasher:
    found = manifest.load(str(table)).hash
    assert found is not None
    return NgramHasher.from_config(found, tokenizer)


def plain_counts(documents: list[NDArray[np.int64]], order: int) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        ids = document.tolist()
        counts.update(tuple(ids[at : at + order]) for at in range(len(ids) - order + 1))
    return counts


@pytest.mark.parametrize("count_by", ["rows", "tokens"])
def test_the_hottest_ngrams_are_those_of_a_plain_count(
    engramd: Engramd,
    documents: list[NDArray[np.int64]],
    token_file: Path,
    tokenizer: str,
    table: Path,
    hasher: NgramHasher,
    count_by: str,
) -> None:
    done = engramd(
        "heat", token_file, "--tokenizer", tokenizer, "--table", table, "--count-by", count_by, "--top", "200",
        "--min-count", "5", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    counted = [
        hasher.token_map[document].astype(np.int64) if count_by == "rows" else document for document in documents
    ]
    assert [entry["order"] for entry in result["ngrams"]] == [2, 3, 4]
    for entry in result["ngrams"]:
        expected = plain_counts(counted, entry["order"])
        frequent = sorted(((-count, ids) for ids, count in expected.items() if count >= 5))
        assert entry["frequent"] == len(frequent)
        assert entry["positions"] == expected.total()
        assert [(-one["count"], tuple(one["ids"])) for one in entry["top"]] == frequent[:200]
        for one in entry["top"]:
            assert hasher.token_map[one["tokens"]].tolist() == one["ids"] or count_by == "tokens"
            assert one["share"] == pytest.approx(one["count"] / expected.total())


def test_texts(engramd: Engramd, token_file: Path, tokenizer: str, table: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="decodes by another way")
    decoder = tokenizers.Tokenizer.from_file(tokenizer)
    done = engramd("heat", token_file, "--tokenizer", tokenizer, "--table", table, "--top", "300", "--json")
    for entry in json.loads(done.stdout)["ngrams"]:
        for one in entry["top"]:
            assert one["text"] == decoder.decode(one["tokens"], skip_special_tokens=False)


def test_rare_ngrams_stay_hidden(engramd: Engramd, tokenizer: str, table: Path, tmp_path: Path) -> None:
    path = tmp_path / "rare.npy"
    np.save(path, np.array([100, 200, 300] * 9 + list(range(1000, 1100)), np.int32))
    done = engramd("heat", path, "--tokenizer", tokenizer, "--table", table, "--json")
    assert done.returncode == 0, done.stderr
    assert all(entry["top"] == [] for entry in json.loads(done.stdout)["ngrams"])
    text = engramd("heat", path, "--tokenizer", tokenizer, "--table", table)
    assert text.returncode == 0, text.stderr


def test_one_source_at_a_time(engramd: Engramd) -> None:
    for arguments in ((), ("x.npy", "--recorded", "y.rec"), ("x.npy", "--live")):
        assert "one of them" in engramd("heat", *arguments).stderr
    assert "shown alone" in engramd("heat", "--heat", "x.heat", "y.npy").stderr


def test_coverage(
    engramd: Engramd, documents: list[NDArray[np.int64]], token_file: Path, tokenizer: str, table: Path,
    hasher: NgramHasher,
) -> None:  # fmt: skip
    done = engramd("heat", token_file, "--tokenizer", tokenizer, "--table", table, "--samples", "1000000000", "--json")
    entries = json.loads(done.stdout)["coverage"]
    ids = np.concatenate([hasher.row_ids(document) for document in documents]).astype(np.int64)
    for layer, order, head in ((0, 2, 0), (1, 4, 7)):
        rows = np.unique(ids[:, layer, (order - 2) * 8 + head], return_counts=True)[1]
        rows = np.sort(rows)[::-1]
        entry = next(
            one
            for one in entries
            if (one.get("layer"), one.get("order"), one.get("head")) == (hasher.layer_ids[layer], order, head)
        )
        assert (entry["lookups"], entry["rows"]) == (ids.shape[0], rows.size)
        assert entry["covered"]["0.1"] == pytest.approx(rows[: round(0.1 * rows.size)].sum() / ids.shape[0])
    assert entries[0]["lookups"] == ids.size


def test_a_warm_file_helps_the_first_requests(
    engramd: Engramd,
    start_daemon: Callable[..., Any],
    documents: list[NDArray[np.int64]],
    tokenizer: str,
    table: Path,
    hasher: NgramHasher,
    tmp_path: Path,
) -> None:
    other = save_tokens(tmp_path / "other.npz", documents[:-1])
    saved = tmp_path / "text.heat"
    done = engramd("heat", other, "--tokenizer", tokenizer, "--table", table, "--save", saved, "--rows", "8MiB")
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(os.stat(saved).st_mode) == 0o600
    ranked: dict[int, list[int]] = {}
    for block in heat_file.read(str(saved), manifest.load(str(table)).identity):
        ranked.setdefault(block.layer, []).extend(block.rows)
    assert sum(map(len, ranked.values())) <= (8 << 20) // 264
    # Hottest first: by the number of documents that need a row.
    ids = [hasher.row_ids(document)[:, 0].astype(np.int64) for document in documents[:-1]]
    needed = Counter(row for document in ids for row in np.unique(document).tolist())
    hot = [needed[row] for row in ranked[1]]
    assert hot == sorted(hot, reverse=True)
    assert hot[0] == max(needed.values())

    def hit_ratio(socket: str) -> float:
        with engram_client.connect(socket) as client:
            tables = [client.table(layer=layer) for layer in hasher.layer_ids]
            before = client.stats()
            rows = hasher.row_ids(documents[-1][:2000])
            for begin in range(0, rows.shape[0], 200):
                for index, one in enumerate(tables):
                    one.fetch(np.ascontiguousarray(rows[begin : begin + 200, index]))
            after = client.stats()
        counts = [
            sum(layer[name] for one in stats["tables"] for layer in one["layers"])
            for name in ("dram_hits", "dram_misses")
            for stats in (before, after)
        ]
        hits, misses = counts[1] - counts[0], counts[3] - counts[2]
        return float(hits / (hits + misses))

    cold = hit_ratio(start_daemon(dram="10MiB").socket)
    for arguments in (("--heat", saved), (other, "--tokenizer", tokenizer, "--table", table)):
        daemon = start_daemon(dram="10MiB")
        done = engramd("warm", *arguments, "--socket", daemon.socket)
        assert done.returncode == 0, done.stderr
        assert "dropped" not in done.stdout
        assert hit_ratio(daemon.socket) > cold + 0.05


def test_the_first_requests_push_out_the_coldest_warmed_rows(
    engramd: Engramd, start_daemon: Callable[..., Any], table: Path, tmp_path: Path
) -> None:
    daemon = start_daemon(dram="4MiB")
    rows = int(lib.engram_cache_rows(4 << 20, 264))
    path = tmp_path / "x.heat"
    shuffled = np.random.default_rng(3).permutation(ROWS)
    identity = manifest.load(str(table)).identity
    heat_file.write(str(path), identity, [heat_file.Block(1, array("Q", shuffled[:rows].tolist()))])
    done = engramd("warm", "--heat", path, "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    with engram_client.connect(daemon.socket) as client:
        layer = client.table(layer=1)
        # More than is free, and less than what the list's colder half holds.
        layer.fetch(shuffled[rows : rows + rows // 8])
        before = layer_counters(client)
        layer.fetch(shuffled[: rows // 8])
        after = layer_counters(client)
    # A few rows in a hundred find both places of the index taken.
    assert after["dram_hits"] - before["dram_hits"] > 0.95 * (rows // 8)


def test_only_cached_layers_are_warmed(
    engramd: Engramd, start_daemon: Callable[..., Any], table: Path, tmp_path: Path
) -> None:
    config = tmp_path / "engramd.toml"
    config.write_text(
        f'dram = "18MiB"\n[[table]]\nname = "demo"\npath = "{table}"\n[[table.layer]]\nlayer = 14\ntier = "resident"\n'
    )
    daemon = start_daemon(config=str(config), dram=None)
    path = tmp_path / "x.heat"
    hot = array("Q", range(ROWS))
    heat_file.write(str(path), manifest.load(str(table)).identity, [heat_file.Block(layer, hot) for layer in (14, 1)])
    done = engramd("warm", "--heat", path, "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    with engram_client.connect(daemon.socket) as client:
        first, last = client.stats()["tables"][0]["layers"]
        room = int(lib.engram_cache_rows(first["dram_bytes"], 264))
        cached = client.stats()["dram"]["rows_cached"] - last["rows_total"]
    assert 0.9 * room < cached <= room
    assert first["prefetch_reads"] > 0
    assert last["prefetch_reads"] == 0


def layer_counters(client: engram_client.Client) -> dict[str, Any]:
    """The first layer's entry in the daemon's statistics."""
    return dict(client.stats()["tables"][0]["layers"][0])


def test_warm_refusals(
    engramd: Engramd, start_daemon: Callable[..., Any], tmp_path: Path, tokenizer: str, table: Path
) -> None:
    daemon = start_daemon(dram="4MiB")
    path = tmp_path / "x.heat"
    identity = manifest.load(str(table)).identity
    heat_file.write(str(path), "00" * 32, [heat_file.Block(1, array("Q", [1, 2, 3]))])
    done = engramd("warm", "--heat", path, "--socket", daemon.socket)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert identity in done.stderr
    assert engramd("warm", "--heat", path, "--any-identity", "--socket", daemon.socket).returncode == 0
    heat_file.write(str(path), identity, [heat_file.Block(1, array("Q", [1 << 35]))])
    assert "outside layer 1" in engramd("warm", "--heat", path, "--socket", daemon.socket).stderr
    heat_file.write(str(path), identity, [heat_file.Block(3, array("Q", [1]))])
    assert "no layer 3" in engramd("warm", "--heat", path, "--socket", daemon.socket).stderr
    assert "one of them" in engramd("warm", "--socket", daemon.socket).stderr
    assert "no daemon" in engramd("warm", "--heat", path, "--socket", tmp_path / "none.sock").stderr.lower()
    uncached = start_daemon(dram="0")
    assert "nothing to warm" in engramd("warm", "--heat", path, "--socket", uncached.socket).stderr
    resident = start_daemon(dram="1GiB")
    done = engramd("warm", "--heat", path, "--socket", resident.socket)
    assert done.returncode == 0
    assert "nothing is to be warmed" in done.stdout
