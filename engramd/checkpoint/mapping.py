"""Which tensors of a checkpoint are a table's layers: by DeepSeek's names and config, or by a --tensors file.

The result describes where every row's bytes lie; whoever packs or compares needs nothing else of the checkpoint.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engramd.bounded_file import read_at_most
from engramd.checkpoint.config import EngramConfig, read_config
from engramd.checkpoint.index import Checkpoint
from engramd.checkpoint.safetensors import DTYPE_BITS, Shard
from engramd.errors import EngramdError
from engramd.table import geometry as geo
from engramd.table.codec import head_sizes

VALUE_DTYPE = "F8_E4M3"
SCALE_DTYPE = "F8_E8M0"
COLUMNS_PER_SCALE = 32
MAX_NAMES = 65536
MAX_TENSORS_FILE_BYTES = 16 << 20
_ENGRAM_NAME = re.compile(r"(?:model\.)?layers\.([0-9]{1,10})\.engram\.embed\.weight", re.ASCII)
_RANGE = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})\}", re.ASCII)


@dataclass(frozen=True)
class Segment:
    """`rows` successive rows of one part, from byte `offset` of a file on."""

    path: str
    offset: int
    rows: int


@dataclass(frozen=True)
class SourcePart:
    """One part (value or scale) of all rows of a layer: the rows of its segments one after the other."""

    dtype: str
    row_bytes: int
    rows: int
    segments: tuple[Segment, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each segment."""
        return tuple(itertools.accumulate((segment.rows for segment in self.segments[:-1]), initial=0))


@dataclass(frozen=True)
class SourceLayer:
    """One layer as it lies in the checkpoint."""

    layer: int
    rows: int
    head_sizes: tuple[int, ...]
    value: SourcePart
    scale: SourcePart | None

    @property
    def parts(self) -> tuple[SourcePart, ...]:
        return (self.value,) if self.scale is None else (self.value, self.scale)

    @property
    def row_bytes(self) -> int:
        return sum(part.row_bytes for part in self.parts)


@dataclass(frozen=True)
class TableSource:
    """Everything that a table is packed from. All layers have parts of the same sizes and dtypes."""

    directory: str
    revision: str | None
    layers: tuple[SourceLayer, ...]
    hash: dict[str, int | list[int]] | None
    shards: tuple[Shard, ...]

    @property
    def parts(self) -> tuple[SourcePart, ...]:
        return self.layers[0].parts

    @property
    def row_bytes(self) -> int:
        return self.layers[0].row_bytes

    def fingerprint(self) -> dict[str, Any]:
        """JSON that changes whenever the source's files, or the choice of tensors among them, do."""
        return {
            "shards": [
                [os.path.basename(shard.path), shard.size, shard.mtime_ns, shard.header_sha256] for shard in self.shards
            ],
            "layers": [
                [layer.layer, layer.rows, list(layer.head_sizes)]
                + [
                    [part.dtype, part.row_bytes, [[os.path.basename(s.path), s.offset, s.rows] for s in part.segments]]
                    for part in layer.parts
                ]
                for layer in self.layers
            ],
            "hash": self.hash,
        }

    def check_unchanged(self) -> None:
        """Raises EngramdError where a shard's size or mtime is no longer what it was when its header was read."""
        for shard in self.shards:
            try:
                found = os.stat(shard.path)
            except OSError as error:
                raise EngramdError(f"{shard.path}: vanished while it was being read: {error.strerror}") from None
            if (found.st_size, found.st_mtime_ns) != (shard.size, shard.mtime_ns):
                raise EngramdError(f"{shard.path}: changed while it was being read; nothing was published")


def table_source(checkpoint: Checkpoint, tensors_file: str | None = None) -> TableSource:
    """The layers of a checkpoint: those that `tensors_file` (docs/tensors.md) names, else DeepSeek's Engram layers, as
    config.json lists them or, without one, as the tensors' names do. Raises EngramdError."""
    if tensors_file is not None:
        layers, fields = _layers_of_file(checkpoint, tensors_file), None
    else:
        config = read_config(checkpoint.directory)
        layers = _engram_layers(checkpoint, config)
        fields = config.fields if config else None
    first = layers[0]
    if not geo.MIN_ROW_BYTES <= first.row_bytes <= geo.MAX_ROW_BYTES:
        raise EngramdError(
            f"layer {first.layer}: rows of {first.row_bytes} bytes "
            f"(the limits are {geo.MIN_ROW_BYTES} and {geo.MAX_ROW_BYTES})"
        )
    for layer in layers:
        if [(p.row_bytes, p.dtype) for p in layer.parts] != [(p.row_bytes, p.dtype) for p in first.parts]:
            raise EngramdError(
                f"layers {first.layer} and {layer.layer} have different rows: "
                f"{_describe(first)} and {_describe(layer)}; pack them as tables of their own"
            )
        if not 1 <= layer.rows <= geo.MAX_ROWS:
            raise EngramdError(f"layer {layer.layer}: {layer.rows} rows (the limits are 1 and {geo.MAX_ROWS})")
    used = {segment.path for layer in layers for part in layer.parts for segment in part.segments}
    shards = tuple(shard for _, shard in sorted(checkpoint.shards.items()) if shard.path in used)
    return TableSource(checkpoint.directory, checkpoint.revision, tuple(layers), fields, shards)


def _describe(layer: SourceLayer) -> str:
    return " + ".join(f"{part.row_bytes} bytes of {part.dtype}" for part in layer.parts)


def _part(checkpoint: Checkpoint, names: list[str]) -> SourcePart:
    """The rows of one or several tensors, in order."""
    segments = []
    first: tuple[str, tuple[int, ...]] | None = None
    for name in names:
        shard, tensor = checkpoint.tensor(name)
        if len(tensor.shape) < 2:
            raise EngramdError(f"{shard.path}: tensor {name!r} has shape {list(tensor.shape)}, not rows of columns")
        kind = (tensor.dtype, tensor.shape[1:])
        if first is not None and kind != first:
            raise EngramdError(
                f"{shard.path}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, but {names[0]!r} before it "
                f"has rows of {first[0]} {list(first[1])}"
            )
        first = kind
        segments.append(Segment(shard.path, tensor.offset, tensor.shape[0]))
    assert first is not None
    bits = math.prod(first[1]) * DTYPE_BITS[first[0]]
    if bits == 0 or bits % 8:
        raise EngramdError(f"tensor {names[0]!r}: rows of {bits} bits, not of whole bytes")
    return SourcePart(first[0], bits // 8, sum(s.rows for s in segments), tuple(segments))


def _engram_layers(checkpoint: Checkpoint, config: EngramConfig | None) -> list[SourceLayer]:
    if config is not None:
        layer_ids: Iterable[int] = config.layer_ids
        sizes = head_sizes(config.vocab_size, len(config.layer_ids), config.max_ngram_size, config.n_heads)
    else:
        layer_ids = sorted({int(m[1]) for name in checkpoint.weight_map if (m := _ENGRAM_NAME.fullmatch(name))})
        sizes = [()] * geo.MAX_LAYERS
    layers = [_engram_layer(checkpoint, number) for number in layer_ids]
    if not layers:
        raise EngramdError(
            f"{checkpoint.index_path}: no tensor named layers.N.engram.embed.weight "
            "(name the tensors of other models with --tensors FILE.toml)"
        )
    if len(layers) > geo.MAX_LAYERS:
        raise EngramdError(f"{checkpoint.index_path}: {len(layers)} engram layers (the limit is {geo.MAX_LAYERS})")
    if config is None:
        return layers
    named = []
    for layer, heads in zip(layers, sizes, strict=True):
        expected = config.rows(layer.layer)
        if layer.value.row_bytes != config.head_dim:
            raise EngramdError(
                f"layer {layer.layer}: rows of {layer.value.row_bytes} values, but engram_head_dim is {config.head_dim}"
            )
        if layer.rows != expected:
            raise EngramdError(
                f"layer {layer.layer}: {layer.rows} rows, but engram_num_embeddings says {expected}: "
                "config.json and the tensors do not belong together"
            )
        if sum(heads) != expected:
            raise EngramdError(
                f"layer {layer.layer}: engram_num_embeddings is {expected}, but the head sizes that follow from "
                f"engram_vocab_size {config.vocab_size} add up to {sum(heads)}"
            )
        named.append(SourceLayer(layer.layer, layer.rows, heads, layer.value, layer.scale))
    return named


def _engram_layer(checkpoint: Checkpoint, number: int) -> SourceLayer:
    """Layer `number` by DeepSeek's names; exports differ in a prefix and in the name of the scale."""
    prefixes = [f"{prefix}layers.{number}.engram.embed." for prefix in ("", "model.")]
    scales = ("scale", "weight_scale", "weight_scale_inv")
    value_name = _first(checkpoint, [prefix + "weight" for prefix in prefixes])
    scale_name = _first(checkpoint, [prefix + scale for prefix in prefixes for scale in scales])
    for name, dtype in ((value_name, VALUE_DTYPE), (scale_name, SCALE_DTYPE)):
        shard, tensor = checkpoint.tensor(name)
        if len(tensor.shape) != 2:
            raise EngramdError(f"{shard.path}: tensor {name!r} has shape {list(tensor.shape)}, not [rows, columns]")
        if tensor.dtype != dtype:
            raise EngramdError(
                f"{shard.path}: tensor {name!r} is {tensor.dtype}, not {dtype} "
                "(name the tensors of other models with --tensors FILE.toml)"
            )
    value, scale = _part(checkpoint, [value_name]), _part(checkpoint, [scale_name])
    if value.rows != scale.rows or value.row_bytes != scale.row_bytes * COLUMNS_PER_SCALE:
        raise EngramdError(
            f"layer {number}: {value_name!r} has shape [{value.rows}, {value.row_bytes}], but {scale_name!r} has "
            f"[{scale.rows}, {scale.row_bytes}]: there must be one scale for {COLUMNS_PER_SCALE} columns"
        )
    return SourceLayer(number, value.rows, (), value, scale)


def _first(checkpoint: Checkpoint, names: list[str]) -> str:
    for name in names:
        if name in checkpoint.weight_map:
            return name
    raise EngramdError(f"{checkpoint.index_path}: no tensor {names[0]!r} (nor {', '.join(names[1:])})")


def _layers_of_file(checkpoint: Checkpoint, path: str) -> list[SourceLayer]:
    """The layers that a --tensors file names."""
    text = read_at_most(path, MAX_TENSORS_FILE_BYTES)
    try:
        content = tomllib.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise EngramdError(f"{path}: not UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise EngramdError(f"{path}: not valid TOML: {error or 'nested too deeply'}") from None
    entries = content.get("layers")
    if set(content) != {"layers"} or not isinstance(entries, list) or not 1 <= len(entries) <= geo.MAX_LAYERS:
        raise EngramdError(f"{path}: it must hold 1 to {geo.MAX_LAYERS} [[layers]] and nothing else")
    layers: list[SourceLayer] = []
    for index, entry in enumerate(entries):
        where = f"{path}: layers[{index}]"
        if not isinstance(entry, dict) or not {"layer", "value"} <= set(entry) <= {"layer", "value", "scale"}:
            raise EngramdError(f"{where}: its keys must be layer, value and, where there is one, scale")
        number = entry["layer"]
        if type(number) is not int or not 0 <= number <= geo.MAX_LAYER_NUMBER:
            raise EngramdError(f"{where}: layer is {str(number)[:40]!r}, not an integer from 0 to 2^31 - 1")
        if any(layer.layer == number for layer in layers):
            raise EngramdError(f"{where}: layer {number} occurs twice")
        value = _part(checkpoint, _names(entry["value"], f"{where}.value"))
        scale = _part(checkpoint, _names(entry["scale"], f"{where}.scale")) if "scale" in entry else None
        if scale is not None and scale.rows != value.rows:
            raise EngramdError(f"{where}: {value.rows} rows of values, but {scale.rows} rows of scales")
        layers.append(SourceLayer(number, value.rows, (), value, scale))
    return layers


def _names(value: Any, where: str) -> list[str]:
    """Tensor names of a string or list of strings, each of which may hold one range such as {0..127}."""
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not patterns or not all(isinstance(x, str) for x in patterns):
        raise EngramdError(f"{where}: not a tensor name or a list of tensor names")
    names: list[str] = []
    for pattern in patterns:
        match = _RANGE.search(pattern)
        if match is None:
            names.append(pattern)
            continue
        first, last = int(match[1]), int(match[2])
        if not 0 <= last - first < MAX_NAMES:
            raise EngramdError(f"{where}: {match[0]} is not a range of 1 to {MAX_NAMES} numbers")
        names += [pattern[: match.start()] + str(i) + pattern[match.end() :] for i in range(first, last + 1)]
    if len(names) > MAX_NAMES:
        raise EngramdError(f"{where}: {len(names)} tensors (the limit is {MAX_NAMES})")
    return names
