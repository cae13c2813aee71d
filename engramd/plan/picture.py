"""The curve as a picture, with the operating points marked. Needs matplotlib (`pip install engramd-server[plot]`)."""

from __future__ import annotations

import os
from typing import Any

from engramd.errors import EngramdError
from engramd.plan.report import Plan, by_class, cached_points
from engramd.sizes import format_size

FORMATS = (".png", ".svg", ".pdf")


def check(path: str) -> None:
    """Raises EngramdError where no picture can be made under that name: before any long work is done."""
    if not path.endswith(FORMATS):
        raise EngramdError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise EngramdError(
            f"{path}: pictures need matplotlib, which is not installed: pip install 'engramd-server[plot]'"
        ) from None


def draw(plan: Plan, path: str) -> None:
    """Writes the picture. Raises EngramdError."""
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curve, stream = plan.curve, plan.curve.stream
    figure: Any = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = cached_points(curve)
    sizes = [point.bytes / (1 << 30) for point in points]
    axes.plot(
        sizes,
        [100 * curve.hit_ratio(point.belady.second_half, second_half=True) for point in points],
        color="0.5",
        linestyle="--",
        label="Belady's limit",
    )
    axes.plot(
        sizes,
        [100 * curve.hit_ratio(point.ours.second_half, second_half=True) for point in points],
        color="black",
        linewidth=2.2,
        label="row cache, all rows",
    )
    for order, color in zip(sorted({c.order for c in stream.classes} - {0}), ("C0", "C1", "C2", "C3"), strict=False):
        axes.plot(
            sizes,
            [100 * by_class(curve, point.ours, "order")[str(order)] for point in points],
            color=color,
            linewidth=1.2,
            label=f"{order}-grams",
        )
    lines = []
    for number, need in enumerate([*plan.needs, *([plan.smallest] if plan.smallest else [])], 1):
        late = [str(step.layer) for step in need.steps if not step.fits]
        lines.append(
            f"{number}  {need.name}: --dram {format_size(need.dram_bytes)}, {100 * need.hit_ratio:.1f} % hits, "
            f"{need.iops / 1000:,.0f} k reads/s, " + (f"layer {' and '.join(late)} late" if late else "in time")
        )
        if need.bytes / (1 << 30) < sizes[0]:
            continue
        is_answer = need is plan.smallest
        axes.plot(
            [need.bytes / (1 << 30)],
            [100 * need.hit_ratio],
            marker="*" if is_answer else "o",
            markersize=15 if is_answer else 6,
            color="C3" if is_answer else "black",
            zorder=3,
        )
        axes.annotate(
            str(number),
            (need.bytes / (1 << 30), 100 * need.hit_ratio),
            textcoords="offset points",
            xytext=(0, -20 if is_answer else 8),
            ha="center",
            color="C3" if is_answer else "black",
        )
    axes.text(0.015, 0.02, "\n".join(lines), transform=axes.transAxes, fontsize=8, va="bottom", linespacing=1.4)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.set_xlabel("DRAM for rows, GiB")
    axes.set_ylabel("hit ratio, per cent")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", ncols=2, fontsize=9)
    axes.set_title(os.path.basename(stream.source), fontsize=10)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise EngramdError(f"{path}: cannot be written: {error.strerror}") from None
