"""`engramd record`: samples the row ids that a running daemon is asked for into a file of the caller's own."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from types import FrameType

from engramd.cli.arguments import WHO_ADMINISTERS, add_socket_option
from engramd.errors import EngramdError
from engramd.sizes import format_size, parse_size


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "record",
        help="sample a running daemon's row ids into a file",
        description="Records a sample of the row ids that a running daemon is asked for, for `engramd plan`, `heat` "
        "and `warm`. The file (mode 0600) holds row ids alone, no text and no tokens; who has the tokenizer can still "
        "guess common n-grams from them, so keep it like a log. " + WHO_ADMINISTERS,
    )
    parser.add_argument("file", metavar="FILE", help="where to write; replaced if it exists")
    add_socket_option(parser)
    parser.add_argument("--seconds", metavar="S", type=float, help="stop after S seconds (default: at Ctrl-C)")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        default="64MiB",
        help="size of the sample (default: 64MiB)",
    )
    parser.add_argument(
        "--rate",
        metavar="R",
        type=float,
        help="share of the rows to begin with; falls by half whenever the sample is full, or rows come too fast to be "
        "taken (default: 1/64, of small tables more)",
    )


def run(args: argparse.Namespace) -> int:
    """Records and writes the file. Raises EngramdError."""
    from engramd.cli.control_client import ControlClient
    from engramd.plan import recording
    from engramd.plan.recorder import Recorder

    capacity = parse_size(args.memory) // 8
    if capacity < 4096:
        raise EngramdError(f"--memory {args.memory}: a sample needs at least 32KiB")
    if args.rate is not None and not 0 < args.rate <= 1:
        raise EngramdError(f"--rate {args.rate:g}: the share of the rows is more than 0 and at most 1")
    if args.seconds is not None and not 0 < args.seconds <= 1e7:
        raise EngramdError(f"--seconds {args.seconds:g}: must be more than 0 and at most 10000000")
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    terminal = sys.stderr.isatty()

    def show(recorder: Recorder) -> None:
        if terminal:
            print(f"\r\x1b[K{recorder.lookups:,} rows, {recorder.samples:,} in the sample", end="", file=sys.stderr)

    with ControlClient(args.socket) as daemon:
        recorder = Recorder(daemon, capacity, args.rate)
        found = recorder.run(args.seconds, lambda: not stopped.is_set(), show)
    if terminal:
        print("\r\x1b[K", end="", file=sys.stderr)
    if recorder.ended_by and not found.lookups:
        raise EngramdError(recorder.ended_by)
    recording.write(args.file, found)
    lost = f"; {found.lost:,} more came too fast until the rate had fallen" if found.lost else ""
    print(
        f"{args.file}: {found.keys.size:,} of {found.lookups:,} look-ups in {found.seconds:.1f} s, one row in "
        f"{(1 << 32) / found.threshold:.0f} ({format_size(found.keys.size * 8)}){lost}",
        flush=True,
    )
    if recorder.ended_by:
        raise EngramdError(f"{recorder.ended_by}; the file has what came before")
    return 0
