"""engramd repair: rewrites the bad pages of a packed table from its checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from engramd.errors import EngramdError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

MAX_SHOWN = 20


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "repair",
        help="rewrite the bad pages of a packed table",
        description="Reads table and checkpoint through, rewrites exactly the pages that are damaged, and reads them "
        "back. The table may be served meanwhile. Refuses a checkpoint that is not the one that was packed.",
    )
    parser.add_argument("table", metavar="TABLE", help="directory of the packed table")
    parser.add_argument("--from", dest="checkpoint", metavar="CHECKPOINT", required=True, help="what was packed")
    parser.add_argument("--tensors", metavar="FILE.toml", help="as for pack")
    parser.add_argument("--revision", metavar="R", help="as for pack")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0 once no page is bad. Raises EngramdError."""
    from engramd.checkpoint.index import open_checkpoint
    from engramd.checkpoint.mapping import table_source
    from engramd.table import manifest as manifests
    from engramd.table.files import Files
    from engramd.table.repair import repair

    begin = time.monotonic()
    manifest = manifests.load(args.table, check_files=False)
    source = table_source(open_checkpoint(args.checkpoint, args.revision), args.tensors)
    try:
        done = repair(manifest, source, Files(lambda text: print(text, file=sys.stderr)))
    except KeyboardInterrupt:
        raise EngramdError("interrupted: pages that were not rewritten are as they were; run it again") from None
    for layer, page in done.bad[:MAX_SHOWN]:
        print(f"{manifest.directory}: layer {layer} page {page}: rewritten", file=sys.stderr)
    if len(done.bad) > MAX_SHOWN:
        print(f"{manifest.directory}: ... and {len(done.bad) - MAX_SHOWN} more", file=sys.stderr)
    took = max(time.monotonic() - begin, 1e-9)
    print(
        f"repaired {manifest.directory} generation {manifest.generation}: {done.pages} pages examined in {took:.1f} s, "
        f"{len(done.bad)} rewritten and read back"
    )
    return 0
