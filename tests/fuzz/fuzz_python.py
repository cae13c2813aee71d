"""Coverage-guided fuzzing (atheris, libFuzzer underneath) of what the daemon and the packer read from strangers.

    fuzz_python.py TARGET [libFuzzer options, such as -runs=N -seed=S -max_total_time=S] [corpus folder]

Targets: control (control messages, through the verbs to a real engine), handshake (the ring socket's messages, through
a real listener), manifest, safetensors. Any exception but the documented one, a reservation that is not given back, and
a reply that cannot be read end the run.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import atheris
import msgpack

# An editable installation's loader cannot be instrumented; the checkout is on the path anyway.
sys.meta_path[:] = [finder for finder in sys.meta_path if "_editable" not in type(finder).__module__]

with atheris.instrument_imports(include=["engramd"]):
    from engramd import strict_json
    from engramd.checkpoint import safetensors
    from engramd.config import Settings, TablePath
    from engramd.daemon import (
        administrators,
        control,
        control_peer,
        log,
        messages,
        ring_listener,
        scrub,
        session_quota,
        tables,
    )
    from engramd.daemon import engine as engines
    from engramd.daemon.catalogue import Catalogue
    from engramd.errors import EngramdError
    from engramd.table import manifest as manifests

Provider = Any
ODD_NUMBERS = (-1, 0, 1, 2, 3, 4, 8, 63, 64, 255, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62), (1 << 63) - 1, -(1 << 63))
WORDS = (
    "",
    "demo",
    "value",
    "scale",
    "F8_E4M3",
    "packed",
    "split",
    "..",
    "/",
    "a/b",
    "\ud800",
    "\0",
    "nil",
    "x" * 5000,
)
STRANGER = 12345  # a uid that may not administer


def odd_value(data: Provider, depth: int = 0) -> Any:
    """Some value that JSON and msgpack can hold."""
    kind = data.ConsumeIntInRange(0, 8 if depth < 3 else 6)
    if kind == 0:
        return data.PickValueInList(list(ODD_NUMBERS))
    if kind == 1:
        return data.ConsumeInt(8)
    if kind == 2:
        return data.PickValueInList(list(WORDS))
    if kind == 3:
        return data.ConsumeUnicodeNoSurrogates(data.ConsumeIntInRange(0, 20))
    if kind == 4:
        return data.PickValueInList([None, True, False, 0.5, float("inf"), float("nan"), -0.0])
    if kind in (5, 6):
        return data.ConsumeIntInRange(-2, 40000)
    if kind == 7:
        return [odd_value(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 4))]
    return {str(odd_value(data, depth + 2)): odd_value(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 4))}


def make_table() -> str:
    """A packed table of a few thousand rows."""
    folder = tempfile.mkdtemp(prefix="engram-fuzz-")
    from engramd.cli.main import main

    for arguments in (
        ["synth", f"{folder}/source", "--vocab-size", "40", "--seed", "7"],
        ["pack", f"{folder}/source", f"{folder}/demo"],
    ):
        if main(arguments) != 0:
            raise SystemExit("no table to fuzz with")
    return f"{folder}/demo"


def make_engine() -> engines.Engine:
    settings = Settings(dram_bytes=1 << 20, arena_bytes=1 << 20, sessions=64)
    opened = tables.open_table(TablePath("demo", make_table()))
    return engines.Engine(settings, [opened])


class AtOnce:
    """A pool that does everything at once, on the caller's thread."""

    def submit(self, task: Callable[[], Callable[[], None]]) -> bool:
        task()()
        return True


class Forbidden:
    """Administration, which no stranger reaches."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a stranger administers: {name}")


class Replies:
    """An endpoint that reads every reply."""

    def send(self, peer: control_peer.Peer, frames: Sequence[Any]) -> None:
        first = msgpack.unpackb(bytes(frames[0]), strict_map_key=False)
        if "internal error" in first.get("text", ""):
            raise AssertionError(f"the daemon met an error of its own: {first}")
        if first["ok"] is not True and not isinstance(first["text"], str):
            raise AssertionError(f"an error without words: {first}")


def control_target() -> Callable[[bytes], None]:
    engine = make_engine()

    def stop(reason: str) -> None:
        raise AssertionError(f"a stranger stopped the daemon: {reason}")

    scrubber = scrub.Scrubber(engine, 0, None)
    alone = administrators.Administrators(None)
    verbs = control.Verbs(engine, AtOnce(), lambda _: {}, Forbidden(), Forbidden(), scrubber, alone, stop)  # type: ignore[arg-type]
    endpoint = Replies()
    names = ["ping", "tables", "fetch", "prefetch", "stats", "shutdown", "reload", "reload_config", "budget", "scrub"]
    identity = engine.layers[0].table.manifest.identity

    def test(raw: bytes) -> None:
        data = atheris.FuzzedDataProvider(raw)
        frames: list[bytes] = []
        if data.ConsumeIntInRange(0, 3) == 0:
            frames.append(data.ConsumeBytes(data.ConsumeIntInRange(0, 300)))
        else:
            request: dict[Any, Any] = {"v": 1, "id": data.ConsumeIntInRange(0, 9), "verb": data.PickValueInList(names)}
            if data.ConsumeBool():
                request |= {"table": "demo", "layer": engine.layers[0].layer, "width": data.PickValueInList([4, 8])}
                request |= {"part": 0, "parts": data.ConsumeIntInRange(1, 3), "request": data.ConsumeIntInRange(0, 2)}
                request |= {"layout": data.PickValueInList(["packed", "split"]), "identity": identity}
            for _ in range(data.ConsumeIntInRange(0, 3)):
                request[data.PickValueInList([*request, "x"])] = odd_value(data)
            try:
                frames.append(msgpack.packb(request))
            except (OverflowError, ValueError, UnicodeEncodeError):
                return
        if data.ConsumeBool():
            frames.append(data.ConsumeBytes(data.ConsumeIntInRange(0, 64)))
        if data.ConsumeIntInRange(0, 9) == 0:
            frames.append(b"")
        uid = data.PickValueInList([None, STRANGER])
        peer = control_peer.Peer(endpoint, (data.ConsumeBytes(1),), uid)
        verbs.dispatch(peer, frames[: messages.MAX_FRAMES - 1])
        while not verbs.fetches.is_idle:
            select.select([verbs.fetches.descriptor], [], [])
            verbs.fetches.collect()
        if verbs.budget.reserved_bytes != 0:
            raise AssertionError(f"{verbs.budget.reserved_bytes} bytes stay reserved")

    return test


def handshake_target() -> Callable[[bytes], None]:
    engine = make_engine()
    catalogue = Catalogue(engine.layers)
    selector = selectors.DefaultSelector()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{tempfile.mkdtemp(prefix='engram-fuzz-')}/s.ring")
    listening.listen()
    quota = session_quota.SessionQuota(Settings(arena_bytes=2 << 20))
    listener = ring_listener.RingListener(listening, engine, catalogue, quota, selector)
    listener._opener = AtOnce()  # type: ignore[assignment]

    def turn() -> None:
        for key, _ in selector.select(0):
            key.data()

    def test(raw: bytes) -> None:
        data = atheris.FuzzedDataProvider(raw)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener._admit(ours)
        with theirs:
            theirs.setblocking(False)
            for _ in range(data.ConsumeIntInRange(1, 4)):
                kind = data.ConsumeIntInRange(0, 7)
                body = b""
                if kind == 1:
                    low, high = (data.PickValueInList([0, 1, 1, 1, 2, 0xFFFFFFFF]) for _ in range(2))
                    arena, name = data.PickValueInList([0, 1, 1 << 16, 1 << 62]), data.ConsumeBytes(64)
                    body = struct.pack("=IIQ64s", low, high, arena, name)
                elif data.ConsumeIntInRange(0, 3) == 0:
                    body = data.ConsumeBytes(data.ConsumeIntInRange(0, 200))
                packet = bytearray(struct.pack("=IHHII", 0x4D474E45, 1, kind, 16 + len(body), 0) + body)
                if data.ConsumeIntInRange(0, 7) == 0:
                    packet[data.ConsumeIntInRange(0, len(packet) - 1)] ^= data.ConsumeIntInRange(1, 255)
                if data.ConsumeIntInRange(0, 15) == 0:
                    packet = packet[: data.ConsumeIntInRange(0, len(packet))] + data.ConsumeBytes(9)
                try:
                    if data.ConsumeIntInRange(0, 15) == 0:
                        socket.send_fds(theirs, [bytes(packet)], [theirs.fileno()])
                    else:
                        theirs.send(packet)
                except OSError:
                    break
                turn()
        turn()
        if listener._pending or listener._mapping or listener._sessions:
            raise AssertionError("a connection that has ended is still there")

    return test


def manifest_target() -> Callable[[bytes], None]:
    good = json.loads((Path(make_table()) / manifests.NAME).read_bytes())

    def test(raw: bytes) -> None:
        data = atheris.FuzzedDataProvider(raw)
        if data.ConsumeIntInRange(0, 7) == 0:
            text = data.ConsumeBytes(400)
        else:
            body = json.loads(json.dumps(good))
            for _ in range(data.ConsumeIntInRange(1, 4)):
                place: Any = body
                while True:
                    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                    if not keys:
                        break
                    key = data.PickValueInList(keys)
                    if isinstance(place[key], dict | list) and place[key] and data.ConsumeIntInRange(0, 3):
                        place = place[key]
                        continue
                    if data.ConsumeIntInRange(0, 5) == 0:
                        del place[key]
                    else:
                        place[key] = odd_value(data)
                    break
            body.pop("sha256", None)
            try:
                # Signed again, so that the checks behind the checksum are reached.
                import hashlib

                body["sha256"] = hashlib.sha256(strict_json.canonical(body)).hexdigest()
                text = json.dumps(body).encode()
            except ValueError:
                return
        try:
            manifests.parse(text, "/nowhere")
        except EngramdError as error:
            str(error).encode("utf-8", "backslashreplace")

    return test


def safetensors_target() -> Callable[[bytes], None]:
    descriptor = os.memfd_create("header")
    path = f"/proc/self/fd/{descriptor}"

    def test(raw: bytes) -> None:
        data = atheris.FuzzedDataProvider(raw)
        if data.ConsumeIntInRange(0, 7) == 0:
            header = data.ConsumeBytes(300)
        else:
            entries: dict[str, Any] = {}
            for _ in range(data.ConsumeIntInRange(0, 4)):
                entry: Any = {"dtype": "U8", "shape": [4, 4], "data_offsets": [0, 16]}
                for _ in range(data.ConsumeIntInRange(0, 2)):
                    entry[data.PickValueInList(["dtype", "shape", "data_offsets", "x"])] = odd_value(data)
                entries[str(odd_value(data))] = odd_value(data) if data.ConsumeIntInRange(0, 7) == 0 else entry
            header = json.dumps(entries).encode("utf-8", "surrogatepass")
        length = len(header) if data.ConsumeIntInRange(0, 7) else data.ConsumeIntInRange(0, 1 << 63)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, struct.pack("<Q", length & ((1 << 64) - 1)) + header + bytes(40), 0)
        try:
            safetensors.read_header(path)
        except EngramdError as error:
            str(error).encode("utf-8", "backslashreplace")

    return test


TARGETS = {
    "control": control_target,
    "handshake": handshake_target,
    "manifest": manifest_target,
    "safetensors": safetensors_target,
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        raise SystemExit(f"usage: fuzz_python.py {'|'.join(TARGETS)} [libFuzzer options]")
    name = sys.argv.pop(1)
    log.LOGGER.addHandler(__import__("logging").NullHandler())
    log.LOGGER.propagate = False
    log.LOGGER.setLevel("CRITICAL")
    made: list[Callable[[bytes], None]] = []
    # First, since code that runs before it is not counted as covered later.
    atheris.Setup(sys.argv, lambda raw: made[0](raw))
    made.append(TARGETS[name]())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
