"""Descriptors that the service manager passes to the process it starts, as sd_listen_fds(3) describes them.

They begin at descriptor 3; LISTEN_FDS counts them, LISTEN_FDNAMES names them (a socket unit's FileDescriptorName=, the
FDNAME= with which a descriptor was stored), and LISTEN_PID says whom they are for: a variable that a parent left in the
environment is not ours.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from engramd.errors import EngramdError

FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START
MAX_DESCRIPTORS = 4096
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


@dataclass(frozen=True)
class Passed:
    """One descriptor that now is ours to close; `name` is "" where the manager gives none."""

    descriptor: int
    name: str

    @property
    def is_socket(self) -> bool:
        return stat.S_ISSOCK(os.fstat(self.descriptor).st_mode)


def take() -> list[Passed]:
    """All descriptors, in order, closed on exec from here on. The variables are removed, so that neither a child nor a
    second call takes them again. Raises EngramdError where the variables contradict each other or the descriptors."""
    pid, count_text, names_text = (os.environ.pop(variable, "") for variable in _VARIABLES)
    if pid != str(os.getpid()):
        return []
    if not (count_text.isascii() and count_text.isdigit() and int(count_text[:9]) <= MAX_DESCRIPTORS):
        raise EngramdError(f"LISTEN_FDS={count_text[:60]!r} is not a number from 0 to {MAX_DESCRIPTORS}")
    count = int(count_text)
    names = names_text.split(":") if names_text else [""] * count
    if len(names) != count:
        raise EngramdError(f"LISTEN_FDNAMES has {len(names)} names for the {count} descriptors of LISTEN_FDS")
    passed = [Passed(FIRST_DESCRIPTOR + index, name) for index, name in enumerate(names)]
    for one in passed:
        try:
            os.set_inheritable(one.descriptor, False)
        except OSError as error:
            raise EngramdError(
                f"LISTEN_FDS={count}, but descriptor {one.descriptor} is not open: {error.strerror}"
            ) from None
    return passed
