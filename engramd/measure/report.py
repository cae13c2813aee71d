"""What every question prints: a case, our figure, the limit or peer of the same run, and their ratio with its spread.

Repetitions interleave: each one measures every side once, so that a drift of the machine touches both, and the ratio is
taken inside a repetition before the median is.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

REPETITIONS = 5


@dataclass
class Case:
    """One line: ours and limit are medians in `unit`; ratio is the median of per-repetition ratios, ours / limit."""

    name: str
    unit: str
    ours: float
    against: str
    limit: float
    ratio: float
    ratio_low: float
    ratio_high: float
    ratios: list[float]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Question:
    """A table. notes say what was measured and what could not be."""

    letter: str
    title: str
    cases: list[Case] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)
        progress(text)

    def add(self, name: str, unit: str, ours: list[float], against: str, limit: list[float], **extra: Any) -> None:
        """Adds a case from one figure of each side for each repetition."""
        ratios = [a / b if b else float("nan") for a, b in zip(ours, limit, strict=True)]
        case = Case(
            name,
            unit,
            statistics.median(ours),
            against,
            statistics.median(limit),
            statistics.median(ratios),
            min(ratios),
            max(ratios),
            ratios,
            extra,
        )
        self.cases.append(case)
        progress(line(case))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        width = max([len(case.name) for case in self.cases], default=0)
        peer = max([len(case.against) for case in self.cases], default=0)
        rows = [f"{self.letter}. {self.title}"]
        rows += [line(case, width, peer) for case in self.cases]
        rows += [f"  note: {note}" for note in self.notes]
        return "\n".join(rows)


def line(case: Case, width: int = 0, peer_width: int = 0) -> str:
    extra = "".join(f"; {key} {_shown(value)}" for key, value in case.extra.items())
    return (
        f"  {case.name:<{width}}  {_shown(case.ours):>9} {case.unit}  against {case.against:<{peer_width}} "
        f"{_shown(case.limit):>9}  ratio {case.ratio:.3f} ({case.ratio_low:.3f} .. {case.ratio_high:.3f}){extra}"
    )


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def interleave(sides: Mapping[str, Callable[[int], float]], repetitions: int = REPETITIONS) -> dict[str, list[float]]:
    """Calls every side once for each repetition, with the repetition's number; the order turns round each time."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for repetition in range(repetitions):
        for name in names if repetition % 2 == 0 else reversed(names):
            figures[name].append(sides[name](repetition))
    return figures


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
