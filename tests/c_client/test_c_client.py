"""The C client as its users get it: installed, found by pkg-config, compiled as C, run against a real daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "release"
Compile = Callable[[Path], Path]

pytestmark = [
    pytest.mark.skipif(shutil.which("pkg-config") is None, reason="pkg-config is not installed"),
    pytest.mark.skipif(
        os.environ.get("ENGRAM_SANITIZE", "") != "", reason="the release build's library is what is tested here"
    ),
]


@pytest.fixture(scope="module")
def compile_c(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """`compile_c(source)`: the path of the program, linked with the client as it is installed."""
    prefix = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", str(BUILD), "--component", "client", "--prefix", str(prefix))
    (pkg_config_file,) = prefix.rglob("engram-client.pc")

    def compile_program(source: Path) -> Path:
        environment = {**os.environ, "PKG_CONFIG_PATH": str(pkg_config_file.parent)}
        library = pkg_config_file.parent.parent
        variables = {"prefix": prefix, "libdir": library, "includedir": prefix / "include"}
        defined = [f"--define-variable={name}={value}" for name, value in variables.items()]
        command = ["pkg-config", "--cflags", "--libs", *defined, "engram-client"]
        flags = run(*command, environment=environment).split()
        target = prefix / source.stem
        strict = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1"]
        run("cc", *strict, str(source), *flags, f"-Wl,-rpath,{library}", "-o", str(target))
        return target

    return compile_program


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_examples_rows_are_pythons(compile_c: Compile, start_daemon: Any) -> None:
    program = compile_c(ROOT / "client" / "examples" / "fetch_rows.c")
    daemon = start_daemon()
    with engram_client.connect(daemon.socket) as client:
        for layer in (1, 14):
            table = client.table("demo", layer)
            generator = np.random.default_rng(layer)
            ids = np.append(generator.integers(0, table.num_rows, 300), [-1, 0, table.num_rows - 1])
            done = subprocess.run(
                [program, daemon.socket, "demo", str(layer), *map(str, ids)],
                capture_output=True,
                check=False,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            rows = np.frombuffer(done.stdout, np.uint8).reshape(-1, table.row_bytes)
            assert np.array_equal(rows, table.fetch(ids))


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["demo", "2", "0"], 1, "serves no table demo with layer 2"),
        (["other", "1", "0"], 1, "serves no table other"),
        (["demo", "1", "0", "999999999"], 1, "row id 999999999 at position 1"),
        (["demo", "1", "x"], 2, "'x' is no row id"),
        (["demo"], 2, "usage"),
    ],
)
def test_errors_have_text(compile_c: Compile, start_daemon: Any, arguments: list[str], status: int, text: str) -> None:
    program = compile_c(ROOT / "client" / "examples" / "fetch_rows.c")
    done = subprocess.run(
        [program, start_daemon().socket, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == status
    assert text in done.stderr
    if status == 1:
        nobody = subprocess.run(
            [program, "/nonexistent/s.sock", *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        assert "no daemon answers" in nobody.stderr


def test_submit_and_wait_allocate_nothing(compile_c: Compile, start_daemon: Any) -> None:
    program = compile_c(ROOT / "tests" / "c_client" / "no_allocation.c")
    assert run(str(program), start_daemon().socket, "demo", "1", "200").split() == ["0", "101", "103"]


def test_nothing_but_the_interface_is_exported(compile_c: Compile) -> None:
    (library,) = BUILD.rglob("libengram_client.so")
    names = run("nm", "--dynamic", "--defined-only", "--format=just-symbols", str(library)).split()
    assert "engram_submit" in names
    assert "engram_hash_rows" in names
    assert all(name.startswith("engram_") for name in names)
