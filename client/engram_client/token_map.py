"""The token map: token ids -> compressed ids.

Tokens that differ only in case, accents, width or white space share one compressed id, so that their n-grams share
rows. The rule is DeepSeek-V4.1's (`CompressedTokenizer` in deepseek-ai/Engram, engram_demo_v1.py):

1. text = the single token decoded, special tokens kept. Where it holds U+FFFD (the token is part of a character), the
   key is the token itself.
2. Otherwise the key is the text after NFKC, NFD, dropping marks (categories Mn, Mc, Me), lower case character by
   character, runs of space, tab, CR, LF -> one space, a lone space -> U+E000, strip, U+E000 -> space; where that is
   empty, the text.
3. Compressed ids are handed out in the order in which keys are first seen.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tokenizer_json import decode_token, read_tokens

_REPLACEMENT = "\ufffd"
_LONE_SPACE = "\ue000"
_SPACE_RUN = re.compile(r"[ \t\r\n]+")
# Unicode's White_Space property. str.strip() without an argument also takes U+001C .. U+001F, which lack it.
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_MARKS = frozenset({"Mn", "Mc", "Me"})


def normalize(text: str) -> str:
    """Step 2 above, without its last clause: may return an empty string."""
    if not text.isascii():  # ASCII is its own NFKC and NFD and holds no marks
        text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        text = "".join(c for c in text if unicodedata.category(c) not in _MARKS)
        # One at a time: str.lower() on a whole string gives a final sigma its own form.
        text = "".join([c.lower() for c in text])
    else:
        text = text.lower()
    text = _SPACE_RUN.sub(" ", text)
    if text == " ":
        text = _LONE_SPACE
    return text.strip(_WHITE_SPACE).replace(_LONE_SPACE, " ")


def compress(tokens: Iterable[tuple[str, str]]) -> NDArray[np.int32]:
    """Compressed ids of (token, text) pairs in order of their token ids -> int32 [vocab]."""
    compressed: dict[str, int] = {}
    ids = []
    for token, text in tokens:
        key = token if _REPLACEMENT in text else normalize(text) or text
        ids.append(compressed.setdefault(key, len(compressed)))
    return np.array(ids, dtype=np.int32)


def build_token_map(tokenizer: Any) -> NDArray[np.int32]:
    """The token map of a tokenizer -> int32 [vocab].

    tokenizer: the path (str or PathLike) of a byte-level tokenizer.json; a tokenizers.Tokenizer; or a transformers
    tokenizer. Raises OSError where the file cannot be read, ValueError where it or the tokenizer has no token for an id
    below its size, and TypeError for anything else.
    """
    if isinstance(tokenizer, str | os.PathLike):
        return compress((token, decode_token(token)) for token in read_tokens(tokenizer))
    return compress(_tokens_of_object(tokenizer))


def _tokens_of_object(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(token, text) of each id. Known by their methods, as neither package need be installed."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)  # of transformers' fast tokenizers
    if all(hasattr(backend, name) for name in ("get_vocab_size", "id_to_token", "decode")):
        for token_id in range(backend.get_vocab_size(with_added_tokens=True)):
            token = _checked_token(backend.id_to_token(token_id), token_id)
            yield token, backend.decode([token_id], skip_special_tokens=False)
    elif all(hasattr(tokenizer, name) for name in ("__len__", "convert_ids_to_tokens", "decode")):
        for token_id in range(len(tokenizer)):
            token = _checked_token(tokenizer.convert_ids_to_tokens(token_id), token_id)
            text = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            yield token, text
    else:
        raise TypeError(
            "tokenizer must be the path of a tokenizer.json, a tokenizers.Tokenizer or a transformers tokenizer, not "
            f"{type(tokenizer).__name__}"
        )


def _checked_token(token: object, token_id: int) -> str:
    if not isinstance(token, str):
        raise ValueError(f"the tokenizer has no token for id {token_id}: ids must run from 0 without a gap")
    return token
