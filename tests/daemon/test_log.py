"""The bound on repeated log lines."""

from __future__ import annotations

import logging

import pytest

from engramd.daemon.log import LIMIT, WINDOW_S, RepeatLimit


def test_lines_of_one_kind_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    limit = RepeatLimit()

    def passes(text: str, argument: int) -> str | None:
        record = logging.LogRecord("engramd", logging.WARNING, "", 0, text, (argument,), None)
        return record.getMessage() if limit.filter(record) else None

    lines = [passes("client %d", number) for number in range(LIMIT + 7)]
    assert lines[LIMIT - 1] == f"client {LIMIT - 1}"
    assert lines[LIMIT:] == [None] * 7
    assert passes("other %d", 1) == "other 1"
    now += WINDOW_S
    assert passes("client %d", 5) == "client 5 (7 more like it were left out)"
    assert passes("client %d", 6) == "client 6"
