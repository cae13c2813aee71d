"""Prefetch at arrival: the rows of a queued prompt are read into DRAM while the prompt still waits for its turn.

A prompt's tokens are known when it arrives, and its row ids follow from them on the CPU. A scheduler tells an
ArrivalPrefetcher which prompts arrive, how far each has got and which have gone; a thread of its own hashes them in
small pieces and hands the ids to the daemon's `prefetch`, which reads behind all demand. Nothing here is needed for a
correct answer: whatever fails is counted and logged, and never reaches the scheduler.

What is asked for is bounded three ways. A prompt is prefetched for `window_tokens` ahead of where its processing
stands, so a long prompt doesn't push its own first rows out of the cache. The daemon's queue is kept below
`queued_rows`, so what a cancelled prompt can no longer take back is little (the daemon has no way to take back a
queued prefetch). At most `max_prompts` are remembered.

Routers call prefetch_prompt(), or run `python -m engram_engines.prefetch`.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engram_client import Client, EngramError, NgramHasher, Table, connect
from engram_client.context import Closeable
from numpy.typing import NDArray

from .core.followed_sum import HAND_ON_S, FollowedSum

logger = logging.getLogger(__name__)

#: Token ids of a prompt, as engines hold them.
Tokens = Sequence[int] | NDArray[Any]

WINDOW_TOKENS = 8192
PIECE_TOKENS = 512
QUEUED_ROWS = 1 << 18
MAX_PROMPTS = 4096
_POLL_S = 0.005
_PAUSE_AFTER_FAILURE_S = 1.0
_LOG_INTERVAL_S = 60.0
_SUMS = {
    "prompts": "Prompts that arrived",
    "prompts_refused": "Prompts that were not prefetched because too many were known",
    "rows_sent": "Rows that were asked for ahead, all layers",
    "tokens_cancelled": "Tokens whose rows were not asked for because their request had ended",
    "failures": "Failures of the daemon or of a prompt's tokens",
}
# Replies don't travel with a prefetch, so its session needs next to no arena.
_ARENA_BYTES = 1 << 20


def piece_row_ids(
    hasher: NgramHasher, tokens: Tokens, start: int, stop: int, dead_tokens: Collection[int] = ()
) -> NDArray[np.int32]:
    """Row ids of tokens[start:stop] of one sequence, int32 [stop - start, layers, columns].

    dead_tokens: token ids that stand for image positions. They hash as padding, and so do ids outside the vocabulary,
    which engines put in place of image tokens. Raises TypeError where tokens are no integers.
    """
    first = max(0, start - (hasher.max_ngram_size - 1))
    values = np.asarray(tokens[first:stop], np.int64)
    dead = (values < 0) | (values >= hasher.token_map.size)
    if dead_tokens:
        dead |= np.isin(values, np.fromiter(dead_tokens, np.int64))
    values = np.where(dead, 0, values)
    split = start - first
    return hasher.row_ids(values[split:], dead[split:], values[:split], dead[:split])


def prefetch_prompt(
    tables: Sequence[Table],
    hasher: NgramHasher,
    tokens: Tokens,
    *,
    start: int = 0,
    max_tokens: int = WINDOW_TOKENS,
    dead_tokens: Collection[int] = (),
) -> int:
    """Asks for the rows of a prompt at once, in the calling thread; returns their number over all layers.

    tables: one for each of hasher.layer_ids. tokens: the whole prompt; start: the first position whose rows are wanted
    (what a prefix cache holds needs none). At most max_tokens positions are asked for.
    Raises what Table.prefetch() raises, ValueError, TypeError.
    """
    rows = 0
    stop = min(len(tokens), start + max_tokens)
    for begin in range(start, stop, PIECE_TOKENS):
        ids = piece_row_ids(hasher, tokens, begin, min(stop, begin + PIECE_TOKENS), dead_tokens)
        _send(tables, ids)
        rows += ids.size
    return rows


def _send(tables: Sequence[Table], ids: NDArray[np.int32]) -> None:
    for index, table in enumerate(tables):
        table.prefetch(np.ascontiguousarray(ids[:, index]))


class _Prompt:
    """A prompt that waits or is being processed. Positions before `sent` were asked for or need no rows any more;
    those before `limit` may be asked for now."""

    __slots__ = ("limit", "sent", "tokens")

    def __init__(self, tokens: Tokens, sent: int, limit: int) -> None:
        self.tokens = tokens
        self.sent = sent
        self.limit = limit


class ArrivalPrefetcher(Closeable):
    """Prefetches the rows of prompts in the order of their arrival. Owns a session of its own and one thread.

    arrived(), reached() and ended() are for the scheduler's thread (any thread may call them): each takes a lock for a
    moment, sends nothing and never raises for what the daemon does.

    target: the daemon's address (engram_client.connect). table_name: None where the daemon serves a single table.
    hasher: of the model; its layers must be served. window_tokens, queued_rows, max_prompts: the module's text.
    dead_tokens: see piece_row_ids(). Raises what connect() and Client.table() raise, ValueError.
    """

    def __init__(
        self,
        target: str | None,
        hasher: NgramHasher,
        *,
        table_name: str | None = None,
        window_tokens: int = WINDOW_TOKENS,
        piece_tokens: int = PIECE_TOKENS,
        queued_rows: int = QUEUED_ROWS,
        max_prompts: int = MAX_PROMPTS,
        dead_tokens: Collection[int] = (),
    ) -> None:
        for name, value in (
            ("window_tokens", window_tokens),
            ("piece_tokens", piece_tokens),
            ("queued_rows", queued_rows),
            ("max_prompts", max_prompts),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self._hasher = hasher
        self._window_tokens = window_tokens
        self._piece_tokens = piece_tokens
        self._queued_rows = queued_rows
        self._max_prompts = max_prompts
        self._dead_tokens = tuple(dead_tokens)
        self._work = threading.Condition()  # guards all below but the thread's own
        self._prompts: dict[Hashable, _Prompt] = {}
        self._due: OrderedDict[Hashable, _Prompt] = OrderedDict()  # those with sent < limit, next one first
        self._counters = dict.fromkeys(_SUMS, 0)
        self._is_closed = False
        self._since_poll_rows = queued_rows  # the thread's own; the first piece asks how full the queue is
        self._logged_at = -_LOG_INTERVAL_S
        self._sums = [
            FollowedSum(f"engramd_prefetch_{name}", text, functools.partial(self._counters.__getitem__, name))
            for name, text in _SUMS.items()
        ]
        self._sums_due = 0.0
        self._client: Client = connect(target, arena_bytes=_ARENA_BYTES, name="engine prefetch")
        try:
            self._tables = [self._client.table(table_name, layer=layer) for layer in hasher.layer_ids]
        except BaseException:
            self._client.close()
            raise
        self._thread = threading.Thread(target=self._run, name="engramd-prefetch", daemon=True)
        self._thread.start()

    # ---- what the scheduler says

    def arrived(self, request: Hashable, tokens: Tokens, start: int = 0) -> None:
        """A prompt waits. tokens must keep its first len(tokens) values until ended(); positions from `start` on need
        rows. A request that is known already (retracted, to be computed anew) starts again."""
        with self._work:
            if request not in self._prompts and len(self._prompts) >= self._max_prompts:
                self._counters["prompts_refused"] += 1
                return
            self._counters["prompts"] += 1
            prompt = _Prompt(tokens, start, min(len(tokens), start + self._window_tokens))
            self._prompts[request] = prompt
            self._make_due(request, prompt)

    def reached(self, request: Hashable, position: int) -> None:
        """A chunk that ends before `position` is being computed: what lies before needs no prefetch any more, and the
        window behind it comes first, since its turn is next. Unknown requests are ignored, at next to no cost."""
        if request not in self._prompts:
            return
        with self._work:
            prompt = self._prompts.get(request)
            if prompt is None:
                return
            prompt.sent = max(prompt.sent, position)
            prompt.limit = max(prompt.limit, min(len(prompt.tokens), position + self._window_tokens))
            if position >= len(prompt.tokens):
                self._forget(request)
            else:
                self._make_due(request, prompt, is_next=True)

    def ended(self, request: Hashable) -> None:
        """A request has finished or was cancelled: the rest of its window is not asked for. Unknown: ignored."""
        with self._work:
            prompt = self._prompts.get(request)
            if prompt is not None:
                self._counters["tokens_cancelled"] += max(0, prompt.limit - prompt.sent)
                self._forget(request)

    def counters(self) -> dict[str, int]:
        """Since the start: `prompts` that arrived, `prompts_refused` because max_prompts were known, `rows_sent` to the
        daemon (all layers), `tokens_cancelled` by ended() before they were sent, `failures` of the daemon or a prompt's
        tokens. The engine's own /metrics has them as engramd_prefetch_..., see core/followed_sum.py."""
        with self._work:
            return dict(self._counters)

    def close(self) -> None:
        """Ends the thread and hangs up. Closing twice is harmless."""
        with self._work:
            self._is_closed = True
            self._work.notify_all()
        self._thread.join()
        self._client.close()

    def _make_due(self, request: Hashable, prompt: _Prompt, is_next: bool = False) -> None:
        if prompt.sent >= prompt.limit:
            self._due.pop(request, None)
            return
        self._due[request] = prompt
        if is_next:
            self._due.move_to_end(request, last=False)
        self._work.notify()

    def _forget(self, request: Hashable) -> None:
        del self._prompts[request]
        self._due.pop(request, None)

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._work:
                if not self._due:
                    self._hand_on()
                while not self._due and not self._is_closed:
                    self._work.wait()
            if not self._wait_for_room():
                return
            # Chosen only now: whoever was cancelled while the daemon was busy is not sent.
            piece = self._take_piece()
            if piece is None:
                continue
            request, prompt, start, stop = piece
            try:
                ids = piece_row_ids(self._hasher, prompt.tokens, start, stop, self._dead_tokens)
                _send(self._tables, ids)
            except (EngramError, ValueError, TypeError) as error:
                self._fail(error, request, prompt)
                continue
            self._since_poll_rows += ids.size
            with self._work:
                self._counters["rows_sent"] += ids.size
                if time.monotonic() >= self._sums_due:
                    self._hand_on()

    def _hand_on(self) -> None:
        """Counters for the engine's own /metrics. The lock is held; what changes in an idle time is told after it."""
        self._sums_due = time.monotonic() + HAND_ON_S
        for one in self._sums:
            one.hand_on()

    def _take_piece(self) -> tuple[Hashable, _Prompt, int, int] | None:
        with self._work:
            for request, prompt in self._due.items():
                start = prompt.sent
                prompt.sent = min(prompt.limit, start + self._piece_tokens)
                if prompt.sent >= prompt.limit:
                    del self._due[request]
                return request, prompt, start, prompt.sent
        return None

    def _wait_for_room(self) -> bool:
        """Returns once the daemon's queue has room for a piece (or cannot be asked); False once closed."""
        piece_rows = self._piece_tokens * int(self._hasher.head_sizes.size)
        while True:
            with self._work:
                if self._is_closed:
                    return False
            if self._since_poll_rows + piece_rows <= self._queued_rows:
                return True
            try:
                queued = int(self._client.stats()["reader"]["prefetch_queued_rows"])
            except (EngramError, KeyError) as error:
                self._fail(error)
                queued = 0
            self._since_poll_rows = queued
            # A piece larger than the bound goes alone.
            if queued == 0 or queued + piece_rows <= self._queued_rows:
                return True
            self._pause(_POLL_S)

    def _fail(self, error: Exception, request: Hashable = None, prompt: _Prompt | None = None) -> None:
        """Counts a failure, gives its prompt up, and lets the daemon come back where it was the daemon's."""
        with self._work:
            self._counters["failures"] += 1
            if prompt is not None and self._prompts.get(request) is prompt:
                self._forget(request)
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            logger.warning("rows of queued prompts are not prefetched: %s", error)
        if isinstance(error, EngramError):
            self._pause(_PAUSE_AFTER_FAILURE_S)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._work:
            while not self._is_closed and (left := deadline - time.monotonic()) > 0:
                self._work.wait(left)


# ---- for routers that are not written in Python


def _prompts_of(lines: Iterable[str]) -> Iterator[list[int]]:
    for number, line in enumerate(lines, 1):
        try:
            tokens = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError(f"line {number} must be a list of token ids")
        yield tokens


def _load_hasher(model: Path) -> NgramHasher:
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return NgramHasher.from_config(config, model / "tokenizer.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads prompts, a JSON list of token ids a line, and asks the daemon for their rows; prints the rows of each."""
    parser = argparse.ArgumentParser(prog="python -m engram_engines.prefetch", description=main.__doc__)
    parser.add_argument("model", type=Path, help="folder with config.json and tokenizer.json")
    parser.add_argument("--socket", metavar="TARGET", help="the daemon's socket path, or tcp://host:port")
    parser.add_argument("--table", metavar="NAME", help="where the daemon serves several")
    parser.add_argument("--tokens", type=int, default=WINDOW_TOKENS, metavar="N", help="at most so many of a prompt")
    options = parser.parse_args(arguments)
    try:
        hasher = _load_hasher(options.model)
        with connect(options.socket, arena_bytes=_ARENA_BYTES, name="router prefetch") as client:
            tables = [client.table(options.table, layer=layer) for layer in hasher.layer_ids]
            for tokens in _prompts_of(sys.stdin):
                print(prefetch_prompt(tables, hasher, tokens, max_tokens=options.tokens), flush=True)
    except (EngramError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
