"""What an operator sets for a plug-in, and the wait for a daemon that is not up yet.

Settings come from the environment (ENGRAMD_SOCKET and its siblings below), or from a mapping in the engine's own
configuration, which goes before it. Neither names a socket: the plug-in stays out of the engine's way.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import engram_client
from engram_client import Busy, Client, DaemonLost

logger = logging.getLogger(__name__)

_ENVIRONMENT_PREFIX = "ENGRAMD_"
_LONGEST_S = 86_400.0
_CHOICES = {"columns": ("contiguous", "strided"), "rows": ("auto", "mapped", "staged")}
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_REMINDER_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Each field can be set as ENGRAMD_<FIELD> in the environment, and by its name in the engine's configuration.

    socket: path of the daemon's socket. Rows travel through shared memory, so no other kind of address is taken.
    table: the table's name; None where the daemon serves a single one that has the model's layers.
    wait_s: how long the engine's start waits for a daemon that nobody answers for yet, in seconds.
    deadline_s: how long a step waits for its rows before it fails, in seconds.
    columns: which hash columns a tensor-parallel rank takes: "strided" spreads each n-gram order over all ranks,
        "contiguous" gives each rank neighbouring columns, as the engine itself does. Mapped rows are always so.
    rows: "mapped" where the daemon holds every layer resident, for the engine to read there; "staged" for each step;
        "auto" for mapped where that is possible at the start, else staged.
    """

    socket: str
    table: str | None = None
    wait_s: float = 300.0
    deadline_s: float = 30.0
    columns: str = "strided"
    rows: str = "auto"

    @classmethod
    def find(
        cls, options: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
    ) -> EngineSettings | None:
        """The settings, or None where neither `options` nor the environment names a socket.

        options: from the engine's configuration; its keys are the fields' names. environment: None is os.environ.
        Raises ValueError, which names the setting, its value and what it may be.
        """
        if environment is None:
            environment = os.environ
        names = [field.name for field in fields(cls)]
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"the engramd options must be a mapping of settings, not {options!r}")
        given: dict[str, tuple[str, Any]] = {}
        for name in names:
            variable = _ENVIRONMENT_PREFIX + name.upper()
            if environment.get(variable):
                given[name] = (variable, environment[variable])
        for name, value in (options or {}).items():
            if name not in names:
                raise ValueError(f"engramd option {name!r} is not known; there are {', '.join(names)}")
            if value is not None:
                given[name] = (f"engramd option {name}", value)
        if "socket" not in given:
            if options:
                raise ValueError("the engramd options name no socket: add one, or set ENGRAMD_SOCKET")
            return None
        return cls(**{name: _checked(name, *setting) for name, setting in given.items()})


def _checked(name: str, label: str, value: Any) -> Any:
    if name in ("wait_s", "deadline_s"):
        return _seconds(label, value, may_be_zero=name == "wait_s")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{label} is {value!r}: must be a text")
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ValueError(f"{label} is {value!r}: must be {' or '.join(map(repr, _CHOICES[name]))}")
    if name == "socket" and ("://" in value or value.startswith("ipc-control:")):
        raise ValueError(
            f"{label} is {value!r}: rows travel through shared memory, so it must be the path of the daemon's socket"
        )
    return value


def _seconds(label: str, value: Any, *, may_be_zero: bool) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (0 <= seconds <= _LONGEST_S) or (seconds == 0 and not may_be_zero):
        least = "0" if may_be_zero else "more than 0"
        raise ValueError(f"{label} is {value!r}: must be {least} to {_LONGEST_S:.0f} seconds")
    return seconds


def connect_when_up(
    settings: EngineSettings, *, name: str, connect: Callable[..., Client] = engram_client.connect
) -> Client:
    """A client of the daemon; waits up to settings.wait_s for one that is not up yet, or has no session left.

    name: what the daemon's log calls this client. Raises DaemonLost or Busy once the time is over.
    """
    began = time.monotonic()
    reminder_s = _REMINDER_S
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return connect(settings.socket, name=name)
        except (DaemonLost, Busy) as error:
            waited_s = time.monotonic() - began
            if waited_s >= settings.wait_s:
                raise type(error)(
                    f"{error} (waited {waited_s:.0f} s; {_ENVIRONMENT_PREFIX}WAIT_S sets how long the engine's start "
                    "waits for a daemon)"
                ) from error
            if waited_s >= reminder_s:
                logger.warning("waiting for the engramd daemon for %.0f s: %s", waited_s, error)
                reminder_s += _REMINDER_S
            time.sleep(min(pause_s, settings.wait_s - waited_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
