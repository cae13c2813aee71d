"""A running daemon's own miss-ratio curve, as `engramd stats --mrc` shows it."""

from __future__ import annotations

from typing import Any

from engramd.errors import EngramdError
from engramd.plan.curve import budget_for
from engramd.sizes import format_size


def checked(curve: Any, path: str) -> dict[str, Any]:
    """The daemon's answer. Raises EngramdError where it has no curve."""
    if not isinstance(curve, dict):
        raise EngramdError(f"the daemon at {path} answers without a curve: it is of an earlier version")
    if not curve["points"]:
        raise EngramdError(
            f"the daemon at {path} follows no miss curve: it was started with --miss-curve off, or its tables have too "
            "few rows to be sampled"
        )
    return curve


def as_json(curve: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Adds to each point the `--dram` that its rows need, and what happened since an earlier answer of the same
    daemon: `recent_lookups` and `recent_hit_ratio`."""
    if earlier and (earlier["lookups"] > curve["lookups"] or len(earlier["points"]) != len(curve["points"])):
        earlier = None  # the curve has begun anew since
    recent = curve["lookups"] - (earlier["lookups"] if earlier else 0)
    points = []
    for index, point in enumerate(curve["points"]):
        misses = point["misses"] - (earlier["points"][index]["misses"] if earlier else 0)
        points.append(
            {
                **point,
                "dram_bytes": budget_for(point["rows"], round(point["bytes"] / max(1, point["rows"]))),
                "recent_hit_ratio": max(0.0, 1.0 - misses / recent) if recent > 0 else None,
            }
        )
    return {"lookups": curve["lookups"], "recent_lookups": recent, "lost": curve["lost"], "points": points}


def report(curve: dict[str, Any], budget_bytes: int) -> str:
    """The curve as text; an arrow stands at the point nearest above the daemon's budget."""
    lines = [
        f"{curve['lookups']:,} rows looked up since the start, {curve['recent_lookups']:,} since the last report; "
        f"hit ratios of row caches of other sizes, from samples",
        "",
        "  rows' bytes    --dram   hit ratio      recent     sampled",
    ]
    here = next((point for point in curve["points"] if point["dram_bytes"] >= budget_bytes), None)
    for point in curve["points"]:
        lines.append(
            f"  {format_size(point['bytes']):>11} {format_size(point['dram_bytes']):>10} "
            f"{_ratio(point['hit_ratio'])} {_ratio(point['recent_hit_ratio'])} {point['sampled']:>11,}"
            + ("  <- first above this daemon's budget" if point is here else "")
        )
    if curve["lost"]:
        lines.append(f"{curve['lost']:,} samples came too fast to be seen: the ratios are too high by what they missed")
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return f"{'-':>11}" if value is None else f"{100 * value:>9.2f} %"
