"""Compiles the doubles of the GPU drivers, for tests and for the benchmark that takes one for a driver without cost."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SONAMES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def build_double(kind: str, folder: Path) -> Path:
    """Compiles one double into `folder`; under ENGRAM_SANITIZE=address with ASAN, as everything else of such a run is.

    kind: "cuda" or "hip". Raises RuntimeError with the compiler's words.
    """
    target = folder / SONAMES[kind]
    sanitize = ["-fsanitize=address"] if os.environ.get("ENGRAM_SANITIZE") == "address" else []
    command = ["g++", "-std=c++20", "-O2", "-g", "-fPIC", "-shared", "-pthread", *WARNINGS, *sanitize]
    command += [str(FOLDER / f"fake_{part}.cpp") for part in ("gpu", "memory", "streams", kind)]
    command += [f"-Wl,-soname,{SONAMES[kind]}", "-o", str(target)]
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{SONAMES[kind]} cannot be built: {done.stderr}")
    return target
