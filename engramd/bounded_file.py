"""Files that are read whole, up to a size that no honest one has."""

from __future__ import annotations

from engramd.errors import EngramdError


def read_at_most(path: str, max_bytes: int, consequence: str = "") -> bytes:
    """The whole file. Raises EngramdError, naming the path, where it cannot be read or is larger than max_bytes, with
    what follows from that (`consequence`)."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise EngramdError(f"{path}: larger than {max_bytes} bytes{consequence}")
    return data
