"""JSON from files that nobody vouches for: duplicate keys, NaN, infinities, huge integers and deep nesting are refused.

Also the canonical form that checksums and identities are taken over.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from engramd.errors import EngramdError

MAX_INTEGER_DIGITS = 20


def loads(data: bytes, what: str) -> Any:
    """The value of UTF-8 JSON text; `what` names the text in errors. Raises EngramdError."""

    def refuse(why: str) -> NoReturn:
        raise EngramdError(f"{what}: {why}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    refuse(f"the key {key[:200]!r} occurs twice")
                seen.add(key)
        return found

    def integer(text: str) -> int:
        if len(text) > MAX_INTEGER_DIGITS:
            refuse(f"integer of {len(text)} digits {text[:24]}... (the limit is {MAX_INTEGER_DIGITS})")
        return int(text)

    def real(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            refuse(f"number out of range: {text[:24]}")
        return value

    def constant(text: str) -> NoReturn:
        refuse(f"{text} is not JSON")

    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_int=integer,
            parse_float=real,
            parse_constant=constant,
        )
    except UnicodeDecodeError as error:
        raise EngramdError(f"{what}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise EngramdError(f"{what}: not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise EngramdError(f"{what}: nested too deeply") from None


def canonical(value: Any) -> bytes:
    """The canonical JSON of a value: keys sorted, no spaces, ASCII escapes, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
