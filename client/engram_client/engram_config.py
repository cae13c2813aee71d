"""The Engram fields of a model's config.json, checked.

A config comes from a file, so nothing in it is trusted: each field is checked for presence, type and range, and an
error names the field, its value and the limit. The formulas that use the fields are in hasher.py.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._native import lib

MAX_NGRAM_SIZE: int = lib.ENGRAM_HASH_MAX_NGRAM
MAX_COLUMNS: int = lib.ENGRAM_HASH_MAX_COLUMNS
MAX_ROWS: int = 2**31 - 1  # row ids of one layer are int32

_FIELD_PREFIX = "engram_"
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """Geometry of the Engram tables; the names are those of config.json without the prefix `engram_`.

    layer_ids and num_embeddings (rows per table) run in parallel. vocab_size is where the search for head sizes starts;
    pad_token_id is a token id, not a compressed one.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def columns(self) -> int:
        """Hash columns of one layer: n-gram orders 2 .. max_ngram_size, n_heads each."""
        return (self.max_ngram_size - 1) * self.n_heads

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> EngramConfig:
        """Reads the fields from a config.json's dict, or from its `text_config`.

        Raises TypeError where `config` is no mapping, and ValueError where a field is missing, of a wrong type, out of
        range, or named in both places with different values.
        """
        fields = _engram_fields(config)
        layer_ids = _integers(fields, "layer_ids", 0, MAX_ROWS)
        if len(set(layer_ids)) != len(layer_ids):
            raise ValueError(f"config field engram_layer_ids names a layer twice: {_shown(list(layer_ids))}")
        num_embeddings = _integers(fields, "num_embeddings", 1, MAX_ROWS)
        if len(num_embeddings) != len(layer_ids):
            raise ValueError(
                f"config field engram_num_embeddings has {len(num_embeddings)} entries and engram_layer_ids "
                f"{len(layer_ids)}: they must run in parallel"
            )
        result = cls(
            layer_ids=layer_ids,
            num_embeddings=num_embeddings,
            max_ngram_size=_integer(fields, "max_ngram_size", 2, MAX_NGRAM_SIZE),
            vocab_size=_integer(fields, "vocab_size", 1, MAX_ROWS),
            n_heads=_integer(fields, "n_heads", 1, MAX_COLUMNS),
            pad_token_id=_integer(fields, "pad_token_id", 0, MAX_ROWS),
            compressed_vocab_size=_integer(fields, "compressed_vocab_size", 1, MAX_ROWS),
        )
        total = len(layer_ids) * result.columns
        if total > MAX_COLUMNS:
            raise ValueError(
                f"config asks for {total} hash columns ({len(layer_ids)} layers x {result.max_ngram_size - 1} n-gram "
                f"orders x {result.n_heads} heads): at most {MAX_COLUMNS} are supported"
            )
        return result


def _engram_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields named engram_* of both places, merged."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be the dict of a config.json, not {type(config).__name__}")
    fields: dict[str, Any] = {}
    for place in (config, config.get("text_config")):
        if not isinstance(place, Mapping):
            continue
        for name, value in place.items():
            if not isinstance(name, str) or not name.startswith(_FIELD_PREFIX):
                continue
            if name in fields and fields[name] != value:
                raise ValueError(
                    f"config field {name} is {_shown(fields[name])} at the top and {_shown(value)} in text_config: "
                    "they must agree"
                )
            fields[name] = value
    return fields


def _shown(value: object) -> str:
    """A short repr for an error message."""
    try:
        text = reprlib.repr(value)
    except ValueError:  # Python converts no integer of over 4,300 digits
        return "a number too long to show"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _checked_integer(label: str, value: object, smallest: int, largest: int) -> int:
    # bool is a subclass of int, and a float such as 4.0 may stand for a rounded number: neither is taken.
    if type(value) is not int or not smallest <= value <= largest:
        raise ValueError(f"{label} is {_shown(value)}: must be an integer from {smallest} to {largest}")
    return value


def _field(fields: Mapping[str, Any], name: str) -> object:
    try:
        return fields[_FIELD_PREFIX + name]
    except KeyError:
        raise ValueError(
            f"config has no field {_FIELD_PREFIX + name}, at the top or in text_config: is it the config.json of a "
            "model with Engram tables?"
        ) from None


def _integer(fields: Mapping[str, Any], name: str, smallest: int, largest: int) -> int:
    return _checked_integer(f"config field {_FIELD_PREFIX + name}", _field(fields, name), smallest, largest)


def _integers(fields: Mapping[str, Any], name: str, smallest: int, largest: int) -> tuple[int, ...]:
    values = _field(fields, name)
    label = f"config field {_FIELD_PREFIX + name}"
    if not isinstance(values, list | tuple) or not 1 <= len(values) <= MAX_COLUMNS:
        raise ValueError(f"{label} is {_shown(values)}: must be a list of 1 to {MAX_COLUMNS} integers")
    return tuple(_checked_integer(f"{label}[{index}]", value, smallest, largest) for index, value in enumerate(values))
