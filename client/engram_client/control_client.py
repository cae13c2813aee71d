"""ControlClient: a client over ZeroMQ, for where memory cannot be shared."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from .client import Client
from .control import ControlChannel
from .control_table import ControlTable
from .curve import CurveKeys
from .errors import EngramError
from .layer import LayerInfo, check_identity, check_wish, select_layer

LOCAL_PREFIX = "ipc-control:"


class ControlClient(Client):
    """See Client. `target` is "tcp://host:port" or "ipc-control:PATH"."""

    def __init__(self, target: str, timeout: float, keys: CurveKeys | None) -> None:
        if target.startswith(LOCAL_PREFIX):
            self._endpoint = "ipc://" + target.removeprefix(LOCAL_PREFIX)
        elif target.startswith("tcp://"):
            self._endpoint = target
        else:
            raise ValueError(f"target must be a socket path, tcp://host:port or {LOCAL_PREFIX}PATH, not {target!r}")
        self.target = target
        self._timeout = timeout
        self._closed = False
        self._keys = keys
        self.channel = ControlChannel(self._endpoint, target, keys)
        self.max_ticket_rows = 0
        self._start_counting()
        self.layers()
        _clients.add(self)

    def layers(self) -> list[LayerInfo]:
        """What the daemon serves now."""
        reply = self.channel.call("tables", timeout=self._timeout)[0]
        try:
            self.max_ticket_rows = _integer(reply["max_fetch_rows"], 1)
            return [_layer_info(entry) for entry in reply["tables"]]
        except (KeyError, TypeError, ValueError) as error:
            raise EngramError(f"{self.target}: the list of tables is malformed: {error!r}") from error

    def table(self, name: str | None = None, layer: int | None = None, identity: str | None = None) -> ControlTable:
        name, layer, identity = check_wish(name, layer, identity)
        return ControlTable(self, select_layer(self.layers(), name, layer, identity, self.target), identity)

    def stats(self, *, timeout: float | None = 5.0) -> dict[str, Any]:
        return self.channel.stats(timeout)

    def counters(self) -> dict[str, int]:
        with self._counters_lock:
            return dict(self._counters)

    def count(self, **amounts: int) -> None:
        """Adds to the counters of that name."""
        with self._counters_lock:
            for name, amount in amounts.items():
                self._counters[name] += amount

    def close(self) -> None:
        self._closed = True
        self.channel.close()

    def _start_counting(self) -> None:
        self._counters_lock = threading.Lock()
        names = ("requests", "failed_requests", "rows", "reply_bytes", "wait_ns", "copy_ns")
        self._counters = dict.fromkeys(names, 0)

    def _start_over_in_child(self) -> None:
        self._start_counting()
        closed = self.channel.is_closed
        self.channel = ControlChannel(self._endpoint, self.target, self._keys)
        self.channel.is_closed = closed


def _integer(value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no integer from {least} on")
    return value


def _layer_info(entry: Any) -> LayerInfo:
    info = LayerInfo(
        name=str(entry["name"]),
        layer=_integer(entry["layer"], 0),
        rows=_integer(entry["rows"], 0),
        row_bytes=_integer(entry["row_bytes"], 1),
        value_bytes=_integer(entry["value_bytes"], 1),
        generation=_integer(entry["generation"], 0),
        identity=check_identity(str(entry["identity"])),
        head_sizes=tuple(_integer(size, 0) for size in entry["head_sizes"]),
    )
    if info.value_bytes > info.row_bytes:
        raise ValueError(f"value_bytes {info.value_bytes} is more than row_bytes {info.row_bytes}")
    return info


_clients: weakref.WeakSet[ControlClient] = weakref.WeakSet()


def _start_over_in_child() -> None:
    for client in list(_clients):
        client._start_over_in_child()


os.register_at_fork(after_in_child=_start_over_in_child)
