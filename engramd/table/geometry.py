"""Where rows, pages, stripes and chunks of a table lie. Pure arithmetic over docs/table_format.md; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PAGE_UNIT_BYTES = 4096
TRAILER_BYTES = 64
CHECKSUM_BYTES = 4
MIN_ROW_BYTES = 16
MAX_ROW_BYTES = 65536
MAX_ROWS = 1 << 40
MAX_LAYERS = 256
MAX_LAYER_NUMBER = (1 << 31) - 1
MAX_FILES = 64
MAX_HEADS = 4096
MAX_STRIPE_PAGES = (1 << 32) - 1
MAX_GENERATION = (1 << 32) - 1
CHUNK_BYTES = 16 << 20


def page_bytes_of(row_bytes: int) -> int:
    """Page size for a row size: 4096, or the next multiple of 4096 that holds one row."""
    needed = row_bytes + CHECKSUM_BYTES + TRAILER_BYTES
    return -(-needed // PAGE_UNIT_BYTES) * PAGE_UNIT_BYTES


def rows_per_page_of(row_bytes: int) -> int:
    """Rows in a full page."""
    return max(1, (PAGE_UNIT_BYTES - TRAILER_BYTES) // (row_bytes + CHECKSUM_BYTES))


@dataclass(frozen=True)
class Chunk:
    """Successive pages of one layer that are packed, digested and verified together."""

    first_page: int
    pages: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class Extent:
    """Successive pages that lie one after the other in one data file."""

    file_index: int
    offset: int
    first_page: int
    pages: int


@dataclass(frozen=True)
class Geometry:
    """Sizes that follow from the row size alone."""

    row_bytes: int

    def __post_init__(self) -> None:
        if not MIN_ROW_BYTES <= self.row_bytes <= MAX_ROW_BYTES:
            raise ValueError(f"row of {self.row_bytes} bytes (the limits are {MIN_ROW_BYTES} and {MAX_ROW_BYTES})")

    @property
    def page_bytes(self) -> int:
        return page_bytes_of(self.row_bytes)

    @property
    def rows_per_page(self) -> int:
        return rows_per_page_of(self.row_bytes)

    @property
    def chunk_pages(self) -> int:
        return CHUNK_BYTES // self.page_bytes

    def pages(self, rows: int) -> int:
        return -(-rows // self.rows_per_page)

    def chunk_count(self, rows: int) -> int:
        return -(-self.pages(rows) // self.chunk_pages)

    def chunk(self, rows: int, index: int) -> Chunk:
        """Chunk `index` of a layer of `rows` rows."""
        first_page = index * self.chunk_pages
        pages = min(self.chunk_pages, self.pages(rows) - first_page)
        first_row = first_page * self.rows_per_page
        return Chunk(first_page, pages, first_row, min(pages * self.rows_per_page, rows - first_row))

    def chunks(self, rows: int) -> Iterator[Chunk]:
        for index in range(self.chunk_count(rows)):
            yield self.chunk(rows, index)


@dataclass(frozen=True)
class Striping:
    """How the pages of a layer are dealt to its data files."""

    files: int
    stripe_pages: int
    page_bytes: int

    def file_pages(self, pages: int, file_index: int) -> int:
        """Pages of file `file_index` of a layer of `pages` pages."""
        stripes, rest = divmod(pages, self.stripe_pages)
        own, last = divmod(stripes, self.files)
        count = (own + (file_index < last)) * self.stripe_pages
        return count + (rest if file_index == last else 0)

    def file_bytes(self, pages: int, file_index: int) -> int:
        return self.file_pages(pages, file_index) * self.page_bytes

    def locate(self, page: int) -> tuple[int, int]:
        """(file index, byte offset) of a page."""
        stripe, within = divmod(page, self.stripe_pages)
        own, file_index = divmod(stripe, self.files)
        return file_index, (own * self.stripe_pages + within) * self.page_bytes

    def extents(self, first_page: int, pages: int) -> Iterator[Extent]:
        """The runs of pages, in page order, that make up `pages` pages from `first_page` on."""
        while pages > 0:
            file_index, offset = self.locate(first_page)
            run = pages if self.files == 1 else min(pages, self.stripe_pages - first_page % self.stripe_pages)
            yield Extent(file_index, offset, first_page, run)
            first_page += run
            pages -= run

    def pieces(self, first_page: int, pages: int, buffer: memoryview) -> Iterator[tuple[Extent, memoryview]]:
        """The extents of `extents`, each with its part of a buffer of these pages."""
        for extent in self.extents(first_page, pages):
            begin = (extent.first_page - first_page) * self.page_bytes
            yield extent, buffer[begin : begin + extent.pages * self.page_bytes]
