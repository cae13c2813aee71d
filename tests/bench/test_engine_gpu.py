"""The script for machines with GPUs runs from end to end, over doubles of the engines that have no model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "engine_gpu.py"

# Logits are a function of the tokens and, where `WRONG` says so, of whether a daemon is named.
DOUBLES = {
    "vllm": """
import os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **options):
        vars(self).update({"logprobs": None} | options)

class LLM:
    def __init__(self, **options):
        assert options["logprobs_mode"] == "raw_logits"
        self.shift = 1.0 if os.environ.get("WRONG") and "ENGRAMD_SOCKET" in os.environ else 0.0
        told = [os.environ.get(name) for name in ("ENGRAMD_SOCKET", "ENGRAMD_ROWS")]
        print(*told, "tp", options["tensor_parallel_size"], flush=True)

    def get_tokenizer(self):
        return SimpleNamespace(encode=lambda text: [ord(one) for one in text])

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling, use_tqdm):
        def answer(prompt):
            base = sum(prompt["prompt_token_ids"]) + self.shift
            steps = [{7: SimpleNamespace(logprob=base / (step + 3))} for step in range(sampling.max_tokens)]
            return SimpleNamespace(outputs=[SimpleNamespace(logprobs=steps)])
        return [answer(prompt) for prompt in prompts]
""",
    "sglang": """
import os
from types import SimpleNamespace

class Engine:
    def __init__(self, *, model_path, tp_size, random_seed):
        self.shift = 1.0 if os.environ.get("WRONG") and "ENGRAMD_SOCKET" in os.environ else 0.0
        self.tokenizer_manager = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [*map(ord, text)]))
        print(os.environ.get("ENGRAMD_SOCKET"), os.environ.get("ENGRAMD_ROWS"), "tp", tp_size, flush=True)

    def flush_cache(self):
        pass

    def shutdown(self):
        pass

    def generate(self, *, input_ids, sampling_params, return_logprob=False, top_logprobs_num=None):
        def answer(prompt):
            base = sum(prompt) + self.shift
            steps = [[(base / (step + 3), 7, None)] for step in range(sampling_params["max_new_tokens"])]
            return {"meta_info": {"output_top_logprobs": steps} if return_logprob else {}}
        return [answer(prompt) for prompt in input_ids]
""",
}


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("engine", DOUBLES)
def test_compare(engine: str, tmp_path: Path, wrong: bool) -> None:
    for name, double in DOUBLES.items():
        (tmp_path / f"{name}.py").write_text(double)
    command = [sys.executable, str(SCRIPT), "a/model", "--socket", "/run/a.sock", "--tensor-parallel-size", "2"]
    command += ["--prompts", "5", "--prompt-tokens", "16", "--new-tokens", "3"]
    command += ["--reference", str(tmp_path / "native.json"), "--engine", engine]
    environment = (
        os.environ | {"PYTHONPATH": str(tmp_path), "ENGRAMD_ROWS": "staged"} | ({"WRONG": "1"} if wrong else {})
    )
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert first.returncode == int(wrong), first.stderr
    assert first.stdout.count("None staged tp 2") == 2
    assert first.stdout.count("/run/a.sock staged tp 2") == 1
    assert ("prompt 0, token 0: " if wrong else f"every logit equals {engine} alone") in first.stdout
    # The native result is taken from the file the next time.
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == int(wrong)
    assert "None staged" not in again.stdout
    # Another engine's result is no reference.
    command[-1] = next(name for name in DOUBLES if name != engine)
    other = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert other.returncode == 1
    assert f"was written by {engine}, not by {command[-1]}" in other.stderr
