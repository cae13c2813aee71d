"""Class shapes: what fits passes, each kind of difference is named."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from engram_engines.core import ClassShape, EngineMismatch, check_shapes


class Embedding:
    def lookup(self, indices: Any, out: Any) -> None: ...


def helper(value: int) -> int:
    return value


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("an_engine")
    vars(made).update(
        Embedding=Embedding,
        helper=helper,
        kernel=SimpleNamespace(fn=helper, __call__=None),
        LIMIT=3,
    )
    monkeypatch.setitem(sys.modules, "an_engine", made)
    return made


SHAPES = [
    ClassShape("an_engine", "Embedding", {"lookup": ("self", "indices", "out")}),
    ClassShape("an_engine", functions={"helper": ("value",), "kernel": ("value",)}, constants=("LIMIT",)),
]


def check() -> None:
    check_shapes("anEngine", "2.0", "1.x", SHAPES)


def test_what_fits(module: ModuleType) -> None:
    check()


def test_a_changed_signature(module: ModuleType) -> None:
    class Changed:
        def lookup(self, indices: Any) -> None: ...

    vars(module)["Embedding"] = Changed
    with pytest.raises(
        EngineMismatch, match=r"knows anEngine 1\.x, but this anEngine 2\.0 .*lookup takes \(self, indices\), not"
    ):
        check()


def test_what_is_gone(module: ModuleType) -> None:
    del vars(module)["helper"], vars(module)["LIMIT"]
    with pytest.raises(EngineMismatch, match=r"an_engine has no LIMIT; an_engine has no helper\(\)"):
        check()
    del vars(module)["Embedding"]
    with pytest.raises(EngineMismatch, match=r"there is no class an_engine\.Embedding"):
        check()


def test_an_inherited_method_does_not_count(module: ModuleType) -> None:
    class Renamed(Embedding):
        def look_up(self, indices: Any, out: Any) -> None: ...

    vars(module)["Embedding"] = Renamed
    with pytest.raises(EngineMismatch, match=r"has no lookup\(\)"):
        check()


def test_a_module_that_moved() -> None:
    with pytest.raises(EngineMismatch, match="module an_engine_that_is_not_there cannot be imported"):
        check_shapes("anEngine", "2.0", "1.x", [ClassShape("an_engine_that_is_not_there")])
