"""A real deployment with GPUs: vLLM's logits with engramd beside those without, bit for bit, then throughput.

    engine_gpu.py MODEL --socket /run/engramd/engramd.sock [--tensor-parallel-size N] [--reference FILE]

Run it with the Python that vLLM and the client are installed in; it needs nothing else of this project. Each engine is
a process of its own, one after the other: vLLM as it is, the same once more (is it reproducible at all?), vLLM over the
daemon. Prompts are natural text, Python's own library. `--reference FILE` keeps vLLM's own result, and takes it from
there where the file exists: so the native engine, which loads 189 GiB of tables, runs once. Exit status 1 where a logit
differs. It has not been run on a GPU yet.
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

TOP_LOGITS = 20
CHARACTERS_PER_TOKEN = 3  # of Python's library; prompts are cut by the tokenizer, so a guess does


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM with engramd beside vLLM without: logits, then throughput")
    parser.add_argument("model", help="path or repo id, as vLLM takes it")
    parser.add_argument("--socket", default=os.environ.get("ENGRAMD_SOCKET"), help="the daemon's; ENGRAMD_SOCKET")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--reference", type=Path, help="where vLLM's own result is kept, and taken from")
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
    else:
        native = in_own_process(None)
        again = in_own_process(None)
        differing = differences(native, again)
        if differing:
            print(f"vLLM alone is not reproducible here: {differing}")
            print("Logits cannot be compared bit for bit then. Try with enforce_eager, or VLLM_BATCH_INVARIANT=1.")
            return 1
        print("vLLM alone gives the same logits twice")
        if reference is not None:
            reference.write_text(json.dumps(native))
    staged = in_own_process(args.socket)
    differing = differences(native, staged)
    print(f"with engramd: {differing or 'every logit equals vLLM alone, bit for bit'}")
    for what in ("prefill_tokens_per_s", "decode_tokens_per_s", "load_s"):
        ratio = staged[what] / native[what]
        print(f"{what:22} vLLM alone {native[what]:10.1f}, with engramd {staged[what]:10.1f}, ratio {ratio:.3f}")
    return 1 if differing else 0


def in_own_process(socket: str | None) -> Any:
    """Runs one engine to its end: over the daemon at `socket`, or vLLM alone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ENGRAMD_")}
    if socket is not None:
        environment["ENGRAMD_SOCKET"] = socket
    with tempfile.TemporaryDirectory(prefix="engram-engine-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--result-of-this-engine", str(result)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(result.read_text())


def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    """One engine's logits and rates."""
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    options = {"logprobs_mode": "raw_logits", "max_logprobs": TOP_LOGITS, "seed": 0} | args.engine_args
    engine = LLM(model=args.model, tensor_parallel_size=args.tensor_parallel_size, **options)
    load_s = time.perf_counter() - began
    tokenizer = engine.get_tokenizer()
    text = library_text(args.prompts * args.prompt_tokens * 2 * CHARACTERS_PER_TOKEN)
    tokens = tokenizer.encode(text)[: args.prompts * args.prompt_tokens]
    prompts = [
        {"prompt_token_ids": tokens[first : first + args.prompt_tokens]}
        for first in range(0, len(tokens) - args.prompt_tokens + 1, args.prompt_tokens)
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=args.new_tokens, ignore_eos=True, logprobs=TOP_LOGITS)
    logits = []
    # One request at a time: batches would depend on the two engines' speed, and numbers on the batches.
    for prompt in prompts[:4]:
        (output,) = engine.generate([prompt], greedy, use_tqdm=False)
        steps = output.outputs[0].logprobs
        logits.append([{str(token): float(one.logprob).hex() for token, one in step.items()} for step in steps])
    engine.reset_prefix_cache()
    first_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    began = time.perf_counter()
    engine.generate(prompts, first_token, use_tqdm=False)
    prefill_s = time.perf_counter() - began
    began = time.perf_counter()
    engine.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=args.new_tokens, ignore_eos=True), use_tqdm=False
    )
    decode_s = time.perf_counter() - began  # the prompts' rows and KV are cached now
    return {
        "logits": logits,
        "load_s": load_s,
        "prefill_tokens_per_s": len(prompts) * args.prompt_tokens / prefill_s,
        "decode_tokens_per_s": len(prompts) * args.new_tokens / decode_s,
    }


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
