"""A plan as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from engramd.plan.assumptions import Assumptions
from engramd.plan.cost import Cost
from engramd.plan.curve import Curve, Misses, Point
from engramd.plan.needs import Need, Target
from engramd.sizes import format_size

FEW_SAMPLES = 100_000


@dataclass(frozen=True)
class Plan:
    """Everything that `engramd plan` found. needs: named operating points, `smallest` None where none meets target."""

    curve: Curve
    assumptions: Assumptions
    target: Target
    needs: tuple[Need, ...]
    smallest: Need | None
    problems: tuple[str, ...]
    costs: tuple[Cost, ...]


def cached_points(curve: Curve) -> list[Point]:
    """The points below the whole table, which is resident where the budget covers it: nothing is missed then."""
    return [point for point in curve.points if point.rows < curve.stream.rows] or list(curve.points)


def by_class(curve: Curve, misses: Misses, attribute: str) -> dict[str, float]:
    """Hit ratios of the warm second half by layer, order or head; without classes that the stream does not know, or
    never looks up."""
    values = sorted({getattr(column, attribute) for column in curve.stream.classes})
    ratios = {}
    for value in values:
        select = np.array([getattr(column, attribute) == value for column in curve.stream.classes])
        if curve.lookups[select].any():
            ratios[str(value)] = curve.hit_ratio(misses.second_half, second_half=True, select=select)
    return ratios if attribute == "layer" or values != [0] else {}


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; docs/sizing.md explains the fields."""
    curve, stream = plan.curve, plan.curve.stream
    return {
        "source": stream.source,
        "tokens": stream.tokens,
        "lookups": stream.all_lookups,
        "sampled": int(stream.keys.size),
        "rate": stream.rate,
        "row_bytes": stream.row_bytes,
        "table_bytes": stream.table_bytes,
        "curve": [
            {
                "bytes": point.bytes,
                "rows": point.rows,
                "dram_bytes": point.dram_bytes,
                "hit_ratio": curve.hit_ratio(point.ours.second_half, second_half=True),
                "hit_ratio_whole": curve.hit_ratio(point.ours.whole, second_half=False),
                "belady": curve.hit_ratio(point.belady.second_half, second_half=True),
                "belady_whole": curve.hit_ratio(point.belady.whole, second_half=False),
                "by_order": by_class(curve, point.ours, "order"),
                "by_layer": by_class(curve, point.ours, "layer"),
                "belady_by_order": by_class(curve, point.belady, "order"),
                "belady_by_layer": by_class(curve, point.belady, "layer"),
            }
            for point in curve.points
        ],
        "target": asdict(plan.target),
        "needs": [_need_json(need) for need in plan.needs],
        "smallest": _need_json(plan.smallest) if plan.smallest else None,
        "problems": list(plan.problems),
        "cost": [{**asdict(cost), "tokens_per_dollar": cost.tokens_per_dollar} for cost in plan.costs],
        "assumptions": asdict(plan.assumptions),
    }


def _need_json(need: Need) -> dict[str, Any]:
    fields = asdict(need)
    for step, entry in zip(need.steps, fields["steps"], strict=True):
        entry["fits"] = step.fits
    return fields


def as_text(plan: Plan) -> str:
    """The plan for people."""
    lines = [*_head(plan), "", *_curve(plan), "", *_needs(plan), "", *_smallest(plan), "", *_costs(plan), ""]
    return "\n".join([*lines, *_assumptions(plan.assumptions)])


def _head(plan: Plan) -> list[str]:
    stream = plan.curve.stream
    share = "all of them" if stream.rate == 1 else f"one row in {1 / stream.rate:.0f}"
    return [
        f"stream    {stream.source}: {stream.all_lookups:,} look-ups, {stream.keys.size:,} simulated ({share})",
        f"tables    {stream.rows:,} rows of {stream.row_bytes} B, {format_size(stream.table_bytes)}",
    ]


def _curve(plan: Plan) -> list[str]:
    curve = plan.curve
    orders = sorted({column.order for column in curve.stream.classes} - {0})
    layers = sorted({column.layer for column in curve.stream.classes})
    header = ["rows' bytes", "--dram", "hits", "Belady", "cold", "Belady"]
    header += [f"{order}-gram" for order in orders] + [f"layer {layer}" for layer in layers]
    rows = []
    for point in cached_points(curve):
        of_orders, of_layers = by_class(curve, point.ours, "order"), by_class(curve, point.ours, "layer")
        ratios = [
            curve.hit_ratio(point.ours.second_half, second_half=True),
            curve.hit_ratio(point.belady.second_half, second_half=True),
            curve.hit_ratio(point.ours.whole, second_half=False),
            curve.hit_ratio(point.belady.whole, second_half=False),
            *(of_orders.get(str(order)) for order in orders),
            *(of_layers.get(str(layer)) for layer in layers),
        ]
        shown = ["-" if ratio is None else f"{100 * ratio:.2f}" for ratio in ratios]
        rows.append([format_size(point.bytes), format_size(point.dram_bytes), *shown])
    notes = []
    full = [point for point in curve.points if point.ours.whole.sum() <= 1.001 * curve.points[-1].ours.whole.sum()]
    if full and full[0].rows < curve.stream.rows:
        first_looks = 100 * (1 - curve.hit_ratio(curve.points[-1].ours.whole, second_half=False))
        notes.append(
            f"From {format_size(full[0].bytes)} on nothing is evicted: what misses ({first_looks:.1f} % of all) is "
            "looked up for the first time, and a longer stream would hit more."
        )
    if curve.stream.rate < 1 and curve.stream.keys.size < FEW_SAMPLES:
        notes.append(
            f"Only {curve.stream.keys.size:,} look-ups are in the sample, so that a ratio may be a point or two off: "
            "take more tokens, or record for longer or at a higher --rate."
        )
    notes.append(f"From --dram {format_size(curve.stream.table_bytes)} on all rows are resident: nothing misses.")
    return [
        "Hit ratio in per cent by DRAM: of the stream's second half, warmed by the first; `cold`: of the whole stream",
        "from an empty cache; Belady's limit beside each. `--dram` is what the rows take with index and queues.",
        *aligned(header, rows),
        *notes,
    ]


def _needs(plan: Plan) -> list[str]:
    layers = [step.layer for step in plan.needs[0].steps] if plan.needs else []
    header = ["", "--dram", "hits %", "rows/s", "reads/s", "drive %", "tokens/s", "a user"]
    for layer in layers:
        header += [f"L{layer} reads", "usual us", "p99 us", "budget us", ""]
    rows = []
    for need in [*plan.needs, *([plan.smallest] if plan.smallest else [])]:
        row = [
            need.name,
            format_size(need.dram_bytes),
            f"{100 * need.hit_ratio:.2f}",
            f"{need.rows_per_s:,.0f}",
            f"{need.iops:,.0f}",
            f"{100 * need.load:.0f}",
            f"{need.tokens_per_s:,.0f}",
            f"{need.tokens_per_s_per_user:.1f}",
        ]
        for step in need.steps:
            row += [
                f"{step.reads:,.0f}",
                f"{step.usual_us:,.0f}",
                f"{step.p99_us:,.0f}",
                f"{step.budget_us:,.0f}",
                "fits" if step.fits else "late",
            ]
        rows.append(row)
    traffic = plan.assumptions.traffic
    return [
        f"At {traffic.tokens_per_s:,.0f} tokens/s in all, decode steps of {traffic.concurrency:g} sequences x "
        f"{traffic.tokens_per_step:g} tokens every {traffic.step_ms:.2f} ms.",
        "A layer's rows must be there when it begins (budget); what comes later stops the step.",
        *aligned(header, rows),
    ]


def _smallest(plan: Plan) -> list[str]:
    target = plan.target
    what = f"{target.tokens_per_s:,.0f} tokens/s, at most {100 * target.loss:g} % of them lost to late rows"
    what += f" and p99 within {target.p99_us:,.0f} us" if target.p99_us is not None else ""
    what += f", on {plan.assumptions.drive.name}"
    if plan.smallest is None:
        return [f"No DRAM size is enough for {what}; with all rows in DRAM: {'; '.join(plan.problems)}"]
    need = plan.smallest
    size = "no DRAM at all" if need.bytes == 0 else f"--dram {format_size(need.dram_bytes)}"
    return [f"The smallest for {what}: {size} ({100 * need.hit_ratio:.1f} % hits, {need.iops:,.0f} reads/s)"]


def _costs(plan: Plan) -> list[str]:
    rows = [
        [
            cost.name,
            f"{cost.dram_gib:,.1f}",
            f"{cost.drives:g}",
            f"{cost.hardware:,.0f}",
            f"{cost.per_hour:,.2f}",
            f"{cost.tokens_per_s:,.0f}",
            "measured" if cost.measured else "estimated",
            f"{cost.tokens_per_dollar / 1e6:,.2f} M",
        ]
        for cost in plan.costs
    ]
    header = ["", "DRAM GiB", "drives", "hardware $", "$ an hour", "tokens/s", "", "tokens per $"]
    return aligned(header, rows)


def _assumptions(assumptions: Assumptions) -> list[str]:
    lines = ["Assumptions (change them with --assumptions FILE.toml):"]
    for section, values in asdict(assumptions).items():
        lines.append(f"  [{section}] " + ", ".join(f"{key} = {_toml(value)}" for key, value in values.items()))
    return lines


def _toml(value: float | str) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if value < 1e6 else f"{value:.0f}"


def aligned(header: list[str], rows: list[list[str]]) -> list[str]:
    """Columns as wide as their widest cell; the first is left-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
