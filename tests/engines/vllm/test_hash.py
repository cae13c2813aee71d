"""vLLM's hash kernel and ours give the same ids, however a text is cut and whatever images lie in it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engram_client import NgramHasher

IMAGE_TOKEN = 129264


def random_text(seed: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Random tokens with repeats and, now and then, the span of an image."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 129_280, length)
    tokens[tokens == IMAGE_TOKEN] = 0
    for start in generator.integers(0, length, 2):
        tokens[start : start + generator.integers(1, 5)] = IMAGE_TOKEN
    return tokens


def test_constants(hash_state: Any, hasher: NgramHasher, layout: Any) -> None:
    assert hash_state.token_map.tolist() == hasher.token_map.tolist()
    assert np.array(layout.primes).reshape(hasher.head_sizes.shape).tolist() == hasher.head_sizes.tolist()
    assert tuple(layout.layer_ids) == hasher.layer_ids


@pytest.mark.parametrize("seed", range(6))
def test_ids_over_random_chunks(
    seed: int, hash_state: Any, hasher: NgramHasher, batches: Callable[..., Any], make_state: Callable[..., Any]
) -> None:
    """Each step of several requests: prefill in chunks, starts in the middle (a prefix-cache hit, or KV from another
    instance) and single decode tokens."""
    generator = np.random.default_rng(seed)
    texts = {name: random_text(seed * 10 + index, 40) for index, name in enumerate("abc")}
    expected = {name: hasher.row_ids(text, dead=text == IMAGE_TOKEN) for name, text in texts.items()}
    runner = batches(texts)
    # A prefix-cache hit: nothing of the text was computed here before.
    position = {"a": 0, "b": int(generator.integers(1, 20)), "c": 0}
    seen = SimpleNamespace(ids=None)
    state = make_state(SimpleNamespace(stage=lambda batch, window, is_graph: seen.__dict__.update(ids=(batch, window))))
    while any(first < 40 for first in position.values()):
        chunks = [
            (name, first, min(40 - first, int(generator.choice([1, 2, 3, 11]))))
            for name, first in position.items()
            if first < 40
        ]
        state.prepare_inputs(runner.batch(chunks, padding=int(generator.integers(0, 5))), runner.req_states)
        batch, window = seen.ids
        tokens = batch.input_ids[: batch.num_tokens]
        ids = hash_state(
            tokens, batch.positions[: batch.num_tokens], batch.query_start_loc, tokens == IMAGE_TOKEN, window,
            window == IMAGE_TOKEN, None, None,
        )  # fmt: skip
        own = np.concatenate([expected[name][first : first + count] for name, first, count in chunks])
        assert (ids.numpy() == own).all()
        for name, first, count in chunks:
            position[name] = first + count
