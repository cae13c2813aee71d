"""Tokens of a byte-level tokenizer.json, read with the standard library alone.

Only what the token map needs is read: the token of each id and the text it decodes to. The file is checked: it must
hold exactly one token for each id from 0 up, and its decoder must be the byte-level one.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

MAX_FILE_BYTES = 512 * 1024 * 1024


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable alphabet for bytes: printable Latin-1 characters stand for themselves, the other bytes, in
    order, for the characters from U+0100 up (`bytes_to_unicode` in openai/gpt-2, src/encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()
# str.translate turns the alphabet's characters into those of Latin-1; anything else is left above U+0100 or is one of
# the Latin-1 characters that the alphabet doesn't use, which are sent to U+FFFF so that encoding fails on them.
_TO_LATIN_1 = dict.fromkeys(range(256), 0xFFFF) | {ord(c): b for c, b in _BYTE_OF_CHARACTER.items()}


def decode_token(token: str) -> str:
    """The text of one token, as the `ByteLevel` decoder of the `tokenizers` package gives it: the characters' bytes as
    UTF-8 with U+FFFD for what is malformed; a token with a character outside the alphabet stands for itself."""
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return token


def read_tokens(path: str | os.PathLike[str]) -> list[str]:
    """The token of each id, added tokens included: tokens[id].

    Raises OSError where the file cannot be read and ValueError, naming the file, where it is not a byte-level
    tokenizer.json with one token for each id from 0 up.
    """
    name = os.fspath(path)
    try:
        return _tokens_of(_read_json(name))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _read_json(name: str) -> dict[str, Any]:
    if not stat.S_ISREG(os.stat(name).st_mode):  # opening a pipe would wait for a writer
        raise ValueError("not a regular file: give the path of a tokenizer.json")
    with open(name, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes, the limit for a tokenizer.json")
    try:
        root = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply for a tokenizer.json") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(root, dict):
        raise ValueError(f"not a tokenizer.json: the top is {type(root).__name__}, not an object")
    return root


def _tokens_of(root: dict[str, Any]) -> list[str]:
    if not _is_byte_level(root.get("decoder")):
        raise ValueError(
            "the decoder is not ByteLevel, the only one read here: pass a tokenizers.Tokenizer or a transformers "
            "tokenizer instead of the path"
        )
    model = root.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict):
        raise ValueError("model.vocab is not an object of token: id")
    token_of_id: dict[int, str] = {}
    for token, token_id in vocab.items():
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"model.vocab gives {token!r:.80} the id {token_id!r:.40}: must be an integer from 0 up")
        if token_id in token_of_id:
            raise ValueError(f"model.vocab gives {token!r:.80} the id {token_id} of {token_of_id[token_id]!r:.80}")
        token_of_id[token_id] = token
    for token_id in range(len(token_of_id)):
        if token_id not in token_of_id:
            raise ValueError(f"model.vocab has no token of id {token_id}: its {len(vocab)} ids must run from 0")
    tokens = [token_of_id[token_id] for token_id in range(len(token_of_id))]
    tokens += _added_tokens(vocab, root.get("added_tokens"))
    for token_id, token in enumerate(tokens):
        try:
            token.encode()
        except UnicodeEncodeError:
            raise ValueError(f"token {token_id} is {token!r:.80}, which is not valid Unicode text") from None
    return tokens


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _added_tokens(vocab: dict[str, int], added_tokens: object) -> list[str]:
    """The added tokens that the model does not know, in order of their ids.

    The `tokenizers` package does not heed the ids written here: a token that it knows keeps its id, the others are
    numbered on from the model's in the order of the file. A file that says otherwise is refused.
    """
    if added_tokens is None:
        return []
    if not isinstance(added_tokens, list):
        raise ValueError("added_tokens is not a list")
    id_of_token = dict(vocab)
    for index, added in enumerate(added_tokens):
        label = f"added_tokens[{index}]"
        if not isinstance(added, dict) or not isinstance(added.get("content"), str):
            raise ValueError(f"{label} is not an object with a string `content`")
        token, token_id = added["content"], added.get("id")
        expected = id_of_token.setdefault(token, len(id_of_token))
        if type(token_id) is not int or token_id != expected:
            raise ValueError(
                f"{label} gives {token!r:.80} the id {token_id!r:.40}: tokenizers would give it {expected}"
            )
    return list(id_of_token)[len(vocab) :]
