"""What the daemon asks of the system for its own process: limits, kinds of pages, descriptors of its memory."""

from __future__ import annotations

import logging
import os
import resource

_LOG = logging.getLogger("engramd")


def page_size_note() -> str:
    """Which pages the row memory will get beyond what the engine reports, from the kernel's setting."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            return "4 KiB pages only" if "[never]" in file.read() else "transparent huge pages"
    except OSError:
        return "4 KiB pages only"


def raise_limits() -> None:
    """Lifts the soft limits on open files (several for each session) and locked memory (io_uring) to the hard ones."""
    for what, limit in (("open files", resource.RLIMIT_NOFILE), ("locked memory", resource.RLIMIT_MEMLOCK)):
        soft, hard = resource.getrlimit(limit)
        if soft != hard:
            try:
                resource.setrlimit(limit, (hard, hard))
            except (ValueError, OSError) as error:
                _LOG.warning("the limit on %s stays at %d: %s", what, soft, error)


def reopen(descriptor: int) -> int:
    """A read-only descriptor of the same memory, with an open file description that no two clients share."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
