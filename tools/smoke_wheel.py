"""Installs the wheels of dist/ into clean environments and uses them: a table made, packed, served, fetched from.

The server's wheel runs the daemon; the client's, in an environment of its own where it is there, fetches from it too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = """
import sys, engram_client, engram_engines.core
from importlib.metadata import entry_points
for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    assert [one.name for one in entry_points(group=group)] == ["engramd"], group
with engram_client.connect(sys.argv[1]) as client:
    table = client.table(layer=1)
    rows = table.fetch([0, 1, -1, table.num_rows - 1])
    assert rows.shape == (4, 264) and rows[0].any() and not rows[2].any()
    with table.submit([1]) as ticket:
        assert (ticket.wait()[0] == rows[1]).all()
    assert client.counters()["rows"] == 5
print(engram_client.__file__)
"""


def newest(pattern: str) -> Path | None:
    """The newest wheel of dist/ whose name fits."""
    return max((ROOT / "dist").glob(pattern), key=lambda path: path.stat().st_mtime, default=None)


def run(*command: str | Path) -> str:
    """A command's output; ends the program where it fails. No path of the checkout comes along."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}error: {' '.join(map(str, command))} ended with status {done.returncode}")
    return done.stdout


def environment_with(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel and what it depends on; its bin/."""
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "pip", "--disable-pip-version-check", "install", "--quiet", wheel)
    return folder / "bin"


def main() -> None:
    server = newest("engramd_server-*.whl")
    if server is None:
        sys.exit("error: dist/ has no wheel of the server: run `make wheel`")
    client = newest("engramd_client-*.whl")
    with tempfile.TemporaryDirectory(prefix="engram-smoke-") as name:
        folder = Path(name)
        bin_folder = environment_with(server, folder / "server")
        engramd = bin_folder / "engramd"
        print(run(engramd, "--version").strip())
        for file in ("engramd.service", "engramd.socket", "engramd.toml", "grafana-dashboard.json"):
            if not (folder / "server" / "share" / "engramd" / file).exists():
                sys.exit(f"error: {server.name} brings no {file}")
        run(engramd, "synth", folder / "checkpoint", "--vocab-size", "500")
        run(engramd, "pack", folder / "checkpoint", folder / "table")
        run(engramd, "verify", folder / "table")
        socket = folder / "s.sock"
        command: list[str | Path] = [engramd, "serve", folder / "table", "--dram", "1MiB", "--socket", socket]
        daemon = subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, text=True)
        assert daemon.stderr is not None
        try:
            for line in daemon.stderr:
                if "serving" in line:
                    break
            pythons = [bin_folder / "python"]
            if client is not None:
                pythons.append(environment_with(client, folder / "client") / "python")
            for python in pythons:
                print(run(python, "-c", CLIENT, str(socket)).strip())
            assert '"rows": 10' in run(engramd, "stats", "--json", "--socket", socket) or client is None
            run(engramd, "shutdown", "--socket", socket)
            daemon.wait(60)
        finally:
            daemon.kill()
            daemon.wait(60)
        if daemon.returncode != 0:
            sys.exit(f"error: the daemon ended with status {daemon.returncode}")
    print(f"{server.name}{f' and {client.name}' if client else ''} work in clean environments")


if __name__ == "__main__":
    main()
