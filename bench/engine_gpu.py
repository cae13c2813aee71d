"""A real deployment with GPUs: an engine's logits with engramd beside those without, bit for bit, then throughput.

    engine_gpu.py MODEL --socket /run/engramd/engramd.sock [--engine vllm|sglang] [--tensor-parallel-size N]
                  [--reference FILE]

Run it with the Python that the engine and the client are installed in; it needs nothing else of this project. Each
engine is a process of its own, one after the other: the engine as it is, the same once more (is it reproducible at
all?), the engine over the daemon. Prompts are natural text, Python's own library. `--reference FILE` keeps the engine's
own result, and takes it from there where the file exists: so the native engine, which loads 189 GiB of tables, runs
once. Further settings of the plug-in (ENGRAMD_ROWS, ENGRAMD_TABLE) are taken from the environment. What is compared are
the largest logits of each token: vLLM tells them as they are, SGLang as log-probabilities, in which a constant added to
all of them would not show. Exit status 1 where one differs. It has not been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

#: Of one prompt: for each new token the largest logits, token -> the number's bits.
Logits = list[dict[str, str]]
TOP_LOGITS = 20
CHARACTERS_PER_TOKEN = 3  # of Python's library; prompts are cut by the tokenizer, so a guess does


def main() -> int:
    parser = argparse.ArgumentParser(description="an engine with engramd beside it without: logits, then throughput")
    parser.add_argument("model", help="path or repo id, as the engine takes it")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--socket", default=os.environ.get("ENGRAMD_SOCKET"), help="the daemon's; ENGRAMD_SOCKET")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM or sglang.Engine, as JSON"
    )
    parser.add_argument("--reference", type=Path, help="where the engine's own result is kept, and taken from")
    parser.add_argument("--result-of-this-engine", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result_of_this_engine is not None:
        args.result_of_this_engine.write_text(json.dumps(run_engine(args)))
        return 0
    if not args.socket:
        parser.error("name the daemon's socket with --socket, or set ENGRAMD_SOCKET")
    return compare(args)


def compare(args: argparse.Namespace) -> int:
    reference = args.reference
    if reference is not None and reference.exists():
        native = json.loads(reference.read_text())
        if native["engine"] != args.engine:
            print(f"error: {reference} was written by {native['engine']}, not by {args.engine}", file=sys.stderr)
            return 1
    else:
        native = in_own_process(None)
        again = in_own_process(None)
        differing = differences(native, again)
        if differing:
            print(f"{args.engine} alone is not reproducible here: {differing}")
            print(f"Logits cannot be compared bit for bit then. Try with {ENGINES[args.engine].reproducible}.")
            return 1
        print(f"{args.engine} alone gives the same logits twice")
        if reference is not None:
            reference.write_text(json.dumps(native))
    served = in_own_process(args.socket)
    differing = differences(native, served)
    print(f"with engramd: {differing or f'every logit equals {args.engine} alone, bit for bit'}")
    for what in ("prefill_tokens_per_s", "decode_tokens_per_s", "load_s"):
        ratio = served[what] / native[what]
        print(
            f"{what:22} {args.engine} alone {native[what]:10.1f}, with engramd {served[what]:10.1f}, ratio {ratio:.3f}"
        )
    return 1 if differing else 0


def in_own_process(socket: str | None) -> Any:
    """Runs one engine to its end: over the daemon at `socket`, or alone."""
    environment = dict(os.environ)
    if socket is not None:
        environment["ENGRAMD_SOCKET"] = socket
    else:
        environment.pop("ENGRAMD_SOCKET", None)
    with tempfile.TemporaryDirectory(prefix="engram-engine-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--result-of-this-engine", str(result)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(result.read_text())


def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    """One engine's logits and rates."""
    began = time.perf_counter()
    engine = ENGINES[args.engine](args)
    load_s = time.perf_counter() - began
    text = library_text(args.prompts * args.prompt_tokens * 2 * CHARACTERS_PER_TOKEN)
    tokens = engine.tokens(text)[: args.prompts * args.prompt_tokens]
    prompts = [
        tokens[first : first + args.prompt_tokens]
        for first in range(0, len(tokens) - args.prompt_tokens + 1, args.prompt_tokens)
    ]
    # One request at a time: batches would depend on the two engines' speed, and numbers on the batches.
    logits = [engine.logits(prompt, args.new_tokens) for prompt in prompts[:4]]
    engine.forget_prompts()
    began = time.perf_counter()
    engine.generate(prompts, 1)
    prefill_s = time.perf_counter() - began
    began = time.perf_counter()
    engine.generate(prompts, args.new_tokens)
    decode_s = time.perf_counter() - began  # the prompts' rows and KV are cached now
    engine.close()
    return {
        "engine": args.engine,
        "logits": logits,
        "load_s": load_s,
        "prefill_tokens_per_s": len(prompts) * args.prompt_tokens / prefill_s,
        "decode_tokens_per_s": len(prompts) * args.new_tokens / decode_s,
    }


class Vllm:
    """vLLM in this process."""

    reproducible = "enforce_eager, or VLLM_BATCH_INVARIANT=1"

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams

        options = {"logprobs_mode": "raw_logits", "max_logprobs": TOP_LOGITS, "seed": 0} | args.engine_args
        self._engine = LLM(model=args.model, tensor_parallel_size=args.tensor_parallel_size, **options)
        self._sampling = SamplingParams

    def tokens(self, text: str) -> list[int]:
        return list(self._engine.get_tokenizer().encode(text))

    def logits(self, prompt: list[int], new_tokens: int) -> Logits:
        (output,) = self._generate([prompt], new_tokens, logprobs=TOP_LOGITS)
        return [
            {str(token): float(one.logprob).hex() for token, one in step.items()} for step in output.outputs[0].logprobs
        ]

    def generate(self, prompts: list[list[int]], new_tokens: int) -> None:
        self._generate(prompts, new_tokens)

    def _generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Any:
        greedy = self._sampling(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, **options)
        return self._engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)

    def forget_prompts(self) -> None:
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """It ends with the process."""


class Sglang:
    """SGLang's engine in processes below this one."""

    reproducible = "enable_deterministic_inference"

    def __init__(self, args: argparse.Namespace) -> None:
        from sglang import Engine

        options = {"random_seed": 0} | args.engine_args
        self._engine = Engine(model_path=args.model, tp_size=args.tensor_parallel_size, **options)

    def tokens(self, text: str) -> list[int]:
        return list(self._engine.tokenizer_manager.tokenizer.encode(text))

    def logits(self, prompt: list[int], new_tokens: int) -> Logits:
        (output,) = self._generate([prompt], new_tokens, return_logprob=True, top_logprobs_num=TOP_LOGITS)
        steps = output["meta_info"]["output_top_logprobs"]
        return [{str(token): float(logprob).hex() for logprob, token, _ in step} for step in steps]

    def generate(self, prompts: list[list[int]], new_tokens: int) -> None:
        self._generate(prompts, new_tokens)

    def _generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Any:
        greedy = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        return self._engine.generate(input_ids=prompts, sampling_params=greedy, **options)

    def forget_prompts(self) -> None:
        self._engine.flush_cache()

    def close(self) -> None:
        self._engine.shutdown()


ENGINES: dict[str, type[Vllm] | type[Sglang]] = {"vllm": Vllm, "sglang": Sglang}


def differences(left: dict[str, Any], right: dict[str, Any]) -> str:
    """The first difference between two engines' logits, "" where there is none."""
    if len(left["logits"]) != len(right["logits"]):
        return f"{len(left['logits'])} and {len(right['logits'])} prompts"
    for prompt, (one, other) in enumerate(zip(left["logits"], right["logits"], strict=True)):
        for step, (expected, found) in enumerate(zip(one, other, strict=True)):
            if expected != found:
                return f"prompt {prompt}, token {step}: {expected} and {found}"
    return ""


def library_text(characters: int) -> str:
    """Natural text: the sources of Python's library, in a fixed order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    parts: list[str] = []
    length = 0
    for path in sorted(library.glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="ignore"))
        length += len(parts[-1])
        if length >= characters:
            break
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
