"""What a plan assumes about the model's steps, the traffic, the drive, the host and the prices.

Read from TOML with one table for each class below; whatever is left out keeps its default, and every value is printed
with the result. docs/sizing.md says where the defaults come from.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from typing import Any

from engramd.bounded_file import read_at_most
from engramd.errors import EngramdError

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Model:
    """layers: decoder layers of the model, over which a step's time spreads evenly."""

    layers: float = 40


@dataclass(frozen=True)
class Traffic:
    """tokens_per_s: of all users, prefill and decode together, whose rows must come from DRAM or drive.
    concurrency: sequences in one decode step. tokens_per_s_per_user: what a user sees, which fixes the step's time.
    tokens_per_step: tokens of one sequence in a step, more than 1 where drafts are verified."""

    tokens_per_s: float = 14_000
    concurrency: float = 64
    tokens_per_s_per_user: float = 125
    tokens_per_step: float = 1

    @property
    def step_ms(self) -> float:
        return 1000 * self.tokens_per_step / self.tokens_per_s_per_user


@dataclass(frozen=True)
class Drive:
    """iops: random 4 KiB reads a second, of all drives of the server together. read_us: one read's usual latency on a
    drive with room, p99_us its 99th percentile. utilisation: the share of iops that may be planned with."""

    name: str = "a data-centre NVMe drive (PCIe 4)"
    iops: float = 1_000_000
    read_us: float = 90
    p99_us: float = 200
    utilisation: float = 0.7


@dataclass(frozen=True)
class Host:
    """round_trip_us: of an empty request. row_us: to gather a row from DRAM. pcie_gb_per_s: the copy to the device."""

    round_trip_us: float = 10
    row_us: float = 0.08
    pcie_gb_per_s: float = 20


@dataclass(frozen=True)
class Prices:
    """Dollars. server: a whole server without this DRAM and these drives, GPUs included, bought and kept for
    lifetime_years; utilisation: the share of that time in which it serves. drives: the number of them."""

    server: float = 300_000
    dram_per_gib: float = 10
    drive: float = 400
    drives: float = 1
    lifetime_years: float = 4
    watts: float = 10_000
    dram_watts_per_gib: float = 0.1
    per_kwh: float = 0.12
    utilisation: float = 1.0


@dataclass(frozen=True)
class Rates:
    """Tokens a second measured for an arrangement; 0 = none measured: the plan's own estimate is used."""

    all_dram: float = 0
    tiered: float = 0
    ssd_only: float = 0


@dataclass(frozen=True)
class Assumptions:
    """All of them, checked."""

    model: Model = field(default_factory=Model)
    traffic: Traffic = field(default_factory=Traffic)
    drive: Drive = field(default_factory=Drive)
    host: Host = field(default_factory=Host)
    prices: Prices = field(default_factory=Prices)
    rates: Rates = field(default_factory=Rates)

    def with_values(self, section: str, **values: float | str | None) -> Assumptions:
        """A copy with some values of a section replaced; None keeps the value. Raises EngramdError."""
        given = {key: value for key, value in values.items() if value is not None}
        old = getattr(self, section)
        return replace(self, **{section: replace(old, **_checked(given, old, f"{section}"))})


_MAY_BE_ZERO = {"rates", "prices"}


def _checked(values: dict[str, Any], section: Any, where: str) -> dict[str, Any]:
    known = {entry.name: getattr(section, entry.name) for entry in fields(section)}
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise EngramdError(f"{where}.{key}: unknown (known: {', '.join(known)})")
        if isinstance(known[key], str):
            if not isinstance(value, str):
                raise EngramdError(f"{where}.{key}: {value!r} is not a text")
            found[key] = value
            continue
        minimum = 0.0 if where.split(": ")[-1] in _MAY_BE_ZERO and key != "lifetime_years" else 1e-9
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= 1e15:
            raise EngramdError(f"{where}.{key}: {value!r} is not a number {'from 0' if minimum == 0 else 'above 0'}")
        if key == "utilisation" and not 0 < value <= 1:
            raise EngramdError(f"{where}.{key}: {value!r} is a share, above 0 and at most 1")
        found[key] = float(value)
    return found


def load(path: str | None) -> Assumptions:
    """The file's values over the defaults. Raises EngramdError naming file, key and value."""
    assumptions = Assumptions()
    if path is None:
        return assumptions
    data = read_at_most(path, MAX_FILE_BYTES)
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise EngramdError(f"{path}: not a TOML file: {error or 'nested too deeply'}") from None
    sections = {entry.name: getattr(assumptions, entry.name) for entry in fields(assumptions)}
    changed: dict[str, Any] = {}
    for name, values in document.items():
        if name not in sections or not isinstance(values, dict):
            raise EngramdError(f"{path}: {name}: not a table of assumptions (known: {', '.join(sections)})")
        changed[name] = replace(sections[name], **_checked(values, sections[name], f"{path}: {name}"))
    return replace(assumptions, **changed)
