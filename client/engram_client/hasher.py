"""Row ids of a token sequence: the n-gram hash of DeepSeek-V4.1 Engram.

The constants (token map, multipliers, head sizes) are derived here from a model's config and tokenizer; the hash
itself runs in native code. docs/hash.md gives the formula and where each constant comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._native import ffi, lib
from .engram_config import MAX_ROWS, EngramConfig
from .token_map import build_token_map

_INT64_MAX = 2**63 - 1
_SEED_FACTOR = 10007

# What default_rng must give, as published for DeepSeek-V4.1-Flash's layer 1. numpy may change the stream behind
# default_rng in a later version (NEP 19); every row id would then be wrong.
_PUBLISHED_COMPRESSED_SIZE = 99092
_PUBLISHED_MULTIPLIERS = (76632096046245, 4839876093313, 35959672319349, 73987337458391)


def _draw_multipliers(layer_id: int, max_ngram_size: int, compressed_vocab_size: int) -> NDArray[np.int64]:
    """One odd multiplier per shift, int64 [max_ngram_size].

    default_rng(10007 * layer_id).integers(0, bound) * 2 + 1, where bound is
    max(1, INT64_MAX // compressed_vocab_size // 2): NgramHashMapping in deepseek-ai/Engram, engram_demo_v1.py.
    A product with a compressed id stays below 2^63.
    """
    bound = max(1, _INT64_MAX // compressed_vocab_size // 2)
    generator = np.random.default_rng(_SEED_FACTOR * layer_id)
    return generator.integers(0, bound, size=max_ngram_size, dtype=np.int64) * 2 + 1


def _check_random_stream() -> None:
    drawn = tuple(_draw_multipliers(1, 4, _PUBLISHED_COMPRESSED_SIZE).tolist())
    if drawn != _PUBLISHED_MULTIPLIERS:
        raise RuntimeError(
            f"numpy {np.__version__} draws other numbers from default_rng than those the published tables were made "
            f"with ({drawn} instead of {_PUBLISHED_MULTIPLIERS}): install an earlier numpy"
        )


def head_sizes(config: EngramConfig) -> NDArray[np.int64]:
    """Primes, int64 [layers, columns]: for each layer in order and each n-gram order, the next n_heads primes from
    engram_vocab_size up that no earlier place has used (NgramHashMapping in deepseek-ai/Engram, engram_demo_v1.py)."""
    layers = len(config.layer_ids)
    sizes = np.empty((layers, config.columns), dtype=np.int64)
    out = ffi.from_buffer("int64_t[]", sizes, require_writable=True)
    if lib.engram_head_sizes(config.vocab_size, layers, config.max_ngram_size, config.n_heads, out) != 0:
        raise ValueError(f"no head sizes exist for {config}")
    for layer_id, found, declared in zip(config.layer_ids, sizes.sum(axis=1), config.num_embeddings, strict=True):
        if found > MAX_ROWS:
            raise ValueError(
                f"layer {layer_id} would have {found} rows: row ids are int32, so at most {MAX_ROWS} are supported"
            )
        if found != declared:
            raise ValueError(
                f"the head sizes of layer {layer_id} add up to {found} rows, but config field engram_num_embeddings "
                f"says {declared}: one of engram_layer_ids (and their order), engram_max_ngram_size, engram_n_heads, "
                "engram_vocab_size and engram_num_embeddings is not that of the checkpoint"
            )
    return sizes


class NgramHasher:
    """Turns token ids into row ids. Immutable after construction; any number of threads may call row_ids at once
    (it releases the GIL while it hashes).

    layer_ids: tuple of the layers that have a table, in the config's order.
    head_sizes: int64 [layers, columns], rows of each hash column; columns = (max_ngram_size - 1) * n_heads, column
        (order - 2) * n_heads + head. Read-only.
    token_map: int32 [vocab], token id -> compressed id. Read-only.
    max_ngram_size: the longest n-gram; row_ids looks back max_ngram_size - 1 tokens.
    """

    def __init__(self, config: EngramConfig, token_map: ArrayLike) -> None:
        """From checked parts; from_config is the usual way.

        token_map: int [vocab] of 0 .. compressed size - 1, each used. Raises ValueError where it doesn't fit the
        config.
        """
        _check_random_stream()
        ids = np.array(token_map, dtype=np.int32)
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(f"the token map has shape {ids.shape}: must be [vocab] with at least one token")
        found = int(ids.max()) + 1
        if ids.min() < 0 or found != np.unique(ids).size:
            raise ValueError(f"the token map must use each compressed id from 0 to {found - 1}")
        if found != config.compressed_vocab_size:
            raise ValueError(
                f"the tokenizer gives {found} compressed ids, but config field engram_compressed_vocab_size says "
                f"{config.compressed_vocab_size}, from which every multiplier derives: use the tokenizer that belongs "
                "to the checkpoint"
            )
        if config.pad_token_id >= ids.size:
            raise ValueError(
                f"config field engram_pad_token_id is {config.pad_token_id}: the tokenizer's last token is "
                f"{ids.size - 1}"
            )
        self.layer_ids: tuple[int, ...] = config.layer_ids
        self.max_ngram_size: int = config.max_ngram_size
        self.head_sizes: NDArray[np.int64] = head_sizes(config)
        self.token_map: NDArray[np.int32] = ids
        self._columns = config.columns
        self._n_heads = config.n_heads
        self._pad_id = int(ids[config.pad_token_id])
        self._head_offsets = np.cumsum(self.head_sizes, axis=1) - self.head_sizes
        for array in (self.head_sizes, self.token_map, self._head_offsets):
            array.flags.writeable = False
        self._token_map_pointer = ffi.from_buffer("int32_t[]", self.token_map)
        self._layers = ffi.new("engram_hash_layer[]", len(self.layer_ids))
        self._pointers: list[Any] = []  # keeps the arrays behind _layers alive
        for index, layer_id in enumerate(self.layer_ids):
            layer = self._layers[index]
            multipliers = _draw_multipliers(layer_id, config.max_ngram_size, config.compressed_vocab_size)
            for shift, multiplier in enumerate(multipliers.tolist()):
                layer.multipliers[shift] = multiplier
            sizes = ffi.from_buffer("int64_t[]", self.head_sizes[index])
            offsets = ffi.from_buffer("int64_t[]", self._head_offsets[index])
            self._pointers += [sizes, offsets]
            layer.head_sizes = sizes
            layer.head_offsets = offsets

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tokenizer: Any) -> NgramHasher:
        """A hasher for a model.

        config: the dict of config.json, or its text_config. tokenizer: the path of a byte-level tokenizer.json (needs
        the standard library alone), a tokenizers.Tokenizer or a transformers tokenizer. Building the token map takes
        some tenths of a second; keep the hasher.

        Raises ValueError where a config field is missing or out of range, where the tokenizer is malformed or its
        compressed size is not the config's, and where the head sizes don't add up to engram_num_embeddings; OSError
        where the file cannot be read; TypeError for a tokenizer of another kind.
        """
        return cls(EngramConfig.from_dict(config), build_token_map(tokenizer))

    def row_ids(
        self,
        tokens: ArrayLike,
        dead: ArrayLike | None = None,
        history: ArrayLike = (),
        history_dead: ArrayLike | None = None,
    ) -> NDArray[np.int32]:
        """Row ids of T consecutive tokens of one sequence -> int32 [T, layers, columns], a new array; never -1.

        tokens: integers [T]. dead: booleans [T], True inside an image span; such a position, and what lies behind it,
        hashes as padding (its token must still be in the vocabulary). history: the up to max_ngram_size - 1 tokens
        before them, oldest first; none at the start of a sequence. history_dead: booleans, one per history token.

        Raises TypeError for values that are not integers (booleans for the masks), and ValueError for wrong shapes, a
        history that is too long, and a token outside the vocabulary (names its position, value and the limit).
        """
        token_values, token_ids = _as_tokens("tokens", tokens)
        history_values, history_ids = _as_tokens("history", history)
        most = self.max_ngram_size - 1
        if history_ids.size > most:
            raise ValueError(f"history has {history_ids.size} tokens: pass the last {most} at most")
        dead_mask = _as_mask("dead", dead, token_ids.size)
        history_mask = _as_mask("history_dead", history_dead, history_ids.size)
        out = np.empty((token_ids.size, len(self.layer_ids), self._columns), dtype=np.int32)
        result = lib.engram_hash_rows(
            self._layers,
            len(self.layer_ids),
            self.max_ngram_size,
            self._n_heads,
            self._token_map_pointer,
            self.token_map.size,
            self._pad_id,
            ffi.from_buffer("int64_t[]", token_ids),
            ffi.NULL if dead_mask is None else ffi.from_buffer("uint8_t[]", dead_mask),
            token_ids.size,
            ffi.from_buffer("int64_t[]", history_ids),
            ffi.NULL if history_mask is None else ffi.from_buffer("uint8_t[]", history_mask),
            history_ids.size,
            ffi.from_buffer("int32_t[]", out, require_writable=True),
        )
        if result == -1:
            return out
        if result >= 0:
            raise self._outside_vocabulary("tokens", token_values, result)
        if -2 - result < history_ids.size:
            raise self._outside_vocabulary("history", history_values, -2 - result)
        raise RuntimeError("the native hash refused the geometry that was checked here")

    def _outside_vocabulary(self, name: str, values: NDArray[Any], position: int) -> ValueError:
        return ValueError(
            f"{name}[{position}] is {int(values[position])}: outside the vocabulary, 0 to {self.token_map.size - 1}"
        )


def _as_tokens(name: str, values: ArrayLike) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The values as given, and as contiguous int64. What int64 cannot hold becomes -1, which no vocabulary holds."""
    array = np.asarray(values)
    if array.size == 0 and not hasattr(values, "dtype"):
        array = array.astype(np.int64)  # an empty sequence has no dtype of its own
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: must be a sequence of token ids of one dimension")
    dtype = array.dtype
    if dtype.kind == "f" and not hasattr(values, "dtype"):
        array = np.array(values, dtype=object)  # numpy makes floats of integers that neither int64 nor uint64 holds
    if array.dtype == object and all(type(value) is int for value in array):
        return array, np.array([v if 0 <= v <= _INT64_MAX else -1 for v in array.tolist()], dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, not {dtype}")
    ids = np.ascontiguousarray(array, dtype=np.int64)
    if array.dtype == np.uint64:
        ids = np.where(array > _INT64_MAX, np.int64(-1), ids)
    return array, ids


def _as_mask(name: str, values: ArrayLike | None, count: int) -> NDArray[np.uint8] | None:
    if values is None:
        return None
    array = np.asarray(values)
    if array.size == 0 and not hasattr(values, "dtype"):
        array = array.astype(np.bool_)
    if array.shape != (count,):
        raise ValueError(f"{name} has shape {array.shape}: must be ({count},), one value per token")
    if array.dtype != np.bool_:
        # Zeros and ones of an integer dtype are taken; other numbers look like positions passed by mistake.
        if array.dtype.kind not in "iu" or not np.isin(array, (0, 1)).all():
            raise TypeError(f"{name} must hold booleans, not {array.dtype}")
        array = array.astype(np.bool_)
    return np.ascontiguousarray(array).view(np.uint8)
