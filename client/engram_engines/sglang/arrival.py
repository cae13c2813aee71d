"""What SGLang's scheduler tells the plug-in: which requests arrive and which are given up (for the prefetch of their
rows), and when a step's results are about to leave (for the verdict on rows that a captured graph fetched).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler

from .stager import DaemonRowStager


def watch_requests() -> None:
    """Wraps the scheduler's methods. Calling it again is harmless."""
    for name, before in (
        ("_add_request_to_queue", _arrives),
        ("_release_aborted_request", _is_given_up),
        ("process_batch_result", _leaves),
    ):
        method = getattr(Scheduler, name)
        if not getattr(method, "tells_engramd", False):
            setattr(Scheduler, name, _with(before, method))


def _with(before: Callable[..., None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(self: Any, *arguments: Any, **options: Any) -> Any:
        stager = getattr(getattr(self, "ngram_embedding_manager", None), "engram_stager", None)
        if isinstance(stager, DaemonRowStager):
            before(self, stager, *arguments, **options)
        return method(self, *arguments, **options)

    vars(told)["tells_engramd"] = True
    return told


def _arrives(scheduler: Any, stager: DaemonRowStager, req: Any, is_retracted: bool = False) -> None:
    # Where prompts are computed elsewhere, this process needs no rows of theirs.
    if stager.prefetcher is None or scheduler.disaggregation_mode == DisaggregationMode.DECODE:
        return
    tokens = req.origin_input_ids
    if len(req.output_ids):  # retracted: its output is computed anew with the prompt
        tokens = [*tokens, *req.output_ids]
    stager.prefetcher.arrived(req.rid, tokens)


def _is_given_up(scheduler: Any, stager: DaemonRowStager, req: Any) -> None:
    if stager.prefetcher is not None:
        stager.prefetcher.ended(req.rid)


def _leaves(scheduler: Any, stager: DaemonRowStager, batch: Any, result: Any) -> None:
    if stager.lanes:
        copied = getattr(result, "copy_done", None)
        stager.check_graphs(copied if copied is not None else torch.cuda.current_stream())
    stager.tell_metrics()
