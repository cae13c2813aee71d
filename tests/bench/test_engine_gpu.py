"""The script for machines with GPUs runs from end to end, over a double of vLLM that has no model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "engine_gpu.py"

# Its logits are a function of the tokens and, where `WRONG` says so, of whether a daemon is named.
DOUBLE = """
import os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **options):
        vars(self).update({"logprobs": None} | options)

class LLM:
    def __init__(self, **options):
        assert options["logprobs_mode"] == "raw_logits"
        self.shift = 1.0 if os.environ.get("WRONG") and "ENGRAMD_SOCKET" in os.environ else 0.0
        print("socket", os.environ.get("ENGRAMD_SOCKET"), "tp", options["tensor_parallel_size"], flush=True)

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
"""


@pytest.mark.parametrize("wrong", [False, True])
def test_compare(tmp_path: Path, wrong: bool) -> None:
    (tmp_path / "vllm.py").write_text(DOUBLE)
    command = [sys.executable, str(SCRIPT), "a/model", "--socket", "/run/a.sock", "--tensor-parallel-size", "2"]
    command += [
        "--prompts",
        "5",
        "--prompt-tokens",
        "16",
        "--new-tokens",
        "3",
        "--reference",
        str(tmp_path / "native.json"),
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)} | ({"WRONG": "1"} if wrong else {})
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert first.returncode == int(wrong), first.stderr
    assert first.stdout.count("socket None tp 2") == 2
    assert first.stdout.count("socket /run/a.sock tp 2") == 1
    assert ("prompt 0, token 0: " if wrong else "every logit equals vLLM alone") in first.stdout
    # The native result is taken from the file the next time.
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == int(wrong)
    assert "socket None" not in again.stdout
