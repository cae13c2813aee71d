"""The manifest of a packed table: read, check against itself and against its files, write.

A manifest is hostile until `load` or `parse` returned: every field has been checked for type, range and agreement with
every other field it follows from, and the file names for traversal.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from typing import Any

from engramd import strict_json
from engramd.errors import EngramdError
from engramd.table import geometry as geo
from engramd.table.field_checks import FieldChecks, short

NAME = "manifest.json"
FORMAT = "engramd table"
VERSION = 1
MAX_BYTES = 16 << 20
PART_NAMES = ("value", "scale")
_HEX32 = re.compile(r"[0-9a-f]{32}", re.ASCII)
_HEX64 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DTYPE = re.compile(r"[A-Z][A-Z0-9_]{0,15}", re.ASCII)
_CREATED = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z", re.ASCII)
_HASH_KEY = re.compile(r"engram_[a-z0-9_]{1,64}", re.ASCII)


@dataclass(frozen=True)
class Part:
    """One part of a row, in the row's order: `value`, then `scale` where there is one."""

    name: str
    bytes: int
    dtype: str


@dataclass(frozen=True)
class DataFile:
    """One data file. `name` is as written in the manifest, `path` absolute."""

    name: str
    path: str
    bytes: int


@dataclass(frozen=True)
class Layer:
    """One layer: row ids 0 .. rows - 1. `head_sizes` adds up to `rows`, or is empty where the hash is not known."""

    layer: int
    rows: int
    pages: int
    head_sizes: tuple[int, ...]
    files: tuple[DataFile, ...]


@dataclass(frozen=True)
class Source:
    """Where the rows came from, for people: nothing depends on it."""

    kind: str
    path: str
    revision: str | None


@dataclass(frozen=True)
class Manifest:
    """A checked manifest. `hash` holds the source config's engram_* fields (integers or lists of them), or is None."""

    directory: str
    table_id: bytes
    generation: int
    identity: str
    row_bytes: int
    parts: tuple[Part, ...]
    page_bytes: int
    rows_per_page: int
    stripe_pages: int
    layers: tuple[Layer, ...]
    hash: dict[str, int | list[int]] | None
    sparse: str | None
    source: Source
    created: str

    @property
    def value_bytes(self) -> int:
        return self.parts[0].bytes

    @property
    def scale_bytes(self) -> int:
        return self.row_bytes - self.parts[0].bytes

    @property
    def rows(self) -> int:
        """Rows of all layers."""
        return sum(layer.rows for layer in self.layers)

    @property
    def logical_bytes(self) -> int:
        """Bytes of all rows alone: what a DRAM budget must reach to cover the table."""
        return self.rows * self.row_bytes

    @property
    def file_bytes(self) -> int:
        """Lengths of all data files together."""
        return sum(file.bytes for layer in self.layers for file in layer.files)

    @property
    def geometry(self) -> geo.Geometry:
        return geo.Geometry(self.row_bytes)

    def striping(self, layer: Layer) -> geo.Striping:
        return geo.Striping(len(layer.files), self.stripe_pages, self.page_bytes)

    def layer(self, number: int) -> Layer:
        """The layer of that number; raises EngramdError where the table has none."""
        for layer in self.layers:
            if layer.layer == number:
                return layer
        raise EngramdError(f"{self.directory}: no layer {number} (the table has {[x.layer for x in self.layers]})")


def load(directory: str | os.PathLike[str], *, check_files: bool = True) -> Manifest:
    """Reads and checks the manifest of the table at `directory`, and (unless told otherwise) that each data file is a
    regular file of the right length. Raises EngramdError naming the table and what is wrong with it."""
    directory = os.path.abspath(os.fspath(directory))
    data = _read(directory)
    manifest = parse(data, directory)
    if not check_files:
        return manifest
    try:
        check_data_files(manifest)
    except EngramdError:
        # The next generation may have been published, and this one's files removed, since the manifest was read.
        newer = _read(directory)
        if newer == data:
            raise
        manifest = parse(newer, directory)
        check_data_files(manifest)
    return manifest


def _read(directory: str) -> bytes:
    path = os.path.join(directory, NAME)
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise EngramdError(f"no packed table at {directory} ({NAME} is not there; `engramd pack` makes one)") from None
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None


def check_data_files(manifest: Manifest) -> None:
    """Raises EngramdError unless every data file is a regular file as long as its pages require."""
    for layer in manifest.layers:
        for file in layer.files:
            try:
                found = os.stat(file.path)
            except OSError as error:
                raise EngramdError(
                    f"{file.path}: data file of layer {layer.layer} cannot be opened: {error.strerror}"
                ) from None
            if not stat.S_ISREG(found.st_mode):
                raise EngramdError(f"{file.path}: data file of layer {layer.layer} is not a regular file")
            if found.st_size != file.bytes:
                raise EngramdError(
                    f"{file.path}: {found.st_size} bytes, but {file.bytes} are needed for layer {layer.layer}: "
                    "the table is damaged or half copied; pack or copy it again"
                )


def parse(data: bytes, directory: str) -> Manifest:
    """The checked manifest `data` of a table at the absolute path `directory`. Reads no file; raises EngramdError."""
    return _Checker(os.path.join(directory, NAME), directory).manifest(data)


def serialize(manifest: Manifest) -> bytes:
    """The manifest as it is written to disk, its sha256 included; checked by reading it back."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "table_id": manifest.table_id.hex(),
        "generation": manifest.generation,
        "identity": manifest.identity,
        "row_bytes": manifest.row_bytes,
        "row_layout": "packed",
        "parts": [{"name": part.name, "bytes": part.bytes, "dtype": part.dtype} for part in manifest.parts],
        "page_bytes": manifest.page_bytes,
        "rows_per_page": manifest.rows_per_page,
        "stripe_pages": manifest.stripe_pages,
        "layers": [
            {
                "layer": layer.layer,
                "rows": layer.rows,
                "pages": layer.pages,
                "head_sizes": list(layer.head_sizes),
                "files": [{"path": file.name, "bytes": file.bytes} for file in layer.files],
            }
            for layer in manifest.layers
        ],
        "hash": manifest.hash,
        "sparse": manifest.sparse,
        "source": {
            "kind": manifest.source.kind,
            "path": manifest.source.path,
            "revision": manifest.source.revision,
        },
        "created": manifest.created,
    }
    body["sha256"] = hashlib.sha256(strict_json.canonical(body)).hexdigest()
    data = strict_json.canonical(body) + b"\n"
    if parse(data, manifest.directory) != manifest:
        raise AssertionError("a manifest does not read back as it was written")
    return data


class _Checker(FieldChecks):
    """Checks one manifest. Each method returns a checked value or raises an EngramdError that names the field."""

    def __init__(self, path: str, directory: str) -> None:
        super().__init__(path, "pack the table again, or copy it anew")
        self.directory = directory

    def manifest(self, data: bytes) -> Manifest:
        if len(data) > MAX_BYTES:
            self.refuse(f"larger than {MAX_BYTES} bytes")
        body = strict_json.loads(data, self.path)
        self.exact(self.field(body, "format"), FORMAT, "format")
        self.exact(self.field(body, "version"), VERSION, "version")
        known = {
            "format", "version", "sha256", "table_id", "generation", "identity", "row_bytes", "row_layout", "parts",
            "page_bytes", "rows_per_page", "stripe_pages", "layers", "hash", "sparse", "source", "created",
        }  # fmt: skip
        if unknown := sorted(set(body) - known):
            self.refuse(f"unknown field {unknown[0][:100]!r}")
        written = self.text(body, "sha256", _HEX64)
        rest = {key: value for key, value in body.items() if key != "sha256"}
        if hashlib.sha256(strict_json.canonical(rest)).hexdigest() != written:
            self.refuse("its sha256 does not match its content: the manifest was changed or damaged")
        row_bytes = self.integer(body, "row_bytes", geo.MIN_ROW_BYTES, geo.MAX_ROW_BYTES)
        self.exact(self.field(body, "row_layout"), "packed", "row_layout")
        shape = geo.Geometry(row_bytes)
        self.exact(self.field(body, "page_bytes"), shape.page_bytes, "page_bytes")
        self.exact(self.field(body, "rows_per_page"), shape.rows_per_page, "rows_per_page")
        stripe_pages = self.integer(body, "stripe_pages", 1, geo.MAX_STRIPE_PAGES)
        layers = self.layers(body, shape, stripe_pages)
        sparse = self.field(body, "sparse")
        if sparse not in (None, "heads"):
            self.refuse(f"sparse is {short(sparse)}, neither null nor 'heads'")
        if sparse and not all(layer.head_sizes for layer in layers):
            self.refuse("sparse is 'heads', but a layer has no head_sizes")
        source = self.field(body, "source")
        revision = self.field(source, "revision", "source.")
        if revision is not None:
            revision = self.text(source, "revision", None, "source.")
        return Manifest(
            directory=self.directory,
            table_id=bytes.fromhex(self.text(body, "table_id", _HEX32)),
            generation=self.integer(body, "generation", 1, geo.MAX_GENERATION),
            identity=self.text(body, "identity", _HEX64),
            row_bytes=row_bytes,
            parts=self.parts(body, row_bytes),
            page_bytes=shape.page_bytes,
            rows_per_page=shape.rows_per_page,
            stripe_pages=stripe_pages,
            layers=layers,
            hash=self.hash(body, layers),
            sparse=sparse,
            source=Source(
                self.text(source, "kind", None, "source.", 64), self.text(source, "path", None, "source."), revision
            ),
            created=self.text(body, "created", _CREATED),
        )

    def parts(self, body: Any, row_bytes: int) -> tuple[Part, ...]:
        parts = []
        for index, entry in enumerate(self.array(body, "parts", 1, 2)):
            where = f"parts[{index}]."
            self.exact(self.field(entry, "name", where), PART_NAMES[index], where + "name")
            parts.append(
                Part(
                    PART_NAMES[index],
                    self.integer(entry, "bytes", 1, row_bytes, where),
                    self.text(entry, "dtype", _DTYPE, where),
                )
            )
        self.exact(sum(part.bytes for part in parts), row_bytes, "the sum of parts' bytes")
        return tuple(parts)

    def layers(self, body: Any, shape: geo.Geometry, stripe_pages: int) -> tuple[Layer, ...]:
        layers: list[Layer] = []
        paths: set[str] = set()
        for index, entry in enumerate(self.array(body, "layers", 1, geo.MAX_LAYERS)):
            where = f"layers[{index}]."
            number = self.integer(entry, "layer", 0, geo.MAX_LAYER_NUMBER, where)
            if any(layer.layer == number for layer in layers):
                self.refuse(f"layer {number} occurs twice")
            rows = self.integer(entry, "rows", 1, geo.MAX_ROWS, where)
            pages = shape.pages(rows)
            self.exact(self.field(entry, "pages", where), pages, where + "pages")
            head_sizes = self.array(entry, "head_sizes", 0, geo.MAX_HEADS, where)
            if not all(type(size) is int and 1 <= size <= rows for size in head_sizes):
                self.refuse(f"{where}head_sizes holds something other than integers from 1 to {rows}")
            if head_sizes:
                self.exact(sum(head_sizes), rows, f"the sum of {where}head_sizes")
            entries = self.array(entry, "files", 1, geo.MAX_FILES, where)
            striping = geo.Striping(len(entries), stripe_pages, shape.page_bytes)
            files = []
            for file_index, file in enumerate(entries):
                here = f"{where}files[{file_index}]."
                name = self.file_name(file, here)
                path = os.path.join(self.directory, name)
                if path in paths:
                    self.refuse(f"{here}path {name!r} occurs twice")
                paths.add(path)
                needed = striping.file_bytes(pages, file_index)
                self.exact(self.field(file, "bytes", here), needed, here + "bytes")
                files.append(DataFile(name, path, needed))
            layers.append(Layer(number, rows, pages, tuple(head_sizes), tuple(files)))
        return tuple(layers)

    def file_name(self, file: Any, where: str) -> str:
        name = self.text(file, "path", None, where)
        if not is_safe_path(name):
            self.refuse(f"{where}path is {short(name)}: neither a plain file name nor a clean absolute path")
        return name

    def hash(self, body: Any, layers: tuple[Layer, ...]) -> dict[str, int | list[int]] | None:
        found = self.field(body, "hash")
        if found is None:
            return None
        if not isinstance(found, dict) or len(found) > 64:
            self.refuse("hash is not an object of at most 64 fields")
        for key, value in found.items():
            values = value if isinstance(value, list) else [value]
            if not _HASH_KEY.fullmatch(key) or len(values) > geo.MAX_LAYERS:
                self.refuse(f"hash holds {key[:100]!r}, which is not an engram_* field")
            if not all(type(x) is int and -(1 << 63) <= x < 1 << 63 for x in values):
                self.refuse(f"hash.{key} is {short(value)}, not an integer or a list of integers")
        ids, rows = found.get("engram_layer_ids"), found.get("engram_num_embeddings")
        if ids is not None and rows is not None:
            if not isinstance(ids, list) or not isinstance(rows, list) or len(ids) != len(rows):
                self.refuse("hash.engram_layer_ids and hash.engram_num_embeddings do not go together")
            expected = dict(zip(ids, rows, strict=True))
            for layer in layers:
                self.exact(expected.get(layer.layer), layer.rows, f"hash.engram_num_embeddings of layer {layer.layer}")
        return found


def is_safe_path(name: str) -> bool:
    """Whether a data file's path is a plain name, or an absolute path without `.`, `..` or empty components."""
    if not name or not name.isprintable() or "\\" in name:
        return False
    components = name.split("/")
    if name.startswith("/"):
        components = components[1:]
        if name.startswith("//"):
            return False
    elif len(components) != 1:
        return False
    return all(part not in ("", ".", "..") and len(os.fsencode(part)) <= 255 for part in components)
