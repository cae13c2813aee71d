"""Checks of fields in JSON that nobody vouches for: presence, type, range, pattern."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from engramd.errors import EngramdError


class FieldChecks:
    """Checks of one file's fields. Each returns the checked value or raises an EngramdError that names file and field
    and ends in the way out. where: the place of `table` in the file, "" or ending in a dot."""

    def __init__(self, path: str, way_out: str) -> None:
        self.path = path
        self.way_out = way_out

    def refuse(self, why: str) -> NoReturn:
        raise EngramdError(f"{self.path}: {why}; {self.way_out}")

    def field(self, table: Any, key: str, where: str = "") -> Any:
        name = f"{where}{key}"
        if not isinstance(table, dict):
            self.refuse(f"{where.rstrip('.') or 'its content'} is not an object")
        if key not in table:
            self.refuse(f"{name} is missing")
        return table[key]

    def integer(self, table: Any, key: str, low: int, high: int, where: str = "") -> int:
        value = self.field(table, key, where)
        if type(value) is not int or not low <= value <= high:
            self.refuse(f"{where}{key} is {short(value)}, not an integer from {low} to {high}")
        return int(value)

    def text(self, table: Any, key: str, pattern: re.Pattern[str] | None, where: str = "", limit: int = 4096) -> str:
        value = self.field(table, key, where)
        if not isinstance(value, str) or len(value) > limit or (pattern and not pattern.fullmatch(value)):
            self.refuse(f"{where}{key} is {short(value)}, not what the format asks for")
        return value

    def array(self, table: Any, key: str, low: int, high: int, where: str = "") -> list[Any]:
        value = self.field(table, key, where)
        if not isinstance(value, list) or not low <= len(value) <= high:
            self.refuse(f"{where}{key} is not a list of {low} to {high} entries")
        return value

    def exact(self, found: Any, expected: Any, what: str) -> None:
        if type(found) is not type(expected) or found != expected:
            self.refuse(f"{what} is {short(found)}, but it must be {short(expected)}")


def short(value: Any) -> str:
    """A value as an error shows it, 80 characters at most."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
