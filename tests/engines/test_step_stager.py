"""A step's rows against their formula: any size, any split into parts, any rank; and steps that fail as a whole."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client.cuda.device_table import rank_columns
from engram_engines.core import ArenaTarget, Part, StepStager
from numpy.typing import NDArray

LAYERS = (1, 14)
COLUMNS = 24


@pytest.fixture
def tables(start_daemon: Any, connect: Callable[..., Any]) -> list[engram_client.Table]:
    client = connect(start_daemon(arena="1MiB"))
    return [client.table(layer=layer) for layer in LAYERS]


def random_ids(tables: list[engram_client.Table], tokens: int, seed: int, dtype: Any = np.int32) -> NDArray[Any]:
    generator = np.random.default_rng(seed)
    ids = np.stack([generator.integers(0, table.num_rows, (tokens, COLUMNS)) for table in tables], axis=1)
    ids[generator.random(ids.shape) < 0.05] = -1
    return ids.astype(dtype)


def expected_rows(rows: dict[int, Any], layer: int, ids: NDArray[Any]) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = rows[layer][np.maximum(ids, 0)]
    found[ids == -1] = 0
    return found


def collected(parts: Any, tokens: int, columns: int) -> NDArray[np.uint8]:
    whole = np.full((tokens, columns, 264), 255, np.uint8)
    for part in parts:
        assert isinstance(part, Part)
        whole[part.first_token : part.first_token + part.tokens] = part.rows
    return whole


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("tokens", [0, 1, 3, 41, 42, 200])
def test_rows(tables: list[Any], rows: dict[int, Any], tokens: int, dtype: Any) -> None:
    limit = tables[0]._client.max_ticket_rows
    stager = StepStager([ArenaTarget(table, limit) for table in tables], (0, 1), COLUMNS)
    assert limit < 200 * COLUMNS, "no step of this test takes several parts"
    for seed in range(3):
        ids = random_ids(tables, tokens, seed, dtype)
        with stager.begin(ids) as step:
            for position, layer in enumerate(LAYERS):
                found = collected(step.parts(position), tokens, COLUMNS)
                assert (found == expected_rows(rows, layer, ids[:, position])).all()
    assert stager.counters.steps == 3
    assert stager.counters.rows == 3 * tokens * 2 * COLUMNS
    assert stager.counters.submissions >= 3 * 2 * -(-tokens * COLUMNS // limit)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_rank_its_columns(tables: list[Any], rows: dict[int, Any], ranks: int, strided: bool) -> None:
    ids = random_ids(tables, 5, 1)
    share = COLUMNS // ranks
    for rank in range(ranks):
        columns = rank_columns(COLUMNS, rank, ranks, strided=strided)
        targets = [ArenaTarget(table, 500) for table in tables]
        with StepStager(targets, (0, 1), COLUMNS, columns=columns).begin(ids) as step:
            for position, layer in enumerate(LAYERS):
                found = collected(step.parts(position), 5, share)
                assert (found == expected_rows(rows, layer, ids[:, position, columns])).all()


def test_split_layout(tables: list[Any], rows: dict[int, Any]) -> None:
    ids = random_ids(tables, 7, 2)
    with StepStager([ArenaTarget(tables[1], 500, "split")], (1,), COLUMNS).begin(ids) as step:
        for part in step.parts(0):
            values, scales = part.rows
            assert (np.concatenate([values, scales], axis=-1) == expected_rows(rows, 14, ids[:, 1])).all()


def test_a_bad_id_fails_the_step(tables: list[Any], rows: dict[int, Any]) -> None:
    stager = StepStager([ArenaTarget(table, 500) for table in tables], (0, 1), COLUMNS)
    ids = random_ids(tables, 4, 3)
    ids[2, 1, 5] = tables[1].num_rows
    step = stager.begin(ids)
    step.finish(0)
    with pytest.raises(engram_client.RowIdError):
        step.finish(1)
    assert stager.counters.failed_steps == 1
    with pytest.raises(engram_client.EngramError, match="failed or was released"):
        step.finish(1)
    # Nothing of it is left behind.
    assert tables[0]._client.session.usage()["open_tickets"] == 0
    ids[2, 1, 5] = 0
    with stager.begin(ids) as again:
        assert (collected(again.parts(0), 4, COLUMNS) == expected_rows(rows, 1, ids[:, 0])).all()
        again.finish(1)


def test_a_daemon_that_dies_fails_the_step(
    start_daemon: Any, connect: Callable[..., Any], rows: dict[int, Any]
) -> None:
    daemon = start_daemon()
    client = connect(daemon)
    tables = [client.table(layer=layer) for layer in LAYERS]
    stager = StepStager([ArenaTarget(table, 500) for table in tables], (0, 1), COLUMNS)
    ids = random_ids(tables, 4, 4)
    step = stager.begin(ids)
    step.finish(0)
    daemon.kill()
    lost = stager_error(stager, ids)
    assert isinstance(lost, engram_client.DaemonLost)
    start_daemon(socket=daemon.socket)
    with stager.begin(ids) as again:
        assert (collected(again.parts(0), 4, COLUMNS) == expected_rows(rows, 1, ids[:, 0])).all()


def stager_error(stager: StepStager, ids: NDArray[Any]) -> Exception | None:
    try:
        with stager.begin(ids) as step:
            step.finish(0)
            step.finish(1)
    except engram_client.EngramError as error:
        return error
    return None


def test_a_stuck_daemon_ends_the_step_at_its_deadline(start_daemon: Any, connect: Callable[..., Any]) -> None:
    daemon = start_daemon()
    client = connect(daemon)
    tables = [client.table(layer=layer) for layer in LAYERS]
    stager = StepStager([ArenaTarget(table, 500) for table in tables], (0, 1), COLUMNS, deadline_s=0.2)
    daemon.freeze()
    try:
        error = stager_error(stager, random_ids(tables, 4, 5))
    finally:
        daemon.signal(signal.SIGCONT)
    assert isinstance(error, engram_client.RequestTimeout)


@pytest.mark.parametrize("shape", [(4, 24), (4, 1, 24), (4, 2, 23)])
def test_shapes(tables: list[Any], shape: tuple[int, ...]) -> None:
    stager = StepStager([ArenaTarget(table, 500) for table in tables], (0, 1), COLUMNS)
    with pytest.raises(ValueError, match=r"\[tokens, 2 or more layers, 24 columns\]"):
        stager.begin(np.zeros(shape, np.int32))


def test_refusals(tables: list[Any]) -> None:
    with pytest.raises(ValueError, match="larger --arena"):
        StepStager([ArenaTarget(tables[0], 23)], (0,), COLUMNS)
    with pytest.raises(ValueError, match="1 targets and 2 layers"):
        StepStager([ArenaTarget(tables[0], 500)], (0, 1), COLUMNS)
    with pytest.raises(ValueError, match="select none"):
        StepStager([ArenaTarget(tables[0], 500)], (0,), COLUMNS, columns=slice(24, None))
