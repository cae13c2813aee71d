"""Opens packed tables for serving: manifest and data files, nothing read through.

`pack` may replace the generation between the reading of the manifest and the opening of its files. A missing file
therefore means: read the manifest again, once. From then on the open descriptors keep the generation.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import dataclass, field

from engramd.config import TablePath
from engramd.errors import EngramdError
from engramd.table import manifest as table_manifest
from engramd.table.manifest import DataFile, Manifest
from engramd.tier_policy import TierPolicy

_LOG = logging.getLogger("engramd")


@dataclass
class ServedTable:
    """A table with its data files open: `descriptors` has one tuple for each layer of the manifest, in its order."""

    name: str
    manifest: Manifest
    descriptors: list[tuple[int, ...]]
    policy: TierPolicy = field(default_factory=TierPolicy)

    @property
    def layers(self) -> list[int]:
        return [layer.layer for layer in self.manifest.layers]

    def close(self) -> None:
        """Closes the data files; the engine has its own descriptors of them."""
        for descriptors in self.descriptors:
            for descriptor in descriptors:
                os.close(descriptor)
        self.descriptors = []


def open_tables(paths: tuple[TablePath, ...]) -> list[ServedTable]:
    """Opens all of them or raises EngramdError, with none left open."""
    tables: list[ServedTable] = []
    try:
        for path in paths:
            tables.append(open_table(path))
    except BaseException:
        for table in tables:
            table.close()
        raise
    return tables


def open_table(path: TablePath) -> ServedTable:
    """Opens one table. Raises EngramdError naming the table and what is wrong with it."""
    for attempt in range(2):
        manifest = table_manifest.load(path.path, check_files=False)
        table = ServedTable(path.name, manifest, [], path.policy)
        check_policy(path.name, path.policy, table.layers)
        try:
            for layer in manifest.layers:
                opened: list[int] = []
                table.descriptors.append(())
                for file in layer.files:
                    opened.append(_open_data_file(file))
                    table.descriptors[-1] = tuple(opened)
            return table
        except FileNotFoundError as error:
            table.close()
            if attempt == 1:
                raise EngramdError(
                    f"{error.filename}: the manifest of {path.path} names this data file, but it is not there; "
                    "pack the table again or copy the file"
                ) from None
        except BaseException:
            table.close()
            raise
    raise AssertionError("unreachable")


def check_policy(name: str, policy: TierPolicy, layers: list[int]) -> None:
    """Raises EngramdError where a policy speaks of a layer that the table does not have."""
    for layer, _ in policy.layers:
        if layer not in layers:
            raise EngramdError(
                f"table {name} has no layer {layer} to give a tier to, only {', '.join(map(str, layers))}"
            )


def _open_data_file(file: DataFile) -> int:
    """A read-only O_DIRECT descriptor of a data file of the right size. FileNotFoundError is left to the caller."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        found = os.stat(file.path)  # first, since opening a fifo would wait for its writer
        if not stat.S_ISREG(found.st_mode):
            raise EngramdError(f"{file.path}: not a regular file")
        try:
            descriptor = os.open(file.path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _LOG.warning(
                "%s: its file system refuses O_DIRECT; pages are read through the page cache, which costs memory "
                "outside the DRAM budget",
                file.path,
            )
            descriptor = os.open(file.path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EngramdError(f"{file.path}: cannot be opened: {error.strerror}") from None
    size = os.fstat(descriptor).st_size
    if size != file.bytes:
        os.close(descriptor)
        raise EngramdError(
            f"{file.path}: {size} bytes, but its pages take {file.bytes}: the table is damaged or half copied; "
            "pack or copy it again"
        )
    return descriptor
