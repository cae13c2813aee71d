"""The engram_* fields of a model's config.json, which say how a table's rows are addressed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from engramd import strict_json
from engramd.errors import EngramdError

MAX_CONFIG_BYTES = 16 << 20
PREFIX = "engram_"
MAX_FIELDS = 64
_FIELD = re.compile(r"engram_[a-z0-9_]{1,64}", re.ASCII)


@dataclass(frozen=True)
class EngramConfig:
    """Checked engram_* fields. `fields` holds all of them as they were, for the table's manifest."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    fields: dict[str, int | list[int]]

    def rows(self, layer: int) -> int:
        return self.num_embeddings[self.layer_ids.index(layer)]


def read_config(directory: str) -> EngramConfig | None:
    """The engram config beside a checkpoint; None where there is no config.json or it has no engram_* fields."""
    path = os.path.join(directory, "config.json")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise EngramdError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
    return parse_config(strict_json.loads(data, path), path)


def parse_config(config: Any, path: str) -> EngramConfig | None:
    """Checks the fields, at the top or inside text_config; `path` names the file in errors."""

    def refuse(why: str) -> NoReturn:
        raise EngramdError(f"{path}: {why}")

    if not isinstance(config, dict):
        refuse("not a JSON object")
    inner = config.get("text_config")
    holder = inner if isinstance(inner, dict) and "engram_layer_ids" in inner else config
    if "engram_layer_ids" not in holder:
        return None

    def integer(key: str, low: int, high: int) -> int:
        value = holder.get(PREFIX + key)
        if type(value) is not int or not low <= value <= high:
            refuse(f"{PREFIX}{key} is {str(value)[:80]}, not an integer from {low} to {high}")
        return int(value)

    def integers(key: str, low: int, high: int) -> tuple[int, ...]:
        value = holder.get(PREFIX + key)
        if not isinstance(value, list) or not 1 <= len(value) <= 256:
            refuse(f"{PREFIX}{key} is not a list of 1 to 256 integers")
        if not all(type(x) is int and low <= x <= high for x in value):
            refuse(f"{PREFIX}{key} holds something other than integers from {low} to {high}: {str(value)[:80]}")
        return tuple(value)

    layer_ids = integers("layer_ids", 0, (1 << 31) - 1)
    if len(set(layer_ids)) != len(layer_ids):
        refuse(f"engram_layer_ids names a layer twice: {list(layer_ids)}")
    num_embeddings = integers("num_embeddings", 1, 1 << 40)
    if len(num_embeddings) != len(layer_ids):
        refuse(f"engram_num_embeddings has {len(num_embeddings)} entries for {len(layer_ids)} engram_layer_ids")
    fields = {key: value for key, value in holder.items() if _FIELD.fullmatch(str(key)) and _is_plain(value)}
    if len(fields) > MAX_FIELDS:
        refuse(f"{len(fields)} engram_* fields (the limit is {MAX_FIELDS})")
    return EngramConfig(
        layer_ids=layer_ids,
        num_embeddings=num_embeddings,
        max_ngram_size=integer("max_ngram_size", 2, 8),
        vocab_size=integer("vocab_size", 1, 1 << 40),
        n_heads=integer("n_heads", 1, 585),
        head_dim=integer("head_dim", 1, 65536),
        fields=fields,
    )


def _is_plain(value: Any) -> bool:
    """Whether a field may go into a manifest: an int64, or a list of at most 256."""
    values = value if isinstance(value, list) else [value]
    return len(values) <= 256 and all(type(x) is int and -(1 << 63) <= x < 1 << 63 for x in values)
