"""Rows by fetch and prefetch, over both transports: exact for every shape and dtype, or an error that says why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client import RowIdError
from hypothesis import given
from hypothesis import strategies as st


def test_attributes(client: Any, table: Any) -> None:
    handle = client.table("demo", layer=14)
    assert (handle.name, handle.layer, handle.row_bytes, handle.value_bytes) == ("demo", 14, 264, 256)
    assert handle.head_sizes.dtype == np.int64
    assert not handle.head_sizes.flags.writeable
    assert int(handle.head_sizes.sum()) == handle.num_rows
    assert len(handle.identity) == 64
    assert handle.generation >= 1
    assert client.table(layer=14, identity=handle.identity.upper()).identity == handle.identity


def test_unknown_tables(client: Any) -> None:
    for arguments in ({"name": "nope", "layer": 1}, {"layer": 7}, {}, {"name": "demo"}):
        with pytest.raises(engram_client.UnknownTable, match="demo layer 1"):
            client.table(**arguments)
    with pytest.raises(engram_client.TableMismatch, match="00000000"):
        client.table(layer=1, identity="00" * 32)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        client.table(layer=1, identity="abc")


def test_wishes_of_a_wrong_type(client: Any) -> None:
    for wrong in ({"layer": "1"}, {"layer": 1.0}, {"name": 5}, {"name": b"demo"}, {"identity": 7}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            client.table(**wrong)
    with pytest.raises(ValueError, match="layer"):
        client.table(layer=-1)
    assert client.table(layer=np.int32(14)).layer == 14


def test_any_shape_dtype_and_layout(client: Any, rows_of: Any) -> None:
    handles = {layer: client.table(layer=layer) for layer in (1, 14)}

    @given(
        layer=st.sampled_from([1, 14]),
        shape=st.lists(st.integers(0, 7), max_size=4).map(tuple),
        dtype=st.sampled_from(["i4", "i8", ">i4", ">i8", "u2", "u4", "u8", "i2"]),
        seed=st.integers(0, 2**32 - 1),
        zeros=st.booleans(),
        order=st.sampled_from(["C", "F", "strided"]),
        layout=st.sampled_from(["packed", "split"]),
        into=st.booleans(),
    )
    def check(
        layer: int, shape: tuple[int, ...], dtype: str, seed: int, zeros: bool, order: str, layout: Any, into: bool
    ) -> None:
        handle = handles[layer]
        generator = np.random.default_rng(seed)
        most = min(handle.num_rows, np.iinfo(dtype).max)
        # Few distinct ids, so that there are duplicates; -1 where the type has it.
        pool = generator.integers(0, most, 5)
        ids = generator.choice(pool, size=shape)
        if zeros and dtype[-2] != "u":
            ids = np.where(generator.random(shape) < 0.3, -1, ids)
        ids = np.asarray(ids, dtype=dtype, order="F" if order == "F" else "C")
        if order == "strided" and ids.ndim:
            ids = np.repeat(ids, 2, axis=0)[::2]
        want = rows_of(ids, layer)
        if layout == "packed":
            out = np.full(want.shape, 0xEE, np.uint8) if into else None
            rows = handle.fetch(ids, out=out)
            assert rows.dtype == np.uint8
            assert rows.shape == want.shape
            assert (rows == want).all()
            assert out is None or rows is out
            with handle.submit(ids) as ticket:
                assert (ticket.wait(30) == want).all()
            return
        pair = (np.empty((*shape, 256), np.uint8), np.empty((*shape, 8), np.uint8)) if into else None
        values, scales = handle.fetch(ids, layout="split", out=pair)
        assert (np.concatenate([values, scales], -1) == want).all()
        with handle.submit(ids, layout="split") as ticket:
            values, scales = ticket.wait(30)
            assert values.shape == (*shape, 256)
            assert scales.shape == (*shape, 8)
            assert (np.concatenate([values, scales], -1) == want).all()

    check()


def test_sequences_and_scalars(client: Any, rows_of: Any) -> None:
    handle = client.table(layer=1)
    assert (handle.fetch(5) == rows_of(5, 1)).all()
    assert (handle.fetch([3, -1]) == rows_of([3, -1], 1)).all()
    assert handle.fetch([]).shape == (0, 264)
    assert handle.fetch(np.zeros((0, 24), np.int32)).shape == (0, 24, 264)


@pytest.mark.parametrize("ids", [[1.5], [True], ["a"], [None], [2**70], np.zeros(0)])
def test_what_is_no_id(client: Any, ids: Any) -> None:
    handle = client.table(layer=1)
    for call in (handle.fetch, handle.submit, handle.prefetch):
        with pytest.raises(TypeError, match="integers"):
            call(ids)


def test_wrong_out(client: Any) -> None:
    handle = client.table(layer=1)
    read_only = np.empty((2, 264), np.uint8)
    read_only.setflags(write=False)
    for out in (
        np.empty((3, 264), np.uint8),
        np.empty((2, 264), np.int8),
        np.empty((2, 528), np.uint8)[:, ::2],
        np.empty((264, 2), np.uint8).T,
        read_only,
        bytearray(528),
    ):
        with pytest.raises(ValueError, match="out"):
            handle.fetch([1, 2], out=out)
    values, scales = np.empty((2, 256), np.uint8), np.empty((2, 8), np.uint8)
    for pair in (values, (values,), (values, values), (scales, values), (values, None)):
        with pytest.raises(ValueError, match="out"):
            handle.fetch([1, 2], layout="split", out=pair)
    for call in (handle.fetch, handle.submit):
        with pytest.raises(ValueError, match="layout"):
            call([1], layout="sideways")


@pytest.mark.parametrize("dtype", ["i4", "i8", "u8"])
def test_bad_ids_are_named(client: Any, dtype: str) -> None:
    handle = client.table(layer=14)
    limits = np.iinfo(dtype)
    for bad in (handle.num_rows, -2, 2**31 + 5, 2**40, -(2**63), 2**63 - 1, 2**63, 2**64 - 1):
        if not limits.min <= bad <= limits.max:
            continue
        ids = np.array([[1, 2], [bad, 3]], dtype)
        calls: list[Callable[[Any], Any]] = [handle.fetch, handle.prefetch, lambda ids: handle.submit(ids).wait()]
        for call in calls:
            with pytest.raises(RowIdError) as caught:
                call(ids)
            assert (caught.value.position, caught.value.row_id) == (2, bad)
            assert "demo layer 14" in str(caught.value)
            assert str(handle.num_rows) in str(caught.value)


def test_more_rows_than_a_ticket(client: Any, rows_of: Any) -> None:
    handle = client.table(layer=1)
    count = 3 * client.max_ticket_rows + 17
    ids = np.random.default_rng(1).integers(-1, handle.num_rows, count)
    before = client.stats()["tables"][0]["layers"][0]
    want = rows_of(ids, 1)
    assert (handle.fetch(ids) == want).all()
    after = client.stats()["tables"][0]["layers"][0]
    # A request that the client splits counts once.
    assert after["requests"] == before["requests"] + 1
    assert after["rows"] == before["rows"] + count
    values, scales = handle.fetch(ids.astype(np.int32), layout="split")
    assert (values == want[:, :256]).all()
    assert (scales == want[:, 256:]).all()
    handle.prefetch(ids)
    # One bad id refuses the whole, and is found at its place in the whole.
    ids[count - 5], ids[count - 3] = handle.num_rows, -9
    for call in (handle.fetch, handle.prefetch):
        with pytest.raises(RowIdError) as caught:
            call(ids)
        assert (caught.value.position, caught.value.row_id) == (count - 5, handle.num_rows)


def test_threads_share_a_client(client: Any, rows_of: Any) -> None:
    handle = client.table(layer=1)
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        try:
            for _ in range(40):
                ids = generator.integers(-1, handle.num_rows, generator.integers(1, 2000))
                assert (handle.fetch(ids) == rows_of(ids, 1)).all()
                with handle.submit(ids[:50]) as ticket:
                    assert (ticket.wait(30) == rows_of(ids[:50], 1)).all()
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_stats_and_prefetch(client: Any) -> None:
    handle = client.table(layer=1)
    assert handle.prefetch(np.arange(-1, 50)) is None
    handle.fetch(np.arange(100))
    stats = client.stats()
    layer = stats["tables"][0]["layers"][0]
    assert layer["rows"] == layer["rows_zero"] + layer["dram_hits"] + layer["dram_misses"] + layer["rows_failed"]


def test_a_ticket_over_the_limit(client: Any) -> None:
    handle = client.table(layer=1)
    with pytest.raises(ValueError, match=rf"max_ticket_rows is {client.max_ticket_rows}"):
        handle.submit(np.zeros(client.max_ticket_rows + 1, np.int32))
    with handle.submit(np.zeros(client.max_ticket_rows, np.int64)) as ticket:
        assert ticket.wait(60).shape == (client.max_ticket_rows, 264)


def test_wrong_timeouts(client: Any, rows_of: Any) -> None:
    handle = client.table(layer=1)
    ticket = handle.submit([1, 2])
    calls = [handle.fetch, handle.prefetch, handle.submit]
    for call in [lambda ids, timeout, call=call: call(ids, timeout=timeout) for call in calls] + [
        lambda ids, timeout: ticket.wait(timeout)
    ]:
        for timeout in (-1, -0.001, float("nan")):
            with pytest.raises(ValueError, match="timeout must be 0 or more seconds"):
                call([1, 2], timeout)
        with pytest.raises(TypeError, match="timeout must be a number of seconds, not 'x'"):
            call([1, 2], "x")
    assert (ticket.wait(float("inf")) == rows_of([1, 2], 1)).all()
    assert (handle.fetch([3], timeout=np.float32(10)) == rows_of([3], 1)).all()


def test_on_full_is_checked_before_anything_is_sent(client: Any) -> None:
    handle = client.table(layer=1)
    for ids in ([0], []):
        with pytest.raises(ValueError, match="on_full must be 'wait' or 'busy', not 'foo'"):
            handle.submit(ids, on_full="foo")
