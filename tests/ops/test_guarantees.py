"""docs/guarantees.md names a test for each promise; this holds it to tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def test_every_test_that_a_promise_names_is_there() -> None:
    text = (CHECKOUT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (CHECKOUT / "tests").rglob("test_*.py"))
    functions = set(re.findall(r"`(test_\w+)`", text))
    paths = set(re.findall(r"`((?:tests|native)/[\w/.]+)", text))
    assert functions
    assert paths
    assert [name for name in functions if f"def {name}(" not in sources] == []
    assert [path for path in paths if not (CHECKOUT / path).exists()] == []


def test_every_promise_names_what_shows_it() -> None:
    text = (CHECKOUT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    _, *parts = text.split("| promise | shown by |\n|---|---|\n")
    rows = [row for part in parts for row in part.split("\n\n")[0].splitlines()]
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"(`|the same).*\|$", row.split(" | ")[-1])] == []
