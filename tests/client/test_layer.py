"""Which layer a wish means, and what a handle may go on with after a reload."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engram_client import TableMismatch, UnknownTable
from engram_client.layer import LayerInfo, check_successor, select_layer

A = LayerInfo("a", 1, 10, 264, 256, 1, "a" * 64, (4, 6))
B = LayerInfo("b", 1, 10, 264, 256, 1, "b" * 64, (4, 6))


def test_what_may_be_left_out() -> None:
    assert select_layer([A], None, None, None, "here") is A
    assert select_layer([A, B], "b", None, None, "here") is B
    assert select_layer([A, B], None, None, "b" * 64, "here") is B
    for name, layer in ((None, None), (None, 1), ("c", None), ("a", 2)):
        with pytest.raises(UnknownTable, match="a layer 1, b layer 1"):
            select_layer([A, B], name, layer, None, "here")
    with pytest.raises(UnknownTable, match="nothing"):
        select_layer([], None, None, None, "here")
    with pytest.raises(TableMismatch, match="a" * 64):
        select_layer([A, B], "a", 1, "c" * 64, "here")


def test_successors() -> None:
    reloaded = replace(A, generation=2, identity="c" * 64, handle=9)
    assert check_successor(A, reloaded, None, "here") is reloaded
    with pytest.raises(TableMismatch, match="identity"):
        check_successor(A, reloaded, "a" * 64, "here")
    with pytest.raises(UnknownTable, match="no longer"):
        check_successor(A, None, None, "here")
    for change in ({"rows": 11}, {"row_bytes": 256}, {"value_bytes": 128}, {"head_sizes": (5, 5)}):
        with pytest.raises(TableMismatch, match="rows of"):
            check_successor(A, replace(A, **change), None, "here")
