"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.conftest import DEADLINE_S


def eventually(
    condition: Callable[[], bool], otherwise: Callable[[], str] = lambda: "the condition never came true"
) -> None:
    """Returns once the condition holds; fails with `otherwise` where it does not within DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.01)
