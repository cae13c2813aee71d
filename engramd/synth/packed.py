"""Sparse packed tables: full geometry, but only the pages that hold the first or the last row of a head exist.

They show what a table of hundreds of gigabytes does to addressing, opening and memory, and cost a few megabytes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from engramd import strict_json
from engramd.errors import EngramdError
from engramd.synth import checkpoint
from engramd.table.codec import PageFormat, synth_rows
from engramd.table.files import Files, aligned_buffer, explain
from engramd.table.geometry import MAX_ROW_BYTES, MIN_ROW_BYTES, Geometry, Striping
from engramd.table.journal import Journal
from engramd.table.manifest import Layer, Manifest, Part, Source
from engramd.table.publish import PlannedFile, TableDirectory, now, plan_files
from engramd.table.verify import sparse_pages


@dataclass(frozen=True)
class SparseLayer:
    """A layer to make. Its rows are the sum of the head sizes."""

    layer: int
    head_sizes: tuple[int, ...]


def write_real_geometry(directory: str, vocab_size: int, seed: int, files: Files | None = None) -> Manifest:
    """A sparse table with the layers, rows and parts of a checkpoint of that vocabulary."""
    layers = [
        SparseLayer(layer, sizes)
        for layer, sizes in zip(checkpoint.LAYER_IDS, checkpoint.head_sizes_of(vocab_size), strict=True)
    ]
    parts = (
        Part("value", checkpoint.HEAD_DIM, "F8_E4M3"),
        Part("scale", checkpoint.SCALE_BYTES, "F8_E8M0"),
    )
    return write_sparse(directory, layers, parts, seed, hash_fields=checkpoint.engram_fields(vocab_size), files=files)


def write_sparse(
    directory: str,
    layers: Sequence[SparseLayer],
    parts: Sequence[Part],
    seed: int,
    *,
    hash_fields: dict[str, int | list[int]] | None = None,
    files: Files | None = None,
) -> Manifest:
    """Publishes a sparse table at `directory` (the next generation, where there is a table) with synthetic rows. Any
    rows and parts that the format holds, for instance 16-byte rows beyond 2^31 of them. Raises EngramdError."""
    files = files or Files()
    checkpoint.check_seed(seed)
    row_bytes = sum(part.bytes for part in parts)
    if not MIN_ROW_BYTES <= row_bytes <= MAX_ROW_BYTES:
        raise EngramdError(f"rows of {row_bytes} bytes (the limits are {MIN_ROW_BYTES} and {MAX_ROW_BYTES})")
    try:
        with TableDirectory(directory, files) as table:
            return _write(table, files, layers, tuple(parts), Geometry(row_bytes), seed, hash_fields)
    except OSError as error:
        raise explain(error, directory, "writing failed", "settle that, or name another directory") from None


def _write(
    table: TableDirectory,
    files: Files,
    layers: Sequence[SparseLayer],
    parts: tuple[Part, ...],
    shape: Geometry,
    seed: int,
    hash_fields: dict[str, int | list[int]] | None,
) -> Manifest:
    table_id = table.published.table_id if table.published else secrets.token_bytes(16)
    generation = table.next_generation
    striping = Striping(1, shape.chunk_pages, shape.page_bytes)
    table.discard()
    made: list[tuple[Layer, PlannedFile]] = []
    for sparse in layers:
        rows = sum(sparse.head_sizes)
        pages = shape.pages(rows)
        (planned,) = plan_files(table.path, table_id, generation, sparse.layer, pages, striping, ())
        made.append((Layer(sparse.layer, rows, pages, sparse.head_sizes, (planned.data_file,)), planned))
    journal = Journal(secrets.token_bytes(16), table_id, generation, (), {"sparse": "heads"})
    table.begin([planned for _, planned in made], journal.to_json())
    for layer, planned in made:
        page_format = PageFormat(table_id, generation, layer.layer, layer.rows, shape.row_bytes, parts[0].bytes)
        fd = files.open(planned.work_path, os.O_WRONLY)
        try:
            files.truncate(fd, planned.data_file.bytes)
            for page in sparse_pages(layer, shape.rows_per_page):
                data = _page(page_format, layer, page, shape, parts, seed)
                files.write_at(fd, data, page * shape.page_bytes, planned.work_path)
        finally:
            files.close(fd)
    geometry = {
        "format": "engramd sparse identity 1",
        "row_bytes": shape.row_bytes,
        "parts": [[part.name, part.bytes, part.dtype] for part in parts],
        "layers": [[layer.layer, layer.rows] for layer, _ in made],
        "head_sizes": [list(layer.head_sizes) for layer, _ in made],
        "seed": seed,
        "rows": "heads",
    }
    manifest = Manifest(
        directory=table.path,
        table_id=table_id,
        generation=generation,
        identity=hashlib.sha256(strict_json.canonical(geometry)).hexdigest(),
        row_bytes=shape.row_bytes,
        parts=parts,
        page_bytes=shape.page_bytes,
        rows_per_page=shape.rows_per_page,
        stripe_pages=shape.chunk_pages,
        layers=tuple(layer for layer, _ in made),
        hash=hash_fields,
        sparse="heads",
        source=Source("synth", f"seed {seed}", None),
        created=now(),
    )
    table.publish([planned for _, planned in made], manifest)
    return manifest


def _page(
    page_format: PageFormat, layer: Layer, page: int, shape: Geometry, parts: tuple[Part, ...], seed: int
) -> memoryview:
    first_row = page * shape.rows_per_page
    rows = min(shape.rows_per_page, layer.rows - first_row)
    value_bytes, row_bytes = parts[0].bytes, shape.row_bytes
    values = bytearray(rows * value_bytes)
    scales = bytearray(rows * (row_bytes - value_bytes))
    synth_rows(seed, layer.layer, first_row, rows, value_bytes, 0, value_bytes, values)
    if scales:
        synth_rows(seed, layer.layer, first_row, rows, value_bytes, value_bytes, row_bytes, scales)
    out = aligned_buffer(shape.page_bytes)
    page_format.encode(page, 1, values, scales or None, out)
    return out
