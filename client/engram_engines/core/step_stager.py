"""StepStager: the rows of one engine step, layer by layer, from row ids on the host.

A step's ids go out as one submission a layer (more where a layer's rows do not fit one reply), the first layer first,
and layers complete apart: an engine waits for layer 1 at once and for layer 14 when its decoder arrives there. Whatever
goes wrong raises, and with it the step: rows are never missing or zero in silence.

Where rows go is a LayerTarget's business. ArenaTarget leaves them in the session's reply arena; engines bring targets
that copy them to a device.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engram_client import Busy, EngramError, Table, Ticket
from engram_client.arrays import Ids, Layout
from engram_client.context import Releasable


class Pending(Protocol):
    """A batch on its way, as Ticket and DeviceTicket are."""

    def wait(self, timeout: float | None = None) -> Any:
        """The rows, or what the target made of them. Raises RequestTimeout, DaemonLost, PageCorrupt, ReadFailed."""

    def release(self) -> None:
        """Gives its room back; harmless twice."""


class LayerTarget(ABC):
    """Where one layer's rows go. Used by one thread at a time.

    max_rows: most rows of one submission.
    """

    max_rows: int

    @abstractmethod
    def submit(self, ids: Ids, first_token: int) -> Pending:
        """Asks for ids int [tokens, columns] of the step's tokens from first_token on.

        Raises Busy where there is no room before an earlier batch is released.
        """

    def reclaim(self) -> None:  # noqa: B027 - most targets have nothing to wait for
        """Waits until the room of earlier, completed batches is free again."""


class ArenaTarget(LayerTarget):
    """Rows stay in the reply arena: a part's rows are the views that Ticket.wait() returns.

    layout: "packed" gives uint8 [tokens, columns, row_bytes], "split" a pair of values and scales.
    """

    def __init__(self, table: Table, max_ticket_rows: int, layout: Layout = "packed") -> None:
        self.max_rows = max_ticket_rows
        self._submit = table.submit
        self._layout = layout

    def submit(self, ids: Ids, first_token: int) -> Ticket:
        return self._submit(ids, layout=self._layout, on_full="busy")


@dataclass(slots=True)
class StageCounters:
    """Sums over steps. Seconds are the host's: `store_wait_s` it waited for the daemon, by layer; `ids_wait_s` for ids,
    which contains all that the device had to do before, and is added by whoever brings the ids to the host."""

    steps: int = 0
    failed_steps: int = 0
    tokens: int = 0
    rows: int = 0
    submissions: int = 0
    ids_wait_s: float = 0.0
    store_wait_s: list[float] = field(default_factory=list)


class Part:
    """Rows of neighbouring tokens of one layer: those of tokens first_token .. first_token + tokens - 1."""

    __slots__ = ("first_token", "pending", "position", "rows", "tokens")

    def __init__(self, pending: Pending, position: int, first_token: int, tokens: int) -> None:
        self.pending = pending
        self.position = position
        self.first_token = first_token
        self.tokens = tokens
        self.rows: Any = None


class Step(Releasable):
    """One step's batches, from StepStager.begin() to release(). A context manager that releases at its end.

    Layers are completed in any order, each once, by parts() or finish(). After an error the step is over: what is on
    its way is given up, and further calls raise EngramError.
    """

    __slots__ = ("_deadline", "_ids", "_in_flight", "_is_over", "_stager", "_unsent")

    def __init__(self, stager: StepStager, ids: Any, deadline: float) -> None:
        self._stager = stager
        self._ids = ids
        self._deadline = deadline
        self._unsent = stager._cut(ids.shape[0])
        self._in_flight: list[deque[Part]] = [deque() for _ in stager._targets]
        self._is_over = False
        self._guarded_fill()

    def parts(self, position: int) -> Iterator[Part]:
        """The parts of the layer at this position, in the order of their tokens, each once its rows are there.

        A part's rows are valid until the iteration goes on. Raises RequestTimeout at the step's deadline, and what
        Ticket.wait() raises; the step is over then.
        """
        counters = self._stager.counters
        waiting = self._in_flight[position]
        while True:
            if self._is_over:
                raise EngramError("this step has failed or was released: stage it again")
            if not waiting and not self._send_for(position):
                return
            part = waiting[0]
            began = time.perf_counter()
            try:
                part.rows = part.pending.wait(max(0.0, self._deadline - time.monotonic()))
                counters.store_wait_s[position] += time.perf_counter() - began
                yield part
            except BaseException as error:
                self._fail(error)
                raise
            waiting.popleft()
            part.pending.release()
            if self._unsent:
                self._guarded_fill()

    def finish(self, position: int) -> None:
        """Completes a layer whose target has put the rows where they belong. Raises as parts() does."""
        for _ in self.parts(position):
            pass

    def release(self) -> None:
        """Gives up what is not completed. Harmless twice."""
        self._is_over = True
        self._unsent.clear()
        for waiting in self._in_flight:
            while waiting:
                waiting.popleft().pending.release()

    def _guarded_fill(self) -> None:
        try:
            self._fill()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self._stager.counters.failed_steps += 1
        self.release()

    def _fill(self) -> None:
        """Submits what there is room for, in order: all of the first layer before any of the next."""
        stager = self._stager
        unsent = self._unsent
        while unsent:
            position, first, tokens = unsent[0]
            selected = self._ids[first : first + tokens, stager._layers[position]]
            if stager._columns is not None:
                selected = selected[:, stager._columns]
            try:
                pending = stager._targets[position].submit(selected, first)
            except Busy:
                if any(self._in_flight):
                    return  # goes on when a part of this step is released
                for target in stager._targets:
                    target.reclaim()
                pending = stager._targets[position].submit(selected, first)
            unsent.popleft()
            self._in_flight[position].append(Part(pending, position, first, tokens))
            stager.counters.submissions += 1
            stager.counters.rows += selected.size

    def _send_for(self, position: int) -> bool:
        """Sends what this layer still has to send, in its turn; False where there is nothing."""
        if not any(unsent[0] == position for unsent in self._unsent):
            return False
        for other, waiting in enumerate(self._in_flight):
            if other != position and waiting:
                raise EngramError(
                    f"layer {position} of the step waits for room that parts of layer {other} hold: complete layers in "
                    "the order in which they were given"
                )
        self._guarded_fill()
        return bool(self._in_flight[position])


class StepStager:
    """Stages step after step of one rank. One thread at a time.

    targets: one for each layer, in the order in which the model needs them. layers: their places in the ids' second
    dimension. columns: which of the ids' last dimension this rank asks for (see engram_client.cuda.rank_columns); None
    for all. total_columns: the ids' last dimension. deadline_s: longest time of a step, in seconds.
    """

    def __init__(
        self,
        targets: Sequence[LayerTarget],
        layers: Sequence[int],
        total_columns: int,
        *,
        columns: slice | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        if not targets or len(targets) != len(layers):
            raise ValueError(
                f"{len(targets)} targets and {len(layers)} layers: there must be as many, and at least one"
            )
        own_columns = total_columns if columns is None else len(range(*columns.indices(total_columns)))
        if own_columns < 1:
            raise ValueError(f"columns {columns} select none of {total_columns}")
        self.counters = StageCounters(store_wait_s=[0.0] * len(targets))
        self._targets = list(targets)
        self._layers = list(layers)
        self._shape = (max(layers) + 1, total_columns)
        self._columns = columns
        self._deadline_s = deadline_s
        self._part_tokens = [target.max_rows // own_columns for target in targets]
        if min(self._part_tokens) < 1:
            raise ValueError(
                f"a reply holds {min(target.max_rows for target in targets)} rows, but one token asks for "
                f"{own_columns}: give the daemon a larger --arena"
            )

    def begin(self, ids: Any) -> Step:
        """Sends a step's ids, int32 or int64 [tokens, layers, columns] on the host, real tokens only.

        Padding is left out by passing a shorter array; a row id of -1 inside is answered with zeros and read nowhere.
        The ids must stay as they are until the step's last part is sent: until finish() of the last layer.
        Raises RowIdError, Busy, DaemonLost, TableMismatch, and ValueError for another shape.
        """
        if ids.ndim != 3 or ids.shape[1] < self._shape[0] or ids.shape[2] != self._shape[1]:
            raise ValueError(
                f"a step's ids have the shape [tokens, {self._shape[0]} or more layers, {self._shape[1]} columns], "
                f"not {tuple(ids.shape)}"
            )
        step = Step(self, ids, time.monotonic() + self._deadline_s)
        self.counters.steps += 1
        self.counters.tokens += ids.shape[0]
        return step

    def _cut(self, tokens: int) -> deque[tuple[int, int, int]]:
        """(position, first token, tokens) of each submission."""
        return deque(
            (position, first, min(most, tokens - first))
            for position, most in enumerate(self._part_tokens)
            for first in range(0, tokens, most)
        )
