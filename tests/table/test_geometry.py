"""Where pages lie, against a list of pages dealt out one by one; and geometry as the native codec has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engramd._engine import lib
from engramd.table.geometry import Geometry, Striping


def test_the_real_table() -> None:
    shape = Geometry(264)
    assert (shape.page_bytes, shape.rows_per_page, shape.chunk_pages) == (4096, 15, 4096)
    assert shape.pages(384006168) == 25600412


def test_python_and_native_agree() -> None:
    for row_bytes in range(16, 65537):
        shape = Geometry(row_bytes)
        assert shape.page_bytes == lib.engram_page_bytes(row_bytes)
        assert shape.rows_per_page == lib.engram_rows_per_page(row_bytes)
        assert 1 <= shape.chunk_pages <= 4096
    for row_bytes in (0, 15, 65537):
        assert lib.engram_page_bytes(row_bytes) == 0
        with pytest.raises(ValueError, match="the limits are"):
            Geometry(row_bytes)


@given(st.integers(16, 65536), st.integers(1, 10**7))
def test_chunks_cover_all_rows_once(row_bytes: int, rows: int) -> None:
    shape = Geometry(row_bytes)
    rows = min(rows, shape.chunk_pages * shape.rows_per_page * 50)
    page = row = 0
    for index, chunk in enumerate(shape.chunks(rows)):
        assert (chunk.first_page, chunk.first_row) == (page, row)
        assert chunk == shape.chunk(rows, index)
        assert 0 < chunk.rows <= chunk.pages * shape.rows_per_page
        assert chunk.pages * shape.page_bytes <= 16 << 20
        page += chunk.pages
        row += chunk.rows
    assert (page, row) == (shape.pages(rows), rows)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 300))
def test_stripes_are_dealt_round(files: int, stripe_pages: int, pages: int) -> None:
    striping = Striping(files, stripe_pages, 4096)
    dealt: list[list[int]] = [[] for _ in range(files)]
    for page in range(pages):
        dealt[page // stripe_pages % files].append(page)
    for number, own in enumerate(dealt):
        # A file's pages are gapless; only the last page of the layer can end a stripe early.
        assert striping.file_pages(pages, number) == len(own)
        assert striping.file_bytes(pages, number) == len(own) * 4096
        for position, page in enumerate(own):
            assert striping.locate(page) == (number, position * 4096)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 300), st.integers(0, 100))
def test_extents_are_the_pages_in_order(files: int, stripe_pages: int, first: int, pages: int) -> None:
    striping = Striping(files, stripe_pages, 4096)
    found = []
    for extent in striping.extents(first, pages):
        for position in range(extent.pages):
            found.append(extent.first_page + position)
            expected = striping.locate(extent.first_page + position)
            assert expected == (extent.file_index, extent.offset + position * 4096)
    assert found == list(range(first, first + pages))
