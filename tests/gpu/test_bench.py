"""bench/gpu.py runs to its end against the doubles, whose figures mean nothing: on a device it must not break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Double

SCRIPT = Path(__file__).resolve().parent.parent.parent / "bench" / "gpu.py"
HOST_WAIT = ["host_wait_48", "host_wait_288", "host_wait_12288", "host_wait_63550", "back_to_back"]
STREAMS = ["stream_48", "stream_288", "stream_12288"]


@pytest.mark.parametrize(("kind", "figures"), [("cuda", HOST_WAIT + STREAMS), ("hip", HOST_WAIT)])
def test_it_runs_to_its_end(doubles: dict[str, Double], tmp_path: Path, kind: str, figures: list[str]) -> None:
    result = tmp_path / "result.json"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(doubles[kind].path.parent), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "--quick", "--device", f"{kind}:0", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "FAILED" not in done.stdout
    assert done.stdout.count("ok    ") >= 7
    assert ("mapped: rows read by device address are exact" in done.stdout) == (kind == "cuda")
    assert ("a daemon killed mid-wait ends the wait" in done.stdout) == (kind == "cuda")
    assert sorted(json.loads(result.read_text())) == sorted(figures)
