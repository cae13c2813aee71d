"""Where a stream of look-ups comes from: the options of `plan`, `heat` and `warm` that name token files, a recording or
a running daemon, and what they stand for. Long work shows its progress.
"""

from __future__ import annotations

import argparse
from typing import Any

from engramd.bounded_file import read_at_most
from engramd.cli.arguments import add_socket_option
from engramd.errors import EngramdError
from engramd.progress import Progress

MAX_CONFIG_BYTES = 16 << 20


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """--recorded and --live beside the options of token files."""
    add_token_options(parser)
    parser.add_argument("--recorded", metavar="FILE", help="a file of `engramd record`, instead of token files")
    parser.add_argument("--live", action="store_true", help="record a running daemon now, instead of token files")
    parser.add_argument("--name", metavar="NAME", help="for --recorded and --live: of several tables this one alone")
    add_socket_option(parser, "for --live: ")
    parser.add_argument("--seconds", metavar="S", type=float, default=60.0, help="how long for --live (default: 60)")


def add_token_options(parser: argparse.ArgumentParser) -> None:
    """Options that name token files and what their tokens mean."""
    parser.add_argument(
        "tokens",
        nargs="*",
        metavar="TOKENS",
        help="token files: .npz with `tokens` (and `doc_lengths`), .npy, or texts (need the tokenizers package)",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="the model's tokenizer.json")
    parser.add_argument("--config", metavar="FILE", help="the model's config.json")
    parser.add_argument("--table", metavar="TABLE", help="a packed table, instead of --config")


def check_one_source(args: argparse.Namespace) -> None:
    """Raises EngramdError where the options name no stream, or more than one."""
    if (bool(args.tokens) + bool(args.recorded) + args.live) != 1:
        raise EngramdError("name token files, or --recorded FILE, or --live: one of them")


def open_stream(args: argparse.Namespace, samples: int) -> Any:
    """The Stream that the options name. Raises EngramdError where they name none, or more than one."""
    from engramd.plan import recording

    check_one_source(args)
    if args.tokens:
        return sample_tokens(*open_tokens(args), samples)
    path = args.recorded or "the running daemon"
    found = recording.read(path) if args.recorded else record_now(args, samples)
    return recording.to_stream(recording.of_table(found, path, args.name) if args.name else found, path)


def sample_tokens(documents: Any, hasher: Any, row_bytes: int, samples: int) -> Any:
    """A Stream of token files."""
    from engramd.plan import stream

    with Progress("hashing", documents.tokens.size, unit="tokens") as progress:
        return stream.from_tokens(documents, hasher, row_bytes, samples, progress.advance)


def rank_rows(documents: Any, hasher: Any, most_rows: int) -> Any:
    """Rows that the most documents need, hottest first, by layer (engramd.heat.ngrams.hottest_rows)."""
    from engramd.heat import ngrams

    with Progress("ranking rows", documents.tokens.size * len(hasher.layer_ids), unit="tokens") as progress:
        return ngrams.hottest_rows(documents, hasher, most_rows, progress.advance)


def record_now(args: argparse.Namespace, samples: int) -> Any:
    """A Recording of a running daemon over --seconds."""
    from engramd.cli.control_client import ControlClient
    from engramd.plan.recorder import Recorder

    if not 0 < args.seconds <= 1e6:
        raise EngramdError(f"--seconds {args.seconds:g}: must be more than 0 and at most 1000000")
    with ControlClient(args.socket) as daemon:
        recorder = Recorder(daemon, samples)
        found = recorder.run(args.seconds, lambda: True, lambda recorder: None)
    if recorder.ended_by and not found.lookups:
        raise EngramdError(recorder.ended_by)
    return found


def open_tokens(args: argparse.Namespace) -> tuple[Any, Any, int]:
    """(Documents, NgramHasher, bytes of a row) of the options. Raises EngramdError."""
    from engramd.plan import token_files

    if args.tokenizer is None:
        raise EngramdError("token files need the model's tokenizer: --tokenizer FILE (its tokenizer.json)")
    if (args.config is None) == (args.table is None):
        raise EngramdError("token files need the model's hash: --config FILE (its config.json) or --table TABLE")
    hasher, row_bytes = open_hasher(args)
    return token_files.load(args.tokens, args.tokenizer), hasher, row_bytes


def open_hasher(args: argparse.Namespace) -> tuple[Any, int]:
    """(NgramHasher, bytes of a row) of --tokenizer and --config or --table. Raises EngramdError."""
    from engram_client import NgramHasher

    row_bytes = None
    if args.table is not None:
        from engramd.table import manifest

        found = manifest.load(args.table, check_files=False)
        config: Any = found.hash
        row_bytes = found.row_bytes
        if config is None:
            raise EngramdError(f"{args.table}: its manifest holds no engram fields: use --config")
    else:
        config = _read_config(args.config)
    try:
        hasher = NgramHasher.from_config(config, args.tokenizer)
    except OSError as error:
        raise EngramdError(f"{args.tokenizer}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise EngramdError(f"{args.config or args.table}: {error}") from None
    return hasher, row_bytes or _row_bytes(config)


def _read_config(path: str) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise EngramdError(f"{path}: not a JSON object")
    return config


def read_json(path: str) -> Any:
    """A small JSON file. Raises EngramdError."""
    from engramd import strict_json

    return strict_json.loads(read_at_most(path, MAX_CONFIG_BYTES), path)


def _row_bytes(config: dict[str, Any]) -> int:
    """FP8 values with one scale byte for each 32 of them, as the published checkpoint has them."""
    text_config = config.get("text_config")
    fields = text_config if isinstance(text_config, dict) else config
    dimension = fields.get("engram_head_dim", 256)
    if type(dimension) is not int or not 1 <= dimension <= 32_768:
        raise EngramdError(f"engram_head_dim is {dimension!r}: must be an integer from 1 to 32768")
    return dimension + (dimension + 31) // 32
