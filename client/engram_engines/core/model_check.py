"""Opens a model's layers in a daemon, after a check that the served table is the model's own.

Rows of another table, or of the same table hashed otherwise, have the right shape and the wrong content, and nothing
downstream would notice. So everything that the daemon says about the table is compared with the model's configuration
before the first step: layers, rows, bytes of a row, head sizes, the fields of the hash, the source's revision. Then the
content's identity is pinned: a reload of other content fails the next step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engram_client import Client, EngramError, Table, UnknownTable
from engram_client.engram_config import EngramConfig
from engram_client.hasher import head_sizes

logger = logging.getLogger(__name__)

# FP8 values of an Engram row that share one E8M0 scale byte (DeepSeek-V4.1's published config.json, see docs/gpu.md).
VALUES_PER_SCALE = 32
_COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelMismatch(EngramError):
    """The daemon's table is not the model's. The text names what each of them says."""


def open_layers(
    client: Client,
    config: Mapping[str, Any],
    *,
    head_dim: int,
    table: str | None = None,
    revision: str | None = None,
    layer_ids: Sequence[int] | None = None,
) -> list[Table]:
    """The model's layers, checked and pinned, in the order of layer_ids.

    config: the model's config.json, or its text_config. head_dim: FP8 values of one row. table: its name in the daemon;
    None where a single one has the layers. revision: of the model's checkpoint; compared where both are commits.
    layer_ids: None for all that the config names.
    Raises ModelMismatch; ValueError where the config is not an Engram model's; UnknownTable, DaemonLost.
    """
    wanted = EngramConfig.from_dict(config)
    sizes = dict(zip(wanted.layer_ids, head_sizes(wanted), strict=True))
    rows = dict(zip(wanted.layer_ids, wanted.num_embeddings, strict=True))
    name = table if table is not None else _only_table(client, wanted)
    described = _description(client, name)
    problems = [
        *_hash_problems(described.get("hash"), wanted),
        *_revision_problems(described.get("revision"), revision),
    ]
    tables = []
    for layer_id in wanted.layer_ids if layer_ids is None else layer_ids:
        found = client.table(name, layer_id)
        tables.append(client.table(name, layer_id, identity=found.identity))
        expected = {
            "rows": (found.num_rows, rows[layer_id]),
            "bytes a row": (found.row_bytes, head_dim + head_dim // VALUES_PER_SCALE),
            "value bytes a row": (found.value_bytes, head_dim),
            "head sizes": (found.head_sizes.tolist(), sizes[layer_id].tolist()),
        }
        problems += [
            f"layer {layer_id} has {_shown(served)} {what}, the model {_shown(own)}"
            for what, (served, own) in expected.items()
            if served != own
        ]
    if problems:
        raise ModelMismatch(
            f"table {name!r} of the engramd daemon is not the model's: {'; '.join(problems)}. Serve the table that was "
            "packed from this model's checkpoint, or name another with ENGRAMD_TABLE"
        )
    logger.info("engramd serves the model's rows: table %s, identity %s", name, tables[0].identity if tables else "-")
    return tables


def _tables(client: Client) -> list[dict[str, Any]]:
    return list(client.stats()["tables"])


def _only_table(client: Client, wanted: EngramConfig) -> str:
    served = _tables(client)
    fitting = [t["name"] for t in served if set(wanted.layer_ids) <= {layer["layer"] for layer in t["layers"]}]
    if len(fitting) != 1:
        names = ", ".join(t["name"] for t in served) or "nothing"
        what = "several tables have" if fitting else "no table has"
        raise UnknownTable(
            f"{what} the model's layers {list(wanted.layer_ids)}; the engramd daemon serves {names}: name one with "
            "ENGRAMD_TABLE"
        )
    return str(fitting[0])


def _description(client: Client, name: str) -> dict[str, Any]:
    for served in _tables(client):
        if served["name"] == name:
            return served
    return {}  # client.table() says what there is


def _hash_problems(served: Mapping[str, Any] | None, wanted: EngramConfig) -> list[str]:
    """Differences in the fields that row ids derive from. A table packed without them has only its head sizes."""
    if served is None:
        return []
    own = {
        "engram_layer_ids": list(wanted.layer_ids),
        "engram_num_embeddings": list(wanted.num_embeddings),
        "engram_max_ngram_size": wanted.max_ngram_size,
        "engram_vocab_size": wanted.vocab_size,
        "engram_n_heads": wanted.n_heads,
        "engram_pad_token_id": wanted.pad_token_id,
        "engram_compressed_vocab_size": wanted.compressed_vocab_size,
    }
    return [
        f"its {name} is {_shown(served[name])}, the model's {_shown(value)}"
        for name, value in own.items()
        if name in served and served[name] != value
    ]


def _revision_problems(served: str | None, own: str | None) -> list[str]:
    # Branch names and paths say nothing about content; two different commits do.
    if served is None or own is None or not _COMMIT.fullmatch(served) or not _COMMIT.fullmatch(own) or served == own:
        return []
    return [f"it was packed from revision {served}, the model is of revision {own}"]


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:60] + "..."
