"""Tokens per dollar of three arrangements: all rows in DRAM, some of them, none."""

from __future__ import annotations

from dataclasses import dataclass

from engramd.plan.assumptions import Assumptions
from engramd.plan.needs import Need

HOURS_A_YEAR = 8766.0


@dataclass(frozen=True)
class Cost:
    """One arrangement. per_hour in dollars over the server's life; measured: whether tokens_per_s was given."""

    name: str
    dram_gib: float
    drives: float
    hardware: float
    per_hour: float
    tokens_per_s: float
    measured: bool

    @property
    def tokens_per_dollar(self) -> float:
        return self.tokens_per_s * 3600 / self.per_hour


def costs(needs: dict[str, Need], assumptions: Assumptions) -> list[Cost]:
    """Costs of `all_dram`, `tiered`, `ssd_only`, as far as they are in `needs`."""
    prices, rates = assumptions.prices, assumptions.rates
    table = []
    for key, name in (("all_dram", "all DRAM"), ("tiered", "tiered"), ("ssd_only", "SSD only")):
        if key not in needs:
            continue
        need = needs[key]
        gib = need.dram_bytes / (1 << 30)
        drives = 0.0 if key == "all_dram" else prices.drives
        hardware = prices.server + gib * prices.dram_per_gib + drives * prices.drive
        kilowatts = (prices.watts + gib * prices.dram_watts_per_gib) / 1000
        hours = prices.lifetime_years * HOURS_A_YEAR * prices.utilisation
        per_hour = hardware / hours + kilowatts * prices.per_kwh
        given = getattr(rates, key)
        table.append(Cost(name, gib, drives, hardware, per_hour, given or need.tokens_per_s, bool(given)))
    return table
