"""The curve as a picture, with the operating points marked. Needs matplotlib (`pip install engramd-server[plot]`)."""

from __future__ import annotations

import os
from typing import Any

from engramd.errors import EngramdError
from engramd.plan.report import Plan, by_class
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
    sizes = [point.bytes / (1 << 30) for point in curve.points]
    axes.plot(
        sizes,
        [100 * curve.hit_ratio(point.belady.second_half, second_half=True) for point in curve.points],
        color="0.5",
        linestyle="--",
        label="Belady's limit",
    )
    axes.plot(
        sizes,
        [100 * curve.hit_ratio(point.ours.second_half, second_half=True) for point in curve.points],
        color="black",
        linewidth=2.2,
        label="row cache, all rows",
    )
    for order, color in zip(sorted({c.order for c in stream.classes} - {0}), ("C0", "C1", "C2", "C3"), strict=False):
        axes.plot(
            sizes,
            [100 * by_class(curve, point.ours, "order")[str(order)] for point in curve.points],
            color=color,
            linewidth=1.2,
            label=f"{order}-grams",
        )
    marked = [need for need in (*plan.needs, plan.smallest) if need is not None and sizes[0] <= need.bytes / (1 << 30)]
    for need in marked:
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
            f"{need.name}\n{format_size(need.dram_bytes)}, {need.iops / 1000:,.0f} k reads/s",
            (need.bytes / (1 << 30), 100 * need.hit_ratio),
            textcoords="offset points",
            xytext=(6, 12 if is_answer else -24),
            fontsize=8,
            color="C3" if is_answer else "black",
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.set_xlabel("DRAM for rows, GiB")
    axes.set_ylabel("hit ratio, per cent")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)
    axes.set_title(os.path.basename(stream.source), fontsize=10)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise EngramdError(f"{path}: cannot be written: {error.strerror}") from None
