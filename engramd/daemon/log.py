"""The daemon's log: lines on stderr, and a bound on what clients can make it write."""

from __future__ import annotations

import json
import logging
import sys
import time

LIMIT = 50  # lines of one kind
WINDOW_S = 10.0
CONTEXT = ("session", "request", "uid")  # passed as `extra` to a logging call
LOGGER = logging.getLogger("engramd")


class RepeatLimit(logging.Filter):
    """Lets LIMIT lines of one kind (one format text) pass in each WINDOW_S; the next one says how many are missing.

    Without it, a client that breaks the protocol in a loop would fill the disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, tuple[float, int]] = {}  # as many as there are logging calls in the program

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        began, count = self._kinds.get(record.msg, (now, 0))
        if now - began >= WINDOW_S:
            left_out = count - LIMIT
            self._kinds[record.msg] = (now, 1)
            if left_out > 0:
                record.msg = f"{record.msg} ({left_out} more like it were left out)"
            return True
        self._kinds[record.msg] = (began, count + 1)
        return count < LIMIT


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, message, and where known session, request and uid; `trace` of an
    exception."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in CONTEXT if hasattr(record, name)}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


_HANDLER = logging.StreamHandler(sys.stderr)
_HANDLER.addFilter(RepeatLimit())


def set_up(level: str, style: str) -> None:
    """Sends the daemon's log to stderr, from this level on, as `text` or `json`. May be called again to change both."""
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    _HANDLER.setFormatter(JsonFormatter() if style == "json" else text)
    LOGGER.addHandler(_HANDLER)
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False
