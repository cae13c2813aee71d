"""The arithmetic of question k: the best content in hindsight, and how much of a text it answers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench import warm_start
from bench.cache_quality import COLUMNS


def test_no_content_beats_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "FIRST_TOKENS", 4)
    ids = (np.random.default_rng(3).integers(0, 9, (31, len(COLUMNS))) ** 2 // 9).astype(np.int32)
    windows = warm_start.windows_of(ids)
    assert [window.tolist() for window in windows] == [
        sorted(set(ids[begin : begin + 4].ravel().tolist())) for begin in range(0, 28, 4)
    ]
    rows = 9
    for count in (1, 2, 4):
        best = warm_start.share_found(warm_start.best_content(windows, rows, count), windows, rows)
        others = [
            warm_start.share_found(np.array(content), windows, rows)
            for content in itertools.combinations(range(rows), count)
        ]
        assert best == max(others) > min(others)
    everything = warm_start.share_found(np.arange(rows), windows, rows)
    assert everything == pytest.approx(sum(window.size for window in windows) / (7 * 4 * len(COLUMNS)))
