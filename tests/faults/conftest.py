"""Daemons with faulty disks: the real daemon over the build of its native module that injects faults.

Where that build lies is known from the ordinary module's own folder; a checkout without it fails these tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

import engramd
from engramd.table import manifest as manifests
from engramd.table.codec import synth_rows

CHECKOUT = Path(__file__).parents[2]
SEED = int(os.environ.get("ENGRAM_SEED", "1"))
SYNTH_SEED = 7  # of the `checkpoint` fixture


def fault_module() -> Path:
    """The module with the fault seam that was built beside the one in use."""
    build = "asan" if os.environ.get("ENGRAM_SANITIZE") == "address" else "release"
    folder = Path(os.environ.get("ENGRAM_FAULT_MODULE", CHECKOUT / "build" / build / "faults" / "engramd"))
    (module,) = folder.glob("_engine*.so")
    return module


@pytest.fixture(scope="session")
def fault_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH: the package as it is, but with the module that injects faults."""
    root = tmp_path_factory.mktemp("fault-build")
    package = root / "engramd"
    package.mkdir()
    for entry in Path(engramd.__file__).parent.iterdir():
        if not entry.name.startswith(("_engine", "__pycache__")):
            (package / entry.name).symlink_to(entry)
    module = fault_module()
    (package / module.name).symlink_to(module)
    # An editable installation would come before PYTHONPATH.
    (root / "sitecustomize.py").write_text(
        'import sys\nsys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]\n'
    )
    return root


@pytest.fixture
def faulty_daemon(start_daemon: Callable[..., Any], fault_path: Path) -> Callable[..., Any]:
    """`faulty_daemon(faults, *tables, **options)`: as start_daemon, with ENGRAMD_FAULTS=faults."""

    def start(faults: str, *tables: os.PathLike[str], **options: Any) -> Any:
        path = os.pathsep.join([os.fspath(fault_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "ENGRAMD_FAULTS": faults}
        return start_daemon(*tables, environment=environment, **options)

    return start


@pytest.fixture
def stats(engramd: Callable[..., CompletedProcess[str]]) -> Callable[[Any], dict[str, Any]]:
    """`stats(daemon)`: its statistics."""

    def read(daemon: Any) -> dict[str, Any]:
        done = engramd("stats", "--socket", daemon.socket, "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return read


@pytest.fixture(scope="session")
def rows(table: Path) -> dict[int, np.ndarray[Any, np.dtype[np.uint8]]]:
    """All rows of the `table` fixture by layer, computed from the formula."""
    manifest = manifests.load(table)
    whole = {}
    for layer in manifest.layers:
        data = bytearray(layer.rows * manifest.row_bytes)
        synth_rows(SYNTH_SEED, layer.layer, 0, layer.rows, manifest.value_bytes, 0, manifest.row_bytes, data)
        whole[layer.layer] = np.frombuffer(data, np.uint8).reshape(layer.rows, manifest.row_bytes)
    return whole
