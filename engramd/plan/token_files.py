"""Token files: documents of token ids, from arrays saved by numpy or from text that a tokenizer turns into ids.

| name ends in | content |
|---|---|
| `.npz` | array `tokens`, and `doc_lengths` where it holds several documents |
| `.npy` | one document's token ids |
| anything else | text in UTF-8, one document; needs the `tokenizers` package |
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engramd.errors import EngramdError

MAX_FILE_BYTES = 4 << 30
MAX_TOKENS = 1 << 31


@dataclass(frozen=True)
class Documents:
    """Token ids of all documents one behind the other: int64-compatible [tokens]; `starts` int64 [documents + 1]."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return self.starts.size - 1

    def chunks(self, longest: int) -> list[tuple[int, int, int]]:
        """(begin, end, document's begin) of pieces of at most `longest` tokens, none across two documents."""
        pieces = []
        for begin, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            pieces += [(at, min(at + longest, end), begin) for at in range(begin, end, longest)]
        return pieces

    def head(self, tokens: int) -> Documents:
        """The first so many tokens; the last document is cut."""
        ends = np.minimum(self.starts, tokens)
        return Documents(self.tokens[:tokens], np.unique(ends))


def load(paths: Sequence[str], tokenizer: str | None) -> Documents:
    """Reads token files in order. Raises EngramdError naming the file and what is wrong with it."""
    arrays: list[NDArray[Any]] = []
    lengths: list[NDArray[np.int64]] = []
    encoder: Any = None
    for path in paths:
        _check_size(path)
        if path.endswith((".npz", ".npy")):
            tokens, documents = _read_arrays(path)
        else:
            encoder = encoder or _open_tokenizer(tokenizer, path)
            tokens = np.array(_encode(encoder, path), dtype=np.int32)
            documents = np.array([tokens.size])
        arrays.append(tokens)
        lengths.append(documents.astype(np.int64))
    starts = np.zeros(sum(part.size for part in lengths) + 1, np.int64)
    np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]), out=starts[1:])
    if starts[-1] == 0:
        raise EngramdError(f"no tokens in {', '.join(paths) or 'the token files: name at least one'}")
    if starts[-1] > MAX_TOKENS:
        raise EngramdError(f"{starts[-1]} tokens, more than the {MAX_TOKENS} that are taken at once: name fewer files")
    return Documents(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), starts)


def _check_size(path: str) -> None:
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    if size > MAX_FILE_BYTES:
        raise EngramdError(f"{path}: {size} bytes, more than the {MAX_FILE_BYTES} that a token file may have")


def _read_arrays(path: str) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        found = np.load(path, allow_pickle=False)
        if path.endswith(".npy"):
            tokens, documents = found, np.array([found.size])
        else:
            with found:
                if "tokens" not in found:
                    raise EngramdError(f"{path}: holds {', '.join(found) or 'nothing'}, but no array named tokens")
                tokens = found["tokens"]
                documents = found["doc_lengths"] if "doc_lengths" in found else np.array([tokens.size])
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise EngramdError(f"{path}: not an array file that numpy reads: {error}") from None
    for name, array in (("tokens", tokens), ("doc_lengths", documents)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise EngramdError(f"{path}: {name} is {array.dtype} {list(array.shape)}; it must be integers [n]")
    if documents.size and (int(documents.min()) < 0 or int(documents.max()) > tokens.size):
        raise EngramdError(f"{path}: doc_lengths must lie in 0 .. {tokens.size}")
    if int(documents.sum(dtype=np.int64)) != tokens.size:
        raise EngramdError(
            f"{path}: doc_lengths add up to {documents.sum(dtype=np.int64)}, but there are {tokens.size} tokens"
        )
    return tokens, documents


def _open_tokenizer(tokenizer: str | None, path: str) -> Any:
    if tokenizer is None:
        raise EngramdError(f"{path}: a text needs a tokenizer: name its tokenizer.json with --tokenizer")
    try:
        import tokenizers
    except ImportError:
        raise EngramdError(
            f"{path}: a text needs the tokenizers package, which is not installed (pip install tokenizers); or save "
            "token ids as .npy with the tokenizer that you have"
        ) from None
    try:
        return tokenizers.Tokenizer.from_file(tokenizer)
    except Exception as error:  # noqa: BLE001 - the package raises Exception itself
        raise EngramdError(f"{tokenizer}: not a tokenizer.json: {error}") from None


def _encode(encoder: Any, path: str) -> list[int]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    return list(encoder.encode(text, add_special_tokens=False).ids)
