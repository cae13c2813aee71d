"""Resident rows that outlive the daemon: the service manager keeps their memory over a restart, and the next daemon
serves from it without reading the drive.

At the end the daemon hands the memory of each layer that is resident and checked to the manager's descriptor store
(sd_pid_notify_with_fds(3), FDSTORE=1); the next daemon finds it among its LISTEN_FDS. A name says which layer it is
meant for. Whether it really holds these rows the memory itself says: it is sealed against writes of others since before
the first row was in it, its trailer names table, generation, layer and layout, and each page is checked against the
digest that was taken when its rows had just passed their checksums (native/engine/resident_rows.h). Until a page has
been checked its rows come from the drive. So nothing is believed that could have changed, and the check costs a pass at
the speed of memory rather than of the drive.
"""

from __future__ import annotations

import logging
import os

from engramd.daemon import notify
from engramd.daemon.engine import Engine
from engramd.errors import EngramdError
from engramd.listen_fds import Passed

PREFIX = "engramd-resident-"
_LOG = logging.getLogger("engramd")


def name_of(table_id: bytes, generation: int, layer: int) -> str:
    """The name in the manager's store of a layer's memory."""
    return f"{PREFIX}{table_id.hex()}-{generation}-{layer}"


class KeptMemory:
    """Descriptors of an earlier daemon's resident rows. Owns those that are its own by their names."""

    def __init__(self, passed: list[Passed]) -> None:
        self._descriptors: dict[str, int] = {}
        for one in passed:
            if one.is_socket or not one.name.startswith(PREFIX):
                continue
            if one.name in self._descriptors:
                os.close(one.descriptor)
            else:
                self._descriptors[one.name] = one.descriptor

    def of(self, table_id: bytes, generation: int, layer: int) -> int | None:
        """The descriptor that may hold a layer's rows; stays owned here."""
        return self._descriptors.get(name_of(table_id, generation, layer))

    def close(self) -> None:
        """Gives them up, here and in the manager's store: from now on their memory is that of whoever took them over,
        and what nobody took returns to the system. May be called twice."""
        for name, descriptor in self._descriptors.items():
            os.close(descriptor)
            notify.notify("FDSTOREREMOVE=1", f"FDNAME={name}")
        self._descriptors = {}


def keep(engine: Engine) -> None:
    """Hands the memory of all layers that are resident and checked to the service manager, where there is one."""
    if not notify.is_managed():
        return
    kept = 0
    for layer in engine.layers:
        try:
            _, descriptor = engine.map_layer(layer.handle)
        except EngramdError:
            continue  # cached, or not all there yet
        manifest = layer.table.manifest
        name = name_of(bytes(manifest.table_id), manifest.generation, layer.layer)
        try:
            kept += notify.store_descriptor(descriptor, name)
        finally:
            os.close(descriptor)
    if kept:
        # A manager that has no store, or no room in it, has closed them: then the next daemon reads the drive.
        notify.wait_until_taken()
        _LOG.info("%d resident layers are left to the service manager for the next daemon", kept)
