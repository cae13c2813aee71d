"""The control protocol's frames: limits on what is unpacked, typed access to a request's fields, replies.

A request is hostile until `parse_request` returned: docs/protocol.md lists the limits.
"""

from __future__ import annotations

from typing import Any

import msgpack

VERSION = 1
MAX_HEADER_BYTES = 64 << 10
MAX_TEXT_BYTES = 4096
MAX_ENTRIES = 64
MAX_DEPTH = 8
MAX_FRAMES = 3
MAX_BULK_BYTES = 16 << 20  # ids and rows of one request
_NESTING = (dict, list)


class NoReply(Exception):
    """The request has no id that can be read, so nobody can be answered."""


class RequestError(Exception):
    """The request fails: `kind` is the client's error class, `details` further fields of the reply."""

    def __init__(self, kind: str, text: str, **details: int) -> None:
        super().__init__(text)
        self.kind = kind
        self.details = details


class Request:
    """One request's fields. The accessors raise RequestError naming the field."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self.id = fields["id"]
        self.verb = ""

    def text(self, key: str) -> str:
        """A required text."""
        value = self._fields.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def text_or_none(self, key: str) -> str | None:
        """A text, or None where it is missing or nil."""
        return None if self._fields.get(key) is None else self.text(key)

    def integer(self, key: str, minimum: int, maximum: int, default: int | None = None) -> int:
        """An integer in a range; `default` where it is missing or nil."""
        value = self._fields.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not minimum <= value <= maximum:
            raise self._wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def one_of(self, key: str, allowed: tuple[int, ...]) -> int:
        """A required integer out of a few."""
        value = self._fields.get(key)
        if type(value) is not int or value not in allowed:
            raise self._wrong(key, " or ".join(map(str, allowed)))
        return value

    def choice(self, key: str, choices: dict[str, int], default: str) -> int:
        """One of some words, as the number that stands for it."""
        value = self._fields.get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self._wrong(key, f"one of {', '.join(choices)}")
        return choices[value]

    def _wrong(self, key: str, expected: str) -> RequestError:
        found = repr(self._fields[key])[:60] if key in self._fields else "missing"
        return RequestError("EngramError", f"{self.verb or 'request'}: field {key!r} is {found}; it must be {expected}")


def parse_request(frame: bytes) -> Request:
    """The request in a first frame. Raises NoReply, or RequestError (whose `request_id` is the id to answer)."""
    if len(frame) > MAX_HEADER_BYTES:
        raise NoReply(f"first frame of {len(frame)} bytes; the limit is {MAX_HEADER_BYTES}")
    try:
        fields = msgpack.unpackb(
            frame,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=MAX_TEXT_BYTES,
            max_array_len=MAX_ENTRIES,
            max_map_len=MAX_ENTRIES,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        # msgpack's own errors are of these three kinds: StackError and FormatError are ValueErrors.
        raise NoReply(f"not a msgpack map within the limits: {type(error).__name__} {error}") from None
    if not isinstance(fields, dict) or "id" not in fields:
        raise NoReply("not a map with an id")
    if _depth(fields, MAX_DEPTH) > MAX_DEPTH:
        raise NoReply(f"nested more than {MAX_DEPTH} deep")
    return Request(fields)


def check_request(request: Request) -> None:
    """Fills in `request.verb`. Raises RequestError where version or verb are not to be had."""
    version = request.integer("v", 0, 1 << 31)
    if version != VERSION:
        raise RequestError(
            "EngramError", f"control protocol version {version}, but this daemon speaks version {VERSION} only"
        )
    request.verb = request.text("verb")


def reply_ok(request: Request, **fields: Any) -> bytes:
    """The first frame of a reply."""
    return bytes(msgpack.packb({"id": request.id, "ok": True, **fields}))


def reply_error(request: Request, error: RequestError) -> bytes:
    """The only frame of a reply that says what failed."""
    return bytes(
        msgpack.packb({"id": request.id, "ok": False, "error": error.kind, "text": str(error), **error.details})
    )


def _depth(value: Any, limit: int) -> int:
    """Nesting of maps and arrays, counted up to limit + 1."""
    if limit < 0 or not isinstance(value, _NESTING):
        return 0
    children = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(child, limit - 1) for child in children if isinstance(child, _NESTING)), default=0)
