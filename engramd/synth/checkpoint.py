"""A checkpoint with the tensor names, dtypes, config fields and shard names of DeepSeek-V4.1-Flash, and rows that
anybody can compute (docs/table_format.md, "Synthetic rows").

As in the real one, layer 1's tensors are in shard 47 of 48 and layer 14's in shard 48, weight data begins at an
unaligned byte of its shard, scales lie far behind their weights, and other small tensors are in the same shards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engramd import strict_json
from engramd.checkpoint.index import INDEX_NAME
from engramd.checkpoint.safetensors import DTYPE_BITS
from engramd.errors import EngramdError
from engramd.progress import Progress
from engramd.sizes import format_size
from engramd.synth.stream import Stream
from engramd.table.codec import head_sizes, synth_rows
from engramd.table.files import Files, explain

# Published config of DeepSeek-V4.1-Flash.
LAYER_IDS = (1, 14)
MODEL_LAYERS = 40
HIDDEN_SIZE = 5120
TOKENIZER_VOCAB_SIZE = 129280
COMPRESSED_VOCAB_SIZE = 99092
MAX_NGRAM_SIZE = 4
HEADS = 8
HEAD_DIM = 256
SCALE_BYTES = 8
PAD_TOKEN_ID = 2

SHARDS = 48
SHARD_OF_LAYER = {1: 47, 14: 48}
# The real weight data begins at byte 672; longer headers go on in steps that stay as unaligned to 512 and 4096.
DATA_START = 672
DATA_START_STEP = 512
MARKER = "engramd_synth"
MAX_SEED = (1 << 64) - 1
MAX_VOCAB_SIZE = 40_000_000_000  # 24 heads of that many rows are just below the 2^40 rows of a layer


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    write: Callable[[Stream], None]

    @property
    def bytes(self) -> int:
        count = DTYPE_BITS[self.dtype] // 8
        for size in self.shape:
            count *= size
        return count


def head_sizes_of(vocab_size: int) -> list[tuple[int, ...]]:
    """Head sizes of both layers; their sums are the layers' rows. Raises EngramdError."""
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise EngramdError(f"vocabulary size {vocab_size}: it must be from 1 to {MAX_VOCAB_SIZE}")
    return list(head_sizes(vocab_size, len(LAYER_IDS), MAX_NGRAM_SIZE, HEADS))


def check_seed(seed: int) -> int:
    if not 0 <= seed <= MAX_SEED:
        raise EngramdError(f"seed {seed}: it must be from 0 to 2^64 - 1")
    return seed


def engram_fields(vocab_size: int) -> dict[str, int | list[int]]:
    """The engram_* fields of the config of a synthetic checkpoint."""
    return {
        "engram_layer_ids": list(LAYER_IDS),
        "engram_num_embeddings": [sum(sizes) for sizes in head_sizes_of(vocab_size)],
        "engram_max_ngram_size": MAX_NGRAM_SIZE,
        "engram_vocab_size": vocab_size,
        "engram_n_heads": HEADS,
        "engram_head_dim": HEAD_DIM,
        "engram_pad_token_id": PAD_TOKEN_ID,
        "engram_compressed_vocab_size": COMPRESSED_VOCAB_SIZE,
    }


def write_checkpoint(directory: str, vocab_size: int, seed: int, files: Files | None = None) -> int:
    """Writes the checkpoint; returns its bytes of tensor data. An earlier synthetic checkpoint there is replaced file
    by file; any other content is refused. Raises EngramdError."""
    files = files or Files()
    check_seed(seed)
    directory = os.path.abspath(directory)
    fields = engram_fields(vocab_size)
    rows = [sum(sizes) for sizes in head_sizes_of(vocab_size)]
    made = False
    try:
        made = _prepare_directory(directory, files)
        shards = {
            number: _shard(number, seed, dict(zip(LAYER_IDS, rows, strict=True))) for number in range(1, SHARDS + 1)
        }
        total = sum(tensor.bytes for tensors in shards.values() for tensor in tensors)
        found = os.statvfs(directory)
        if found.f_bavail * found.f_frsize < total:
            raise EngramdError(
                f"{directory}: not enough space: {format_size(total)} are needed, "
                f"{format_size(found.f_bavail * found.f_frsize)} are free"
            )
        weight_map: dict[str, str] = {}
        with Progress("synthesising", total) as progress:
            for number, tensors in shards.items():
                name = f"model-{number:05}-of-{SHARDS:06}.safetensors"
                _write_shard(files, os.path.join(directory, name), tensors, progress)
                weight_map |= {tensor.name: name for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        config = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "text_config": {
                "hidden_size": HIDDEN_SIZE,
                "num_hidden_layers": MODEL_LAYERS,
                "vocab_size": TOKENIZER_VOCAB_SIZE,
                **fields,
            },
            MARKER: {"seed": seed, "vocab_size": vocab_size},
        }
        for name, content in ((INDEX_NAME, index), ("config.json", config)):
            path = os.path.join(directory, name)
            files.write_file(path + ".new", json.dumps(content, indent=2).encode() + b"\n")
            files.rename(path + ".new", path)
        files.sync_directory(directory)
    except OSError as error:
        raise explain(error, directory, "writing failed", "settle that, or name another directory") from None
    finally:
        if made and not os.listdir(directory):
            files.rmdir(directory)  # refused before anything was written
    return total


def _prepare_directory(directory: str, files: Files) -> bool:
    """Makes the directory (True), or makes sure that what is there is an earlier synthetic checkpoint."""
    if not os.path.lexists(directory):
        files.mkdir(directory)
        return True
    if not os.path.isdir(directory):
        raise EngramdError(f"{directory}: not a directory")
    names = [name for name in os.listdir(directory) if name != "lost+found"]
    own = {f"model-{number:05}-of-{SHARDS:06}.safetensors" for number in range(1, SHARDS + 1)}
    own |= {INDEX_NAME, "config.json"}
    own |= {name + ".new" for name in own}
    strange = sorted(set(names) - own)
    config = os.path.join(directory, "config.json")
    if not strange and os.path.isfile(config):
        with open(config, "rb") as file:
            content = strict_json.loads(file.read(1 << 20), config)
        if not isinstance(content, dict) or MARKER not in content:
            strange = ["config.json"]
    if strange:
        raise EngramdError(
            f"{directory}: not empty, and not an earlier synthetic checkpoint (it holds {strange[0]!r}): "
            "name a new directory"
        )
    # Without config and index an interrupted run is no checkpoint, rather than a mixture of two.
    for name in ("config.json", INDEX_NAME):
        if name in names:
            files.unlink(os.path.join(directory, name))
    return False


def _shard(number: int, seed: int, rows: dict[int, int]) -> list[_Tensor]:
    """The tensors of a shard in file order: a layer's weight, small tensors of the same layer, its scale."""
    for layer, shard in SHARD_OF_LAYER.items():
        if shard == number:
            prefix = f"layers.{layer}.engram"
            weight = f"{prefix}.embed.weight", "F8_E4M3", (rows[layer], HEAD_DIM)
            scale = f"{prefix}.embed.scale", "F8_E8M0", (rows[layer], SCALE_BYTES)
            return [
                _Tensor(*weight, _rows_writer(seed, layer, rows[layer], 0, HEAD_DIM)),
                _small(f"{prefix}.gate.weight", (4, HIDDEN_SIZE), seed),
                _small(f"{prefix}.norm.weight", (HIDDEN_SIZE,), seed),
                _small(f"layers.{layer}.ffn_norm.weight", (HIDDEN_SIZE,), seed),
                _Tensor(*scale, _rows_writer(seed, layer, rows[layer], HEAD_DIM, HEAD_DIM + SCALE_BYTES)),
            ]
    tensors = [_small(f"layers.{number - 1}.attn_norm.weight", (HIDDEN_SIZE,), seed)] if number <= MODEL_LAYERS else []
    return [*tensors, _small(f"extra.{number}.weight", (64, 64), seed)]


def _small(name: str, shape: tuple[int, ...], seed: int) -> _Tensor:
    """A small BF16 tensor; its content stands for nothing, but is never zeros."""
    count = 2
    for size in shape:
        count *= size

    def write(stream: Stream) -> None:
        data = bytearray(count)
        synth_rows(seed, sum(name.encode()), 0, count // 64, 64, 0, 64, data)
        stream.write(data)

    return _Tensor(name, "BF16", shape, write)


def _rows_writer(seed: int, layer: int, rows: int, begin: int, end: int) -> Callable[[Stream], None]:
    """Writes bytes [begin, end) of all rows, filled in place in the stream's blocks."""
    width = end - begin

    def write(stream: Stream) -> None:
        row = 0
        split = bytearray(width)
        while row < rows:
            room = stream.room()
            count = min(rows - row, len(room) // width)
            if count == 0:  # a row across two blocks
                synth_rows(seed, layer, row, 1, HEAD_DIM, begin, end, split)
                stream.write(split)
                row += 1
                continue
            synth_rows(seed, layer, row, count, HEAD_DIM, begin, end, room)
            stream.wrote(count * width)
            row += count

    return write


def _write_shard(files: Files, path: str, tensors: list[_Tensor], progress: Progress) -> None:
    """Writes a shard beside its name, then renames it: a reader of the old file keeps it whole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, begin in _places(tensors):
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    steps = max(0, -(-(8 + len(text) - DATA_START) // DATA_START_STEP))
    text = text.ljust(DATA_START + steps * DATA_START_STEP - 8)
    with Stream(files, path + ".new") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            tensor.write(stream)
            progress.advance(tensor.bytes)
        stream.close()
    files.rename(path + ".new", path)


def _places(tensors: list[_Tensor]) -> Iterator[tuple[_Tensor, int]]:
    begin = 0
    for tensor in tensors:
        yield tensor, begin
        begin += tensor.bytes
