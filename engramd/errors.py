"""The error that a person can act on. The command line prints its text as one line and exits with status 1."""

from __future__ import annotations


class EngramdError(Exception):
    """Something outside the program is wrong: a file, a table, an argument, a full disk.

    The text names the thing, the value, the limit and the way out, in one line.
    """


def one_line(error: BaseException) -> str:
    """The text of an error on one line, without control characters (file names and JSON keys may hold any)."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))
