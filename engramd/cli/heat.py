"""`engramd heat`: which rows are looked up most, and, given token files, which n-grams as text."""

from __future__ import annotations

import argparse
import json
from array import array
from typing import Any

from engramd.cli.sources import (
    add_source_options,
    check_one_source,
    open_stream,
    open_tokens,
    rank_rows,
    sample_tokens,
)
from engramd.errors import EngramdError
from engramd.sizes import format_size, parse_size

DEFAULT_MINIMUM = 10


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "heat",
        help="which rows and n-grams are looked up most",
        description="Shows how look-ups spread over rows by layer, n-gram order and head, and what share the hottest "
        "rows take. Given token files it also shows the most frequent n-grams as text, and can save their rows as a "
        "heat file.",
    )
    add_source_options(parser)
    parser.add_argument("--heat", metavar="FILE", help="show what a heat file holds, instead of token files")
    parser.add_argument(
        "--samples", metavar="N", type=int, default=6_000_000, help="look-ups to look at (default: 6e6)"
    )
    parser.add_argument("--top", metavar="N", type=int, default=20, help="n-grams of each order to show (default: 20)")
    parser.add_argument(
        "--min-count",
        metavar="N",
        type=int,
        default=DEFAULT_MINIMUM,
        help="show no n-gram that occurs fewer times: what is rare may be a user's own (default: 10)",
    )
    parser.add_argument(
        "--count-by",
        choices=("rows", "tokens"),
        default="rows",
        help="rows: tokens that differ in case, accents or white space alone count as one, as they share rows "
        "(default); tokens: exact token ids",
    )
    parser.add_argument("--save", metavar="FILE", help="write the hottest rows as a heat file (needs token files)")
    parser.add_argument("--rows", metavar="SIZE", default="8GiB", help="bytes of rows for --save (default: 8GiB)")
    parser.add_argument("--identity", metavar="HEX", help="the table's identity for --save (default: of --table)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints what is hot. Raises EngramdError."""
    if args.top < 0 or args.min_count < 1:
        raise EngramdError("--top must be at least 0 and --min-count at least 1")
    if args.heat:
        if args.tokens or args.recorded or args.live:
            raise EngramdError(f"--heat {args.heat} is shown alone: leave token files, --recorded and --live out")
        print(json.dumps(heat_file_summary(args.heat)) if args.json else heat_file_text(args.heat))
        return 0
    if args.save and not args.tokens:
        raise EngramdError("--save needs token files: a sample holds only some of the rows")
    check_one_source(args)
    identity = find_identity(args) if args.save else ""
    opened = open_tokens(args) if args.tokens else None
    found = sample_tokens(*opened, args.samples) if opened else open_stream(args, args.samples)
    result: dict[str, Any] = {"source": found.source, "rate": found.rate, "row_bytes": found.row_bytes}
    result["coverage"] = coverage_json(found)
    if opened:
        result["ngrams"] = list(ngrams_json(args, opened[0], opened[1]))
    print(json.dumps(result) if args.json else as_text(result), flush=True)
    if args.save and opened:
        rows = save(args.save, identity, opened[0], opened[1], parse_size(args.rows) // opened[2])
        print(f"{args.save}: {rows:,} rows, hottest first")
    return 0


def find_identity(args: argparse.Namespace) -> str:
    """The identity that a saved heat file carries."""
    if args.identity:
        identity = str(args.identity).lower()
        if len(identity) != 64 or set(identity) - set("0123456789abcdef"):
            raise EngramdError(f"--identity {args.identity!r}: 64 hexadecimal digits, as `engramd stats` shows them")
        return identity
    if args.table is None:
        raise EngramdError("a heat file is for one table's content: name it with --table TABLE or --identity HEX")
    from engramd.table import manifest

    return manifest.load(args.table, check_files=False).identity


def coverage_json(stream: Any) -> list[dict[str, Any]]:
    """Coverage of everything, of layers, of orders and of heads."""
    from engramd.heat import coverage

    entries = []
    rows_seen = coverage.count_rows(stream)
    for attributes in ((), ("layer",), ("layer", "order"), ("layer", "order", "head")):
        for values, select in coverage.groups(stream, *attributes):
            if "order" in attributes and dict(zip(attributes, values, strict=True))["order"] == 0:
                continue  # the hash is not known
            found = coverage.coverage(stream, rows_seen, select)
            entries.append(
                {
                    **dict(zip(attributes, values, strict=True)),
                    "lookups": found.lookups,
                    "rows": found.rows,
                    "covered": dict(zip(map(str, coverage.SHARES), found.covered, strict=True)),
                    "rows_for": dict(zip(map(str, coverage.COVERED), found.rows_for, strict=True)),
                }
            )
    return entries


def ngrams_json(args: argparse.Namespace, documents: Any, hasher: Any) -> Any:
    """The most frequent n-grams of each order with their text."""
    from engram_client.tokenizer_json import read_tokens

    from engramd.heat import ngrams

    compressed = ngrams.mapped_tokens(documents, hasher.token_map)
    by_rows = args.count_by == "rows"
    ids = compressed if by_rows else documents.tokens.astype(compressed.dtype)
    tokens = read_tokens(args.tokenizer)
    for found in ngrams.count_ngrams(ids, documents, hasher.max_ngram_size, args.min_count):
        top = []
        for place in range(min(args.top, found.counts.size)):
            written, count, spellings = found.ids[place], int(found.counts[place]), 1
            if by_rows:
                written, _, spellings = ngrams.spelling(found.ids[place], compressed, documents)
            top.append(
                {
                    "text": text_of([tokens[token] for token in written.tolist()]),
                    "count": count,
                    "share": count / found.positions,
                    "ids": found.ids[place].tolist(),
                    "tokens": written.tolist(),
                    "spellings": spellings,
                }
            )
        yield {
            "order": found.order,
            "counted_by": args.count_by,
            "positions": found.positions,
            "frequent": int(found.counts.size),
            "frequent_share": float(found.counts.sum()) / max(1, found.positions),
            "min_count": args.min_count,
            "top": top,
        }


def text_of(tokens: list[str]) -> str:
    """The text of tokens in a row. Byte-level tokens are joined before they are decoded, since a character may spread
    over several; a special token stands for itself."""
    from engram_client.tokenizer_json import decode_token

    joined = decode_token("".join(tokens))
    return joined if joined != "".join(tokens) else "".join(map(decode_token, tokens))


def save(path: str, identity: str, documents: Any, hasher: Any, most_rows: int) -> int:
    """Ranks rows and writes a heat file; returns the number of rows. Raises EngramdError."""
    from engramd.heat import heat_file

    ranked = rank_rows(documents, hasher, most_rows)
    try:
        return heat_file.write(path, identity, blocks(ranked))
    except OSError as error:
        raise EngramdError(f"{path}: cannot be written: {error.strerror}") from None


def blocks(ranked: dict[int, Any], size: int = 8192) -> Any:
    """Blocks of a heat file, layers in turn."""
    from engramd.heat.heat_file import Block

    for begin in range(0, max((rows.size for rows in ranked.values()), default=0), size):
        for layer, rows in ranked.items():
            yield Block(layer, array("Q", rows[begin : begin + size].tobytes()))


def heat_file_summary(path: str) -> dict[str, Any]:
    """What a heat file holds. Raises EngramdError."""
    from engramd.heat import heat_file

    rows: dict[int, int] = {}
    try:
        with open(path, "rb") as file:
            identity = file.read(40)[8:].hex()
        for block in heat_file.read(path):
            rows[block.layer] = rows.get(block.layer, 0) + len(block.rows)
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    return {"identity": identity, "rows": {str(layer): count for layer, count in sorted(rows.items())}}


def heat_file_text(path: str) -> str:
    """The same for people."""
    found = heat_file_summary(path)
    lines = [f"{path}: heat of the table with identity {found['identity']}"]
    return "\n".join([*lines, *(f"  layer {layer}: {count:,} rows" for layer, count in found["rows"].items())])


def as_text(result: dict[str, Any]) -> str:
    """The result for people; of the heads only how far they lie apart."""
    from engramd.plan.report import aligned

    row_bytes = result["row_bytes"]
    shares = list(result["coverage"][0]["covered"])
    covered = list(result["coverage"][0]["rows_for"])
    header = ["", "look-ups", "distinct rows", "%"]
    header += [f"top {100 * float(share):g} %" for share in shares]
    header += [f"rows for {100 * float(share):g} %" for share in covered]
    rows = []
    for entry in result["coverage"]:
        if "head" in entry:
            continue
        name = f"layer {entry['layer']}" if "layer" in entry else "all"
        name += f", {entry['order']}-grams" if "order" in entry else ""
        rows.append(
            [
                name,
                f"{entry['lookups']:,}",
                f"{entry['rows']:,}",
                f"{100 * entry['rows'] / max(1, entry['lookups']):.1f}",
                *(f"{100 * share:.1f}" for share in entry["covered"].values()),
                *(format_size(count * row_bytes) if count else "-" for count in entry["rows_for"].values()),
            ]
        )
    lines = [
        f"{result['source']}; one row in {1 / result['rate']:.0f} looked at",
        "",
        "Look-ups that the hottest rows take, in per cent, by share of the distinct rows; and DRAM for rows that take",
        "a given share (- where rows that are looked up only once would be needed):",
        *aligned(header, rows),
    ]
    heads = [entry for entry in result["coverage"] if "head" in entry]
    if heads:
        lines.append(
            "Heads of one layer and order differ in what their hottest 1 % take by at most " + _head_spread(heads)
        )
    for entry in result.get("ngrams", ()):
        lines += ["", _ngram_headline(entry)]
        lines += aligned(
            ["text", "count", "%", "spellings"],
            [
                [repr(one["text"]), f"{one['count']:,}", f"{100 * one['share']:.3f}", str(one["spellings"])]
                for one in entry["top"]
            ],
        )
    return "\n".join(lines)


def _head_spread(heads: list[dict[str, Any]]) -> str:
    spreads = []
    for layer, order in {(entry["layer"], entry["order"]) for entry in heads}:
        taken = [entry["covered"]["0.01"] for entry in heads if (entry["layer"], entry["order"]) == (layer, order)]
        spreads.append(max(taken) - min(taken))
    return f"{100 * max(spreads):.1f} points."


def _ngram_headline(entry: dict[str, Any]) -> str:
    return (
        f"{entry['order']}-grams, counted by {entry['counted_by']}: {entry['frequent']:,} occur at least "
        f"{entry['min_count']} times and are {100 * entry['frequent_share']:.1f} % of {entry['positions']:,}"
    )
