"""Mistakes that a GPU client invites, put into a copy of this one: each must turn the suite red.

Every mutation is a change of one place in the client's source, made in a copy of the package that comes first on the
path. The tests named beside it then run in a process of their own, and must fail; without a mutation they pass.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Double

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "client" / "engram_client"
HOST = "tests/gpu/test_device_table.py"
STREAM = "tests/gpu/test_stream_lane.py"

pytestmark = pytest.mark.skipif(
    os.environ.get("ENGRAM_SANITIZE", "") != "", reason="a sanitizer finds nothing new in tests that fail on purpose"
)

# name: (file, what is there, what is put in its place, a test that must fail)
MUTATIONS = {
    "no registration": (
        "registration.py",
        "        self.driver.register(address, size_bytes, flags)\n        self._registered.append(address)\n",
        "        self._registered.append(address)\n        self.driver.unregister = lambda address: None\n",
        f"{HOST}::test_rows_arrive_with_one_copy",
    ),
    "wrong offset": (
        "stream_lane.py",
        "self._rows_source = registration.memory.arena + lane.rows_offset",
        "self._rows_source = registration.memory.arena",
        f"{STREAM}::test_lanes_of_two_streams_and_two_layouts",
    ),
    "missing reset": (
        "stream_lane.py",
        "            driver.run_memory_operations(handle, self._end)\n",
        "",
        f"{STREAM}::test_each_replay_waits_for_its_own_reply",
    ),
    "host pointer for device pointer": (
        "registration.py",
        "self.driver.device_pointer(memory.ring)",
        "memory.ring",
        f"{STREAM}::test_a_stream_fetches_by_itself",
    ),
    "ids changed in flight: read before they have arrived": (
        "device_ids.py",
        "        driver.synchronize_event(self._event)\n",
        "",
        f"{HOST}::test_ids_may_lie_in_device_memory",
    ),
    "ids changed in flight: doorbell before ids": (
        "stream_lane.py",
        "            driver.copy_any(self._ids_target, array.address, size_bytes, handle)\n"
        "            driver.run_memory_operations(handle, self._begin)\n",
        "            driver.run_memory_operations(handle, self._begin)\n"
        "            driver.copy_any(self._ids_target, array.address, size_bytes, handle)\n",
        f"{STREAM}::test_a_graph_is_right_on_every_replay",
    ),
    "copy before wait: host": (
        "device_table.py",
        "        source = ticket.wait_address(timeout)\n",
        "        source = self._registration.memory.arena\n",
        f"{HOST}::test_a_reply_stays_until_its_copy_is_done",
    ),
    "copy before wait: stream": (
        "stream_lane.py",
        "                (WAIT_VALUE_32, ring + lane.completion_offset, _COMPLETION_OK),\n",
        "",
        f"{STREAM}::test_each_replay_waits_for_its_own_reply",
    ),
    "ticket released before its copy is done": (
        "device_table.py",
        "        self._in_flight.append((event, ticket))\n",
        "        self._spare_events.append(event)\n        ticket.release()\n",
        f"{HOST}::test_a_reply_stays_until_its_copy_is_done",
    ),
    "status not read": (
        "stream_lane.py",
        "        if uses and reply.completion != _COMPLETION_OK:\n            self._raise_reply(reply)\n",
        "",
        f"{STREAM}::test_errors_of_a_use_are_told_and_the_lane_goes_on",
    ),
}


def run_tests(folder: Path, given: dict[str, str], test: str) -> subprocess.CompletedProcess[str]:
    """One test against the package in `folder`."""
    environment = {**os.environ, **given, "PYTHONSAFEPATH": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=20", test]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        stdout, stderr = process.communicate(timeout=100)
    finally:
        # A mutation that crashes leaves its daemon behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutated")
    shutil.copytree(PACKAGE, folder / "engram_client", ignore=shutil.ignore_patterns("__pycache__"))
    # Without the finder of the editable install the copy is the only client on the path.
    (folder / "sitecustomize.py").write_text(
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if '_editable' not in type(f).__module__]\n"
    )
    return folder


@pytest.fixture(scope="module")
def given(table: Path, doubles: dict[str, Double]) -> dict[str, str]:
    """What the tests inside need not make once more."""
    return {"ENGRAM_TEST_TABLE": str(table), "ENGRAM_TEST_DRIVERS": str(doubles["cuda"].path.parent)}


def test_the_copy_passes_without_a_mutation(copied: Path, given: dict[str, str]) -> None:
    done = run_tests(copied, given, f"{STREAM}::test_a_stream_fetches_by_itself")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(copied: Path, given: dict[str, str], name: str) -> None:
    file, before, after, test = MUTATIONS[name]
    path = copied / "engram_client" / "cuda" / file
    source = (PACKAGE / "cuda" / file).read_text(encoding="utf-8")
    assert source.count(before) == 1, f"{file} has changed: bring this mutation up to date"
    try:
        path.write_text(source.replace(before, after), encoding="utf-8")
        done = run_tests(copied, given, test)
    finally:
        path.write_text(source, encoding="utf-8")
    # A crash by a signal is noticed too: ids read too early may name memory that is not there.
    assert done.returncode == 1 or done.returncode < 0, done.stdout[-3000:]
