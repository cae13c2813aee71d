"""Prefetch at arrival for vLLM: the scheduler tells which requests come, how far they get, and which are given up.

EngineCore asks its configuration for the class of its scheduler. That answer is wrapped, once in a process: whatever
class it names is given a subclass that tells an ArrivalPrefetcher, where a daemon is named and the model has Engram
layers. Each engine core (one for each data-parallel replica) prefetches for its own requests, whatever its ranks.
"""

from __future__ import annotations

import logging
from typing import Any

from engram_client import EngramError, NgramHasher

from ..prefetch import ArrivalPrefetcher
from .settings import engram_fields, settings_of

logger = logging.getLogger(__name__)


def watch_requests() -> None:
    """From now on this process's schedulers prefetch. Calling it again is harmless."""
    from vllm.config import SchedulerConfig

    asked = SchedulerConfig.get_scheduler_cls
    if getattr(asked, "tells_engramd", False):
        return

    def get_scheduler_cls(self: Any) -> type:
        return watching(asked(self))

    vars(get_scheduler_cls)["tells_engramd"] = True
    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def watching(scheduler: type) -> type:
    """A subclass of vLLM's scheduler class that tells a prefetcher, where there is one."""

    class Watching(scheduler):  # type: ignore[misc]
        engramd: ArrivalPrefetcher | None = None

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.engramd = make_prefetcher(self.vllm_config)

        def add_request(self, request: Any) -> None:
            if self.engramd is not None and request.prompt_token_ids:
                self.engramd.arrived(request.request_id, request.prompt_token_ids)
            super().add_request(request)

        def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
            aborted = super().finish_requests(request_ids, finished_status)
            if self.engramd is not None:
                for request in aborted:
                    self.engramd.ended(request.request_id)
            return aborted

        def schedule(self, *arguments: Any, **options: Any) -> Any:
            output = super().schedule(*arguments, **options)
            if self.engramd is not None:
                _tell(self.engramd, output)
            return output

    Watching.__name__ = scheduler.__name__
    Watching.__qualname__ = scheduler.__qualname__
    return Watching


def _tell(prefetcher: ArrivalPrefetcher, output: Any) -> None:
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        prefetcher.reached(new.req_id, new.num_computed_tokens + scheduled[new.req_id])
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        prefetcher.reached(request_id, computed + scheduled[request_id])


def make_prefetcher(vllm_config: Any) -> ArrivalPrefetcher | None:
    """A prefetcher for this configuration's model; None where no daemon is named or the model has no Engram layers.

    Workers have checked table and model by now. What fails here costs the prefetch alone, so it is logged.
    """
    settings = settings_of(vllm_config)
    fields = engram_fields(vllm_config)
    if settings is None or not fields.get("engram_layer_ids"):
        return None
    from transformers import AutoTokenizer
    from vllm.models.deepseek_v41.common.mm_preprocess import IMAGE_SENTINEL_BASE_ID

    model = vllm_config.model_config
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        hasher = NgramHasher.from_config(fields, tokenizer)
        return ArrivalPrefetcher(
            settings.socket, hasher, table_name=settings.table, dead_tokens=(IMAGE_SENTINEL_BASE_ID,)
        )
    except (EngramError, OSError, ValueError) as error:
        logger.warning("engramd: rows of waiting prompts are not prefetched: %s", error)
        return None
