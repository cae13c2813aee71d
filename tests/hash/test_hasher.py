"""NgramHasher: published row ids, an independent numpy version, look-back, dead positions, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engram_client._native import lib
from engram_client.engram_config import EngramConfig
from engram_client.hasher import NgramHasher
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

SMALL_LAYER_IDS = (7, 0, 3)
SMALL_PAD_TOKEN = 5
SMALL_COMPRESSED = 100


def numpy_rows(
    tokens: NDArray[np.int64],
    dead: NDArray[np.bool_],
    token_map: NDArray[np.int64],
    head_sizes: NDArray[np.int64],
    layer_ids: tuple[int, ...],
    max_ngram: int,
    pad_id: int,
    compressed: int,
) -> NDArray[np.int64]:
    """The formula over a whole sequence, one array operation per layer, shift and column."""
    layers, columns = head_sizes.shape
    heads = columns // (max_ngram - 1)
    out = np.empty((len(tokens), layers, columns), dtype=np.int64)
    for layer, layer_id in enumerate(layer_ids):
        bound = max(1, (np.iinfo(np.int64).max // compressed) // 2)
        multipliers = np.random.default_rng(10007 * layer_id).integers(0, bound, size=max_ngram, dtype=np.int64) * 2 + 1
        rolling = np.zeros(len(tokens), dtype=np.int64)
        blocked = np.zeros(len(tokens), dtype=bool)
        for shift in range(max_ngram):
            source = np.arange(len(tokens)) - shift
            known = source >= 0
            blocked |= ~known
            blocked[known] |= dead[source[known]]
            value = np.full(len(tokens), pad_id, dtype=np.int64)
            value[~blocked] = token_map[tokens[source[~blocked]]]
            rolling ^= value * multipliers[shift]
            for head in range(heads if shift else 0):
                column = (shift - 1) * heads + head
                out[:, layer, column] = rolling % head_sizes[layer, column] + head_sizes[layer, :column].sum()
    return out


def small_rows(hasher: NgramHasher, tokens: list[int], dead: list[bool]) -> NDArray[np.int64]:
    token_map = hasher.token_map.astype(np.int64)
    return numpy_rows(
        np.array(tokens, dtype=np.int64),
        np.array(dead, dtype=bool),
        token_map,
        hasher.head_sizes,
        SMALL_LAYER_IDS,
        5,
        int(token_map[SMALL_PAD_TOKEN]),
        SMALL_COMPRESSED,
    )


def test_every_golden_vector(published_hasher: NgramHasher, golden: dict[str, Any]) -> None:
    assert len(golden["cases"]) == 8
    for case in golden["cases"]:
        rows = published_hasher.row_ids(case["tokens"], dead=case.get("dead"))
        assert rows.dtype == np.int32
        assert rows.shape == (len(case["tokens"]), 2, 24)
        assert rows[:, 0].tolist() == case["rows_layer_1"], case["name"]
        assert rows[:, 1].tolist() == case["rows_layer_14"], case["name"]


def test_published_attributes(published_hasher: NgramHasher) -> None:
    assert published_hasher.layer_ids == (1, 14)
    assert published_hasher.max_ngram_size == 4
    assert published_hasher.head_sizes.dtype == np.int64
    assert published_hasher.head_sizes.sum(axis=1).tolist() == [384006168, 384016682]
    assert published_hasher.head_sizes[0, 0] == 16000057
    assert published_hasher.token_map.dtype == np.int32
    for array in (published_hasher.head_sizes, published_hasher.token_map):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_published_geometry_against_numpy(published_hasher: NgramHasher) -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 129280, 3000)
    dead = random.random(3000) < 0.1
    expected = numpy_rows(
        tokens, dead, published_hasher.token_map.astype(np.int64), published_hasher.head_sizes, (1, 14), 4, 2, 99092
    )
    rows = published_hasher.row_ids(tokens, dead)
    assert (rows == expected).all()
    offsets = np.cumsum(published_hasher.head_sizes, axis=1) - published_hasher.head_sizes
    assert (rows >= offsets).all()
    assert (rows < offsets + published_hasher.head_sizes).all()


@given(data=st.data())
def test_chunks_of_any_cut_join_to_the_whole(small_hasher: NgramHasher, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 299), max_size=40))
    dead = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    expected = small_rows(small_hasher, tokens, dead)
    assert (small_hasher.row_ids(tokens, dead) == expected).all()
    look_back = small_hasher.max_ngram_size - 1
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        before = slice(max(0, begin - look_back), begin)
        part = small_hasher.row_ids(
            tokens[begin:end], dead[begin:end], history=tokens[before], history_dead=dead[before]
        )
        assert part.shape == (end - begin, 3, 12)
        assert (part == expected[begin:end]).all()


def test_long_sequence_across_native_blocks(small_hasher: NgramHasher) -> None:
    random = np.random.default_rng(1)
    tokens = random.integers(0, 300, 2500)
    dead = random.random(2500) < 0.2
    expected = small_rows(small_hasher, tokens.tolist(), dead.tolist())
    assert (small_hasher.row_ids(tokens, dead) == expected).all()
    for begin in (1, 255, 256, 257, 600):
        before = slice(max(0, begin - 4), begin)
        part = small_hasher.row_ids(tokens[begin:], dead[begin:], tokens[before], dead[before])
        assert (part == expected[begin:]).all()


def test_no_history_is_not_pad_history(small_hasher: NgramHasher) -> None:
    # A start of sequence hashes like a history of pad tokens, and unlike any other history.
    rows = small_hasher.row_ids([9, 8])
    assert (rows == small_hasher.row_ids([9, 8], history=[SMALL_PAD_TOKEN] * 4)).all()
    assert (rows != small_hasher.row_ids([9, 8], history=[1])).any()
    assert (rows == small_hasher.row_ids([9, 8], history=[1], history_dead=[True])).all()


def test_dead_positions(small_hasher: NgramHasher) -> None:
    pad = small_hasher.row_ids([SMALL_PAD_TOKEN])[0]
    rows = small_hasher.row_ids([1, 2, 3, 4], dead=[False, False, True, False])
    assert (rows[2] == pad).all()  # as if all were pad, and no -1
    assert (rows[3] == small_hasher.row_ids([4])[0]).all()  # nothing is seen through a dead position
    assert (rows[:2] == small_hasher.row_ids([1, 2])).all()


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i4", "<u4", ">i8", "u8"])
def test_integer_dtypes(small_hasher: NgramHasher, dtype: str) -> None:
    tokens = np.array([3, 1, 100, 0, 90], dtype=dtype)
    expected = small_hasher.row_ids([3, 1, 100, 0, 90])
    assert (small_hasher.row_ids(tokens) == expected).all()
    strided = np.repeat(tokens, 2)[::2]
    assert (small_hasher.row_ids(strided) == expected).all()
    read_only = tokens.copy()
    read_only.flags.writeable = False
    assert (small_hasher.row_ids(read_only) == expected).all()
    assert (small_hasher.row_ids(tokens[1:], history=tokens[:1]) == expected[1:]).all()


def test_masks_of_integers_and_strides(small_hasher: NgramHasher) -> None:
    expected = small_hasher.row_ids([1, 2, 3], dead=[False, True, False])
    assert (small_hasher.row_ids([1, 2, 3], dead=[0, 1, 0]) == expected).all()
    mask = np.array([False, False, True, True, False, False])[::2]
    assert (small_hasher.row_ids([1, 2, 3], dead=mask) == expected).all()


def test_empty_sequences(small_hasher: NgramHasher) -> None:
    empties: list[Any] = [[], (), np.empty(0, np.int32)]
    for empty in empties:
        assert small_hasher.row_ids(empty).shape == (0, 3, 12)
    assert small_hasher.row_ids([], dead=[], history=[1, 2]).shape == (0, 3, 12)


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0, 2.0],
        np.array([1.5]),
        np.empty(0, np.float32),
        [True, False],
        ["1"],
        [None],
        np.array([1, 2.5], dtype=object),
    ],
)
def test_tokens_that_are_no_integers(small_hasher: NgramHasher, tokens: Any) -> None:
    with pytest.raises(TypeError, match="tokens must hold integers"):
        small_hasher.row_ids(tokens)
    with pytest.raises(TypeError, match="history must hold integers"):
        small_hasher.row_ids([1], history=tokens)


@pytest.mark.parametrize("bad", [-1, 300, 2**31, 2**32 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, 10**30])
@pytest.mark.parametrize("position", [0, 2, 700])
def test_token_outside_the_vocabulary(small_hasher: NgramHasher, bad: int, position: int) -> None:
    values = [7] * 800
    values[position] = values[750] = bad
    with pytest.raises(ValueError, match=rf"^tokens\[{position}\] is {bad}: outside the vocabulary, 0 to 299$"):
        small_hasher.row_ids(values)
    if position < 4:
        history = values[:4]
        with pytest.raises(ValueError, match=rf"^history\[{position}\] is {bad}: outside the vocabulary, 0 to 299$"):
            small_hasher.row_ids([bad], history=history)


def test_shapes_that_are_refused(small_hasher: NgramHasher) -> None:
    with pytest.raises(ValueError, match=r"tokens has shape \(1, 2\)"):
        small_hasher.row_ids([[1, 2]])
    with pytest.raises(ValueError, match=r"tokens has shape \(\)"):
        small_hasher.row_ids(3)
    with pytest.raises(ValueError, match="history has 5 tokens: pass the last 4"):
        small_hasher.row_ids([1], history=[1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match=r"dead has shape \(1,\): must be \(2,\)"):
        small_hasher.row_ids([1, 2], dead=[True])
    with pytest.raises(ValueError, match=r"history_dead has shape \(1,\): must be \(0,\)"):
        small_hasher.row_ids([1, 2], history_dead=[True])
    with pytest.raises(TypeError, match="dead must hold booleans"):
        small_hasher.row_ids([1, 2], dead=[0, 2])
    with pytest.raises(TypeError, match="dead must hold booleans"):
        small_hasher.row_ids([1, 2], dead=[0.0, 1.0])


def test_threads_share_a_hasher(small_hasher: NgramHasher) -> None:
    sequences = [np.random.default_rng(seed).integers(0, 300, 20_000) for seed in range(4)]
    expected = [small_hasher.row_ids(tokens) for tokens in sequences]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if (small_hasher.row_ids(sequences[index]) != expected[index]).any():
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert wrong == []


def test_both_places_of_the_config(
    published_config: dict[str, Any], published_hasher: NgramHasher, published_tokenizer: Path
) -> None:
    nested = {"model_type": "deepseek_v41", "text_config": published_config, "engram_n_heads": 8}
    hasher = NgramHasher.from_config(nested, published_tokenizer)
    assert (hasher.row_ids([5, 6]) == published_hasher.row_ids([5, 6])).all()
    with pytest.raises(ValueError, match="engram_n_heads is 7 at the top and 8 in text_config"):
        EngramConfig.from_dict({**nested, "engram_n_heads": 7})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_heads", 0, "engram_n_heads is 0: must be an integer from 1"),
        ("n_heads", 10**9, "engram_n_heads is 1000000000: must be"),
        ("n_heads", 65536, "hash columns"),
        pytest.param("n_heads", 10**5000, "engram_n_heads is a number too long to show: must be", id="huge"),
        ("n_heads", 8.0, "engram_n_heads is 8.0: must be an integer"),
        ("n_heads", True, "engram_n_heads is True: must be an integer"),
        ("n_heads", "8", "engram_n_heads is '8': must be an integer"),
        ("n_heads", None, "engram_n_heads is None: must be an integer"),
        ("max_ngram_size", 1, "engram_max_ngram_size is 1: must be an integer from 2 to 8"),
        ("max_ngram_size", 9, "engram_max_ngram_size is 9: must be an integer from 2 to 8"),
        ("vocab_size", 0, "engram_vocab_size is 0: must be"),
        ("vocab_size", -5, "engram_vocab_size is -5: must be"),
        ("vocab_size", 2**31, "engram_vocab_size is 2147483648: must be"),
        ("compressed_vocab_size", 0, "engram_compressed_vocab_size is 0: must be"),
        ("pad_token_id", -1, "engram_pad_token_id is -1: must be"),
        ("layer_ids", [], "engram_layer_ids is .*must be a list"),
        ("layer_ids", 1, "engram_layer_ids is 1: must be a list"),
        ("layer_ids", "12", "engram_layer_ids is '12': must be a list"),
        ("layer_ids", [1, -14], r"engram_layer_ids\[1\] is -14: must be"),
        ("layer_ids", [1, 1], "names a layer twice"),
        ("layer_ids", [1, True], r"engram_layer_ids\[1\] is True: must be"),
        ("layer_ids", list(range(10**5)), r"engram_layer_ids is \[0, 1, .*must be a list"),
        ("num_embeddings", [384006168], "must run in parallel"),
        ("num_embeddings", [384006168, 2**31], r"engram_num_embeddings\[1\] is 2147483648: must be"),
        ("num_embeddings", [384006168, 0], r"engram_num_embeddings\[1\] is 0: must be"),
    ],
)
def test_hostile_config(published_config: dict[str, Any], field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        EngramConfig.from_dict({**published_config, f"engram_{field}": value})
    assert len(str(raised.value)) < 400


def test_missing_fields_and_other_types(published_config: dict[str, Any]) -> None:
    for name in published_config:
        if name == "engram_head_dim":
            continue  # of no use to the hash
        fields = {key: value for key, value in published_config.items() if key != name}
        with pytest.raises(ValueError, match=f"no field {name}"):
            EngramConfig.from_dict(fields)
    others: list[Any] = [None, [], "config.json"]
    for config in others:
        with pytest.raises(TypeError, match=r"config must be the dict"):
            EngramConfig.from_dict(config)


def test_geometry_that_does_not_fit(published_config: dict[str, Any], published_tokenizer: Path) -> None:
    def build(**changes: object) -> NgramHasher:
        return NgramHasher.from_config({**published_config, **changes}, published_tokenizer)

    with pytest.raises(
        ValueError, match="99092 compressed ids, but config field engram_compressed_vocab_size says 99091"
    ):
        build(engram_compressed_vocab_size=99091)
    with pytest.raises(
        ValueError, match="add up to 384016682 rows, but config field engram_num_embeddings says 384016683"
    ):
        build(engram_num_embeddings=[384006168, 384016683])
    with pytest.raises(
        ValueError, match="add up to 384006168 rows, but config field engram_num_embeddings says 384016682"
    ):
        build(engram_num_embeddings=[384016682, 384006168])
    with pytest.raises(ValueError, match="row ids are int32, so at most 2147483647"):
        build(engram_vocab_size=100_000_000)
    with pytest.raises(ValueError, match="engram_pad_token_id is 129280: the tokenizer's last token is 129279"):
        build(engram_pad_token_id=129280)


def test_another_tokenizer_is_refused(published_config: dict[str, Any], write_tokenizer: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="use the tokenizer that belongs to the checkpoint"):
        NgramHasher.from_config(published_config, write_tokenizer(["the", "The"]))


@pytest.mark.parametrize("token_map", [[], [[0, 1]], [0, 2], [-1, 0, 1], [1, 2]])
def test_malformed_token_map(token_map: list[int]) -> None:
    config = EngramConfig((1,), (5,), 2, 5, 1, 0, 2)
    assert NgramHasher(config, [0, 1]).row_ids([0, 1]).shape == (2, 1, 1)
    with pytest.raises(ValueError, match="token map"):
        NgramHasher(config, token_map)


def test_smallest_and_largest_geometries() -> None:
    # Head sizes below and above the floating way's limit, up to the last row id that int32 holds.
    for vocab_size, prime in ((1, 2), (8190, 8191), (8192, 8209), (2**31 - 1, 2**31 - 1)):
        config = EngramConfig((3,), (prime,), 2, vocab_size, 1, 0, 50)
        hasher = NgramHasher(config, np.arange(50))
        tokens = np.random.default_rng(2).integers(0, 50, 500)
        expected = numpy_rows(
            tokens, np.zeros(500, bool), np.arange(50), np.array([[prime]], dtype=np.int64), (3,), 2, 0, 50
        )
        assert hasher.head_sizes.tolist() == [[prime]]
        assert (hasher.row_ids(tokens) == expected).all()


def test_native_limits() -> None:
    assert (lib.ENGRAM_HASH_MAX_NGRAM, lib.ENGRAM_HASH_MAX_COLUMNS) == (8, 65536)
