"""What a DRAM size means for a decode step and for the drive, and the smallest size that meets a target.

The model, per layer with a table: a step asks for rows = tokens in the step x columns. The heads of one n-gram order
are hot or cold together, so misses come in groups of `heads`: their mean is the sum over orders of
tokens x heads x miss ratio, their variance the sum of tokens x heads^2 x miss ratio x (1 - miss ratio), and the 99th
percentile is taken from the normal distribution. A step's reads are queued at once: they take the latency of one read
plus the time that the drive needs for all of them, both stretched by 1 / (1 - load) for the other traffic. The rows
must be there when their layer begins: a step's time spreads evenly over the model's layers, so layer L has L / layers
of it. What takes longer stops the step: exposed time. Steps that grow ask for less, so the load is that of the tokens a
second that are reached, which the load in turn decides: the point where both agree is looked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engramd.plan.assumptions import Assumptions
from engramd.plan.curve import Curve

P99_SIGMAS = 2.326
SEARCH_STEPS = 400
BISECTIONS = 24


@dataclass(frozen=True)
class LayerStep:
    """One layer in one decode step; times in microseconds. exposed_us: the mean time by which the step grows."""

    layer: int
    rows: float
    reads: float
    reads_p99: float
    usual_us: float
    p99_us: float
    budget_us: float
    exposed_us: float

    @property
    def fits(self) -> bool:
        return self.p99_us <= self.budget_us


@dataclass(frozen=True)
class Need:
    """A DRAM size at the assumed traffic. bytes: of rows; dram_bytes: `--dram`. rows_per_s, iops and load (share of the
    drive's IOPS): at the tokens a second that are asked for. tokens_per_s: what steps with their exposed time and the
    drive allow, at most what is asked for; steps: at that rate."""

    name: str
    bytes: int
    dram_bytes: int
    hit_ratio: float
    rows_per_s: float
    iops: float
    load: float
    steps: tuple[LayerStep, ...]
    tokens_per_s: float
    tokens_per_s_per_user: float

    @property
    def p99_us(self) -> float:
        return max((step.p99_us for step in self.steps), default=0.0)


@dataclass(frozen=True)
class Target:
    """tokens_per_s for all users, of which `loss` (a share) may go to steps that wait for rows; p99_us for any layer's
    rows in a step (None: no limit but the loss)."""

    tokens_per_s: float
    loss: float
    p99_us: float | None


class Planner:
    """Needs of one curve under some assumptions."""

    def __init__(self, curve: Curve, assumptions: Assumptions) -> None:
        self._curve = curve
        self._assumptions = assumptions
        # A layer that a recording never saw asked for says nothing about a step.
        asked = zip(curve.stream.classes, curve.lookups, strict=True)
        self._layers = sorted({column.layer for column, lookups in asked if lookups > 0})
        self._sizes = np.array([math.log2(point.bytes) for point in curve.points])
        self._dram = np.array([point.dram_bytes for point in curve.points], dtype=np.float64)
        # Misses of the warm second half, by point and class.
        lookups = np.maximum(curve.second_half_lookups, 1e-9)
        self._ratios = np.array([np.minimum(1.0, point.ours.second_half / lookups) for point in curve.points])
        shares = curve.lookups / max(1e-9, float(curve.lookups.sum()))
        self._shares: NDArray[np.float64] = shares

    def ratios_at(self, row_bytes: float) -> NDArray[np.float64]:
        """Miss ratio of each class with so many bytes of rows in DRAM; 1 with none, 0 where all are there. Between two
        points of the curve along the logarithm of the size; below the first in proportion to the size."""
        stream = self._curve.stream
        if row_bytes >= stream.table_bytes:
            return np.zeros(len(stream.classes))
        smallest = self._curve.points[0].bytes
        if row_bytes < smallest:
            share = max(0.0, row_bytes / smallest)
            return np.asarray(1.0 - share * (1.0 - self._ratios[0]))
        at = math.log2(row_bytes)
        return np.array([np.interp(at, self._sizes, self._ratios[:, index]) for index in range(len(stream.classes))])

    def need(self, name: str, row_bytes: int) -> Need:
        """What happens with so many bytes of rows in DRAM."""
        given, stream = self._assumptions, self._curve.stream
        ratios = self.ratios_at(row_bytes)
        miss_ratio = float((ratios * self._shares).sum())
        rows_per_s = given.traffic.tokens_per_s * self._rows_per_token
        iops = rows_per_s * miss_ratio
        load = iops / given.drive.iops
        step_us = given.traffic.step_ms * 1000
        share, steps = self._reached(ratios, load)
        exposed_us = sum(step.exposed_us for step in steps)
        per_user = given.traffic.tokens_per_step / (step_us + exposed_us) * 1e6
        dram = float(np.interp(row_bytes, [0.0, *(2.0**self._sizes)], [0.0, *self._dram]))
        if row_bytes >= stream.table_bytes:
            dram = stream.table_bytes  # all rows are resident, without an index
        return Need(
            name=name,
            bytes=row_bytes,
            dram_bytes=math.ceil(dram),
            hit_ratio=1.0 - miss_ratio,
            rows_per_s=rows_per_s,
            iops=iops,
            load=load,
            steps=steps,
            tokens_per_s=given.traffic.tokens_per_s * share,
            tokens_per_s_per_user=per_user,
        )

    def _reached(self, ratios: NDArray[np.float64], load: float) -> tuple[float, tuple[LayerStep, ...]]:
        """The share of the tokens a second asked for that is reached, and the steps at that rate. load: of the drive
        at the rate asked for."""
        given = self._assumptions
        step_us = given.traffic.step_ms * 1000

        def steps_at(share: float) -> tuple[LayerStep, ...]:
            return tuple(self._step(layer, ratios, share * load) for layer in self._layers)

        def allowed(share: float) -> float:
            return step_us / (step_us + sum(step.exposed_us for step in steps_at(share)))

        high = min(1.0, given.drive.utilisation / load) if load > 0 else 1.0
        if allowed(high) >= high:
            return high, steps_at(high)
        low = 0.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if allowed(middle) >= middle else (low, middle)
        return low, steps_at(low)

    @property
    def _rows_per_token(self) -> float:
        """Rows that a token asks for: one of each column where the hash is known."""
        stream = self._curve.stream
        return stream.all_lookups / stream.tokens if stream.tokens else float(len(stream.classes))

    def _step(self, layer: int, ratios: NDArray[np.float64], load: float) -> LayerStep:
        """load: of the drive, below 1."""
        load = min(load, 0.99)
        given, stream = self._assumptions, self._curve.stream
        tokens = given.traffic.concurrency * given.traffic.tokens_per_step
        mean = variance = rows = 0.0
        orders = {column.order for column in stream.classes if column.layer == layer}
        for order in sorted(orders):
            mine = [i for i, column in enumerate(stream.classes) if (column.layer, column.order) == (layer, order)]
            ratio = float(ratios[mine].mean())
            rows += tokens * len(mine)
            mean += tokens * len(mine) * ratio
            variance += tokens * len(mine) ** 2 * ratio * (1 - ratio)
        p99 = min(rows, mean + P99_SIGMAS * math.sqrt(variance))
        base = given.host.round_trip_us + rows * given.host.row_us
        base += rows * stream.row_bytes / (given.host.pcie_gb_per_s * 1e3)
        per_read = 1e6 / given.drive.iops

        def total(reads: float, latency_us: float) -> float:
            return base + min(1.0, reads) * (latency_us + reads * per_read) / (1 - load)

        usual, slow = total(mean, given.drive.read_us), total(p99, given.drive.p99_us)
        budget = given.traffic.step_ms * 1000 * min(layer, given.model.layers) / given.model.layers
        return LayerStep(layer, rows, mean, p99, usual, slow, budget, max(0.0, usual - budget))

    def meets(self, need: Need, target: Target) -> list[str]:
        """Why a size does not meet the target; empty where it does."""
        problems = []
        if need.load > self._assumptions.drive.utilisation:
            problems.append(
                f"{need.iops:,.0f} reads a second are more than {self._assumptions.drive.utilisation:.0%} of the "
                f"drive's {self._assumptions.drive.iops:,.0f}"
            )
        elif need.tokens_per_s < target.tokens_per_s * (1 - target.loss):
            problems.append(f"late rows leave {need.tokens_per_s:,.0f} of {target.tokens_per_s:,.0f} tokens a second")
        if target.p99_us is not None:
            problems += [
                f"layer {step.layer}: p99 {step.p99_us:,.0f} us of {target.p99_us:,.0f} us"
                for step in need.steps
                if step.p99_us > target.p99_us
            ]
        return problems

    def smallest(self, target: Target) -> tuple[Need | None, list[str]]:
        """The smallest size that meets the target, or None with what fails even with all rows in DRAM."""
        table = self._curve.stream.table_bytes
        low = self._curve.points[0].bytes
        sizes = [0, *(round(low * (table / low) ** (i / SEARCH_STEPS)) for i in range(SEARCH_STEPS + 1))]
        for size in sizes:
            need = self.need("smallest for the target", size)
            if not self.meets(need, target):
                return need, []
        return None, self.meets(self.need("all DRAM", table), target)
