"""Which rows of a table are to live in DRAM, as an operator wants it: a tier for the table, another for single layers.

    [[table]]
    path = "/data/flash"
    tier = "cached"           # auto, resident, cached
    dram_share = 0.5          # of `dram`, for a cache of its cached layers' own
    [[table.layer]]
    layer = 14
    tier = "resident"

What a policy means for memory is decided by the engine, under the budget (native/engine/placement_plan.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engramd.errors import EngramdError
from engramd.options import Check, choice, share

TIERS = ("auto", "resident", "cached")
MIN_SHARE = 0.001


@dataclass(frozen=True)
class LayerPolicy:
    """resident_layout: how rows lie in memory where they are resident. dram_share: of the budget, for the cache named
    by `cache` (a table, or a table and a layer); None: the common cache."""

    tier: str = "auto"
    dram_share: float | None = None
    cache: str = ""
    resident_layout: str = "packed"


@dataclass(frozen=True)
class TierPolicy:
    """A table's policy, and those of the layers that have one of their own."""

    table: LayerPolicy = LayerPolicy()
    layers: tuple[tuple[int, LayerPolicy], ...] = ()

    def of(self, layer: int) -> LayerPolicy:
        return dict(self.layers).get(layer, self.table)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each cache of its own, by the cache's name."""
        policies = [self.table, *(policy for _, policy in self.layers)]
        return {policy.cache: policy.dram_share for policy in policies if policy.dram_share is not None}

    def __str__(self) -> str:
        return ", ".join(
            [_as_text(self.table), *(f"layer {layer} {_as_text(policy)}" for layer, policy in self.layers)]
        )

    def as_json(self) -> dict[str, Any]:
        """As the file would have it."""
        shown = _as_json(self.table)
        if self.layers:
            shown["layer"] = [{"layer": layer, **_as_json(policy)} for layer, policy in self.layers]
        return shown


def _as_text(policy: LayerPolicy) -> str:
    share_text = f" ({policy.dram_share:g} of dram)" if policy.dram_share is not None else ""
    return policy.tier + share_text + (", split" if policy.resident_layout == "split" else "")


def _as_json(policy: LayerPolicy) -> dict[str, Any]:
    shown: dict[str, Any] = {"tier": policy.tier, "resident_layout": policy.resident_layout}
    return shown if policy.dram_share is None else {**shown, "dram_share": policy.dram_share}


# The keys of a table's and of a layer's entry, with what passes.
KEYS: dict[str, Check] = {
    "tier": choice(*TIERS),
    "dram_share": share(MIN_SHARE),
    "resident_layout": choice("packed", "split"),
}


def read_policy(
    name: str, entry: dict[str, Any], where: Callable[..., str], layer_entries: list[tuple[int, dict[str, Any]]]
) -> TierPolicy:
    """The checked policy of a table called `name` from its entry and the entries of its layers. Raises EngramdError.

    where(key, layer=number): the place of a key of the table, or of its layer entry of that number (from 1)."""
    table = _read(LayerPolicy(), name, entry, where)
    layers: list[tuple[int, LayerPolicy]] = []
    for number, (layer, layer_entry) in enumerate(layer_entries, start=1):
        if any(layer == other for other, _ in layers):
            raise EngramdError(f"{where('layer', layer=number)}: layer {layer} has two entries")
        keeps_rows = layer_entry.get("tier") == "resident"
        inherited = replace(table, dram_share=None, cache="") if keeps_rows else table
        in_layer = partial(where, layer=number)
        layers.append((layer, _read(inherited, f"{name} layer {layer}", layer_entry, in_layer)))
    return TierPolicy(table, tuple(layers))


def _read(inherited: LayerPolicy, cache: str, entry: dict[str, Any], where: Callable[..., str]) -> LayerPolicy:
    values = {key: check.convert(entry[key], where(key)) for key, check in KEYS.items() if key in entry}
    if "dram_share" in values:
        values["cache"] = cache
    policy = replace(inherited, **values)
    if policy.tier == "resident" and policy.dram_share is not None:
        raise EngramdError(
            f"{where('dram_share' if 'dram_share' in entry else 'tier')}: a resident layer has all its rows in DRAM "
            "and takes no share of a cache: drop one of the two"
        )
    return policy


def check_shares(policies: list[TierPolicy]) -> None:
    """Raises EngramdError where the shares of all tables exceed the budget."""
    shares: dict[str, float] = {}
    for policy in policies:
        shares.update(policy.shares)
    if sum(shares.values()) > 1:
        listed = ", ".join(f"{cache}: {value:g}" for cache, value in shares.items())
        raise EngramdError(f"the shares of dram add up to {sum(shares.values()):g}, more than all of it ({listed})")
