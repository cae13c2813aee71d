"""Collects the parts of C headers that cffi reads.

A header marks them with the lines `/* cdef-begin */` and `/* cdef-end */`; between those stands plain C without
includes or conditionals. The build feeds the result to `python -m cffi.gen_src`, so a layout is written down once, in
the header that the C++ code uses too.
"""

import argparse
import sys
from pathlib import Path

BEGIN = "/* cdef-begin */"
END = "/* cdef-end */"


def extract(text: str, name: str) -> str:
    """Returns the marked sections of one header; raises ValueError where the marks do not pair up or none is there."""
    sections: list[str] = []
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        mark = line.strip()
        if mark in (BEGIN, END):
            if (mark == BEGIN) == inside:
                raise ValueError(f"{name}:{number}: '{mark}' without its counterpart before it")
            inside = mark == BEGIN
        elif inside:
            if line.startswith("#") and not line.startswith("#define "):
                raise ValueError(f"{name}:{number}: '{line}': only '#define NAME integer' may stand in a cdef section")
            sections.append(line)
    if inside:
        raise ValueError(f"{name}: '{BEGIN}' is never closed by '{END}'")
    if not sections:
        raise ValueError(f"{name}: no section between '{BEGIN}' and '{END}'")
    return "\n".join(sections) + "\n"


def main() -> int:
    """Command line: extract_cdef.py --output FILE HEADER..."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("headers", type=Path, nargs="+", metavar="HEADER")
    arguments = parser.parse_args()
    try:
        text = "\n".join(extract(header.read_text(encoding="utf-8"), str(header)) for header in arguments.headers)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"extract_cdef.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
