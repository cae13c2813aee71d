"""The control plane over ZeroMQ: verbs, limits, and clients that send anything."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damage import flip_bit

LAYERS = (1, 14)


def ids32(*ids: int) -> bytes:
    return struct.pack(f"={len(ids)}i", *ids)


def row_of(checkpoint: Path, layer: int, row: int) -> bytes:
    """A row straight from the checkpoint's shard: 256 value bytes, then 8 scale bytes."""
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    parts = []
    for name, width in ((f"layers.{layer}.engram.embed.weight", 256), (f"layers.{layer}.engram.embed.scale", 8)):
        with open(checkpoint / index["weight_map"][name], "rb") as shard:
            header_bytes = struct.unpack("<Q", shard.read(8))[0]
            begin = json.loads(shard.read(header_bytes))[name]["data_offsets"][0]
            shard.seek(8 + header_bytes + begin + row * width)
            parts.append(shard.read(width))
    return b"".join(parts)


def rows_of(table: dict[str, Any]) -> int:
    return int(table["rows"])


def test_ping_and_tables(start_daemon: Any, control: Any, checkpoint: Path) -> None:
    daemon = start_daemon()
    client = control(daemon.socket)
    reply, _ = client.request("ping")
    assert reply["ok"]
    assert reply["pid"] == daemon.pid
    reply, _ = client.request("tables")
    config = json.loads((checkpoint / "config.json").read_text())
    config = config.get("text_config", config)
    assert [(one["name"], one["layer"]) for one in reply["tables"]] == [("demo", 1), ("demo", 14)]
    assert [one["rows"] for one in reply["tables"]] == config["engram_num_embeddings"]
    for one in reply["tables"]:
        assert sum(one["head_sizes"]) == one["rows"]
        assert (one["row_bytes"], one["value_bytes"], one["generation"]) == (264, 256, 1)
        assert len(one["identity"]) == 64
    assert reply["max_fetch_rows"] * 264 <= 16 << 20


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("layout", ["packed", "split"])
def test_fetch(start_daemon: Any, control: Any, checkpoint: Path, width: int, layout: str) -> None:
    client = control(start_daemon().socket)
    tables = client.request("tables")[0]["tables"]
    for table in tables:
        chosen = [0, rows_of(table) - 1, -1, 17, 17, 4097]
        ids = struct.pack(f"={len(chosen)}{'i' if width == 4 else 'q'}", *chosen)
        reply, rest = client.request(
            "fetch", ids, table="demo", layer=table["layer"], identity=table["identity"], width=width, layout=layout
        )
        assert reply["ok"], reply
        want = [bytes(264) if row < 0 else row_of(checkpoint, table["layer"], row) for row in chosen]
        if layout == "packed":
            assert rest == [b"".join(want)]
        else:
            assert rest == [b"".join(row[:256] for row in want) + b"".join(row[256:] for row in want)]


def test_fetch_of_nothing_and_of_the_most(start_daemon: Any, control: Any, checkpoint: Path) -> None:
    client = control(start_daemon().socket)
    reply, rest = client.request("fetch", b"", table="demo", layer=1, width=4)
    assert reply["ok"]
    assert rest == [b""]
    tables = client.request("tables")[0]
    count = tables["max_fetch_rows"]
    chosen = [random.Random(1).randrange(rows_of(tables["tables"][0])) for _ in range(count)]
    reply, rest = client.request("fetch", ids32(*chosen), table="demo", layer=1, width=4)
    assert reply["ok"], reply
    for place in (0, 1, count // 2, count - 1):
        assert rest[0][place * 264 : (place + 1) * 264] == row_of(checkpoint, 1, chosen[place])
    reply, rest = client.request("fetch", ids32(*chosen, 0), table="demo", layer=1, width=4)
    assert not reply["ok"]
    assert str(count) in reply["text"]


def test_fetch_errors(start_daemon: Any, control: Any) -> None:
    client = control(start_daemon().socket)
    table = client.request("tables")[0]["tables"][0]
    rows = rows_of(table)
    for bad in (rows, -2, 2**31 - 1):
        reply, rest = client.request("fetch", ids32(1, 2, bad, -7), table="demo", layer=1, width=4)
        assert (reply["error"], reply["position"], reply["row_id"]) == ("RowIdError", 2, bad)
        assert str(rows) in reply["text"]
        assert rest == []
    ids = struct.pack("=2q", 5, 2**40)
    reply, _ = client.request("prefetch", ids, table="demo", layer=1, width=8)
    assert (reply["error"], reply["position"], reply["row_id"]) == ("RowIdError", 1, 2**40)
    for name, layer in (("nope", 1), ("demo", 7)):
        reply, _ = client.request("fetch", ids32(1), table=name, layer=layer, width=4)
        assert reply["error"] == "UnknownTable"
        assert "demo layer 14" in reply["text"]
    reply, _ = client.request("fetch", ids32(1), table="demo", layer=1, width=4, identity="0" * 64)
    assert reply["error"] == "TableMismatch"
    assert table["identity"] in reply["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"table": 5, "layer": 1, "width": 4},
        {"table": "demo", "layer": "1", "width": 4},
        {"table": "demo", "layer": True, "width": 4},
        {"table": "demo", "layer": -1, "width": 4},
        {"table": "demo", "layer": 1},
        {"table": "demo", "layer": 1, "width": 5},
        {"table": "demo", "layer": 1, "width": 8},
        {"table": "demo", "layer": 1, "width": 4, "layout": "diagonal"},
        {"table": "demo", "layer": 1, "width": 4, "layout": 1},
        {"table": "demo", "layer": 1, "width": 4, "identity": 7},
        {"table": "demo", "layer": 1, "width": 4, "parts": 0},
        {"table": "demo", "layer": 1, "width": 4, "parts": 2, "part": 2, "request": 1, "total": 3},
        {"table": "demo", "layer": 1, "width": 4, "parts": 2, "part": 0, "total": 3},
        {"table": "demo", "layer": 1, "width": 4, "total": 2},
        {"table": "demo", "layer": 2**63, "width": 4},
        {"table": "demo", "layer": 1.0, "width": 4},
    ],
)
def test_wrong_fields_are_named(start_daemon: Any, control: Any, fields: dict[str, Any]) -> None:
    client = control(start_daemon().socket)
    reply, rest = client.request("fetch", ids32(1, 2, 3), **fields)
    assert not reply["ok"]
    assert reply["error"] == "EngramError"
    assert "fetch" in reply["text"]
    assert rest == []


def test_a_width_that_cannot_be_is_told_what_can(start_daemon: Any, control: Any) -> None:
    client = control(start_daemon().socket)
    for width in (3, 5, True, None):
        reply, _ = client.request("fetch", ids32(1), table="demo", layer=1, width=width)
        assert reply["text"].endswith(f"field 'width' is {width}; it must be 4 or 8")


def test_hostile_frames_are_dropped_or_answered(start_daemon: Any, control: Any) -> None:
    daemon = start_daemon()
    client = control(daemon.socket)
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    dropped: list[list[bytes]] = [
        [b""],
        [b"not msgpack at all"],
        [b"\xc1"],
        [msgpack.packb([1, 2, 3])],
        [msgpack.packb("ping")],
        [msgpack.packb({"v": 1, "verb": "ping"})],
        [msgpack.packb({"v": 1, "verb": "ping", "id": 1}) + b"tail"],
        [msgpack.packb({"v": 1, "verb": "ping", "id": 1})[:-1]],
        [msgpack.packb({"v": 1, "verb": "ping", "id": 1, "x": "y" * 5000})],
        [msgpack.packb({"v": 1, "verb": "ping", "id": 1, "x": list(range(65))})],
        [msgpack.packb({"v": 1, "verb": "ping", "id": 1, "x": msgpack.ExtType(5, b"ext")})],
        [msgpack.packb({"v": 1, "verb": "ping", "id": 1, **{f"k{n}": n for n in range(64)}})],
        [msgpack.packb({"v": 1, "verb": "ping", "id": 1, "x": [[[[[[[[1]]]]]]]]})],
        [msgpack.packb({"v": 1, "verb": "ping", "id": 1, "x": deep})],
        [b"\x91" * 60000],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xdf\xff\xff\xff\xff"],
        [b"\xc6\xff\xff\xff\xff"],
        [bytes(70_000)],
        [b"a", b"b", b"c", b"d"],
        [b"", b"", b""],
        [b"x"] * 200,
    ]
    for frames in dropped:
        client.socket.send_multipart(frames)
    answered: list[list[bytes]] = [
        [msgpack.packb({"id": "a"})],
        [msgpack.packb({"id": "b", "v": 2, "verb": "ping"})],
        [msgpack.packb({"id": "c", "v": 1, "verb": "format-disk"})],
        [msgpack.packb({"id": "d", "v": 1, "verb": ["ping"]})],
        [msgpack.packb({"id": "e", "v": True, "verb": "ping"})],
        [msgpack.packb({"id": "f", "v": 1, "verb": "ping"}), b"more"],
        [msgpack.packb({"id": "g", "v": 1, "verb": "fetch", "table": "demo", "layer": 1, "width": 4})],
        [msgpack.packb({"id": {"any": [b"\xff", None]}, "v": 1, "verb": "nope"})],
    ]
    for frames in answered:
        client.socket.send_multipart(frames)
        reply, rest = client.receive()
        assert reply["id"] == msgpack.unpackb(frames[0])["id"]
        assert reply["ok"] is False
        assert reply["error"] == "EngramError"
        assert reply["text"]
        assert rest == []
    assert client.request("ping")[0]["ok"]


def test_any_bytes_leave_the_daemon_serving(start_daemon: Any, control: Any) -> None:
    daemon = start_daemon()
    client = control(daemon.socket)
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    )
    keys = st.sampled_from(["v", "id", "verb", "table", "layer", "width", "layout", "identity", "request", "parts"])
    verbs = st.sampled_from(["fetch", "prefetch", "ping", "tables", "stats"])
    maps = st.dictionaries(keys, values, max_size=8)
    right = st.fixed_dictionaries({"v": st.just(1), "id": st.just(0), "verb": verbs})
    first = st.binary(max_size=200) | st.tuples(maps, right).map(lambda both: msgpack.packb({**both[0], **both[1]}))

    @given(st.lists(first | st.binary(max_size=64), min_size=1, max_size=4))
    @settings(max_examples=200, suppress_health_check=list(HealthCheck))
    def send(frames: list[bytes]) -> None:
        client.socket.send_multipart(frames)

    send()
    fresh = control(daemon.socket)
    assert fresh.request("ping")[0]["pid"] == daemon.pid


def test_a_frame_beyond_the_limit_ends_that_connection_only(start_daemon: Any, control: Any) -> None:
    daemon = start_daemon()
    bystander = control(daemon.socket)
    assert bystander.request("ping")[0]["ok"]
    greedy = control(daemon.socket)
    request = msgpack.packb({"v": 1, "id": 1, "verb": "fetch", "table": "demo", "layer": 1, "width": 4})
    greedy.socket.send_multipart([request, bytes((16 << 20) + 4)])
    greedy.socket.setsockopt(zmq.RCVTIMEO, 300)
    with pytest.raises(zmq.Again):
        greedy.receive()
    assert bystander.request("ping")[0]["ok"]


def test_too_much_at_once_is_busy_never_lost(start_daemon: Any, control: Any) -> None:
    daemon = start_daemon()
    client = control(daemon.socket)
    count = client.request("tables")[0]["max_fetch_rows"]
    ids = ids32(*([3] * count))
    for number in range(40):
        fields = {"v": 1, "id": number, "verb": "fetch", "table": "demo", "layer": 1, "width": 4}
        client.socket.send_multipart([msgpack.packb(fields), ids])
    outcomes = {}
    for _ in range(40):
        reply, rest = client.receive()
        outcomes[reply["id"]] = "rows" if reply["ok"] else reply["error"]
        assert [len(frame) for frame in rest] == ([count * 264] if reply["ok"] else [])
    assert sorted(outcomes) == list(range(40))
    assert set(outcomes.values()) <= {"rows", "Busy"}
    assert "rows" in outcomes.values()
    # What was sent is free again.
    reply, _ = client.request("fetch", ids, table="demo", layer=1, width=4)
    assert reply["ok"], reply


def test_a_stop_in_the_middle_answers_or_refuses(start_daemon: Any, control: Any) -> None:
    daemon = start_daemon(dram="0")
    client = control(daemon.socket)
    ids = ids32(*range(20_000))
    for number in range(30):
        fields = {"v": 1, "id": number, "verb": "fetch", "table": "demo", "layer": 1, "width": 4}
        client.socket.send_multipart([msgpack.packb(fields), ids])
        if number == 0:
            first, rest = client.receive()
            assert (first["ok"], len(rest[0])) == (True, 20_000 * 264)
    assert daemon.stop() == 0
    client.socket.setsockopt(zmq.RCVTIMEO, 300)
    answered = 1
    try:
        while True:
            reply, rest = client.receive()
            answered += 1
            if reply["ok"]:
                assert len(rest[0]) == 20_000 * 264
            else:
                assert reply["error"] in ("DaemonLost", "Busy")
    except zmq.Again:
        pass
    assert answered <= 30
    assert "drained" in daemon.log


def test_req_sockets_are_answered_too(start_daemon: Any) -> None:
    daemon = start_daemon()
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, 30_000)
        client.connect(f"ipc://{daemon.socket}")
        client.send(msgpack.packb({"v": 1, "id": 5, "verb": "ping"}))
        assert msgpack.unpackb(client.recv())["id"] == 5
        fields = {"v": 1, "id": 6, "verb": "fetch", "table": "demo", "layer": 1, "width": 4}
        client.send_multipart([msgpack.packb(fields), ids32(1, 2)])
        assert len(client.recv_multipart()[1]) == 2 * 264


def test_split_requests_count_once(start_daemon: Any, control: Any) -> None:
    daemon = start_daemon()
    client = control(daemon.socket)
    for part in range(4):
        reply, _ = client.request(
            "fetch", ids32(*range(10)), table="demo", layer=1, width=4, request=9, part=part, parts=4, total=40
        )
        assert reply["ok"], reply
    layer = client.request("stats")[0]["stats"]["tables"][0]["layers"][0]
    assert (layer["requests"], layer["rows"]) == (1, 40)


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user needs root")
def test_administration_is_refused_to_another_uid(start_daemon: Any, control: Any, as_nobody: Any) -> None:
    daemon = start_daemon()
    # An operator may open the socket to more users than its group; administration stays closed to them.
    os.chmod(os.path.dirname(daemon.socket), 0o755)
    os.chmod(daemon.socket, 0o666)

    def ask() -> str:
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.setsockopt(zmq.RCVTIMEO, 30_000)
            client.connect(f"ipc://{daemon.socket}")
            client.send(msgpack.packb({"v": 1, "id": 1, "verb": "shutdown"}))
            return str(msgpack.unpackb(client.recv())["text"])

    assert "not permitted to uid 65534" in as_nobody(ask)
    assert control(daemon.socket).request("ping")[0]["ok"]


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user needs root")
@pytest.mark.parametrize("group", [65534, 4242])
def test_a_configured_group_administers(start_daemon: Any, as_nobody: Any, group: int) -> None:
    """Of any kind: 65534 is the other user's primary group, 4242 a supplementary one."""
    daemon = start_daemon(admin_group=str(group))
    os.chmod(os.path.dirname(daemon.socket), 0o755)
    os.chmod(daemon.socket, 0o666)

    def budget() -> str:
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.setsockopt(zmq.RCVTIMEO, 30_000)
            client.connect(f"ipc://{daemon.socket}")
            client.send(msgpack.packb({"v": 1, "id": 1, "verb": "budget", "dram_bytes": 1 << 20}))
            reply = msgpack.unpackb(client.recv())
            return str(reply.get("text") or reply["budget_bytes"])

    assert as_nobody(budget, groups=(4242,)) == str(1 << 20)
    if group == 4242:
        assert "not permitted to uid 65534; only root, uid 0 (the daemon's) and group 4242 may" in as_nobody(budget)


def test_a_group_that_is_not_there_is_refused(engramd: Callable[..., Any], table: Path, socket_folder: str) -> None:
    for more in ((), ("--check-config",)):
        done = engramd("serve", table, "--socket", f"{socket_folder}/s", "--admin-group", "no-such-group", *more)
        assert done.returncode == 1
        assert "admin_group no-such-group: there is no such group" in done.stderr


def test_a_corrupt_page_is_an_error_and_one_line(
    start_daemon: Any, control: Any, engramd: Callable[..., Any], copy: Path
) -> None:
    flip_bit(copy / "layer-1.g000001.pages", 2 * 4096 + 264 * 3 + 100)  # row 33
    daemon = start_daemon(copy, dram="0")
    client = control(daemon.socket)
    for _ in range(3):
        reply, rest = client.request("fetch", ids32(1, 33, 2), table="demo", layer=1, width=4)
        assert (reply["error"], reply["page"], reply["row_id"]) == ("PageCorrupt", 2, 33), reply
        assert rest == []
    assert client.request("fetch", ids32(32, 34), table="demo", layer=1, width=4)[0]["ok"]
    stats = client.request("stats")[0]["stats"]
    assert stats["tables"][0]["layers"][0]["errors"] == {"PageCorrupt": 3}
    daemon.wait_for_log("page 2 cannot be served")
    assert daemon.log.count("page 2 cannot be served") == 1


def test_many_questions_at_once(start_daemon: Callable[..., Any], control: Callable[[str], Any]) -> None:
    """Requests that reserve no memory come and go in any order."""
    daemon = start_daemon()
    client = control(daemon.socket)
    for number in range(40):
        client.socket.send(msgpack.packb({"v": 1, "id": number, "verb": ("stats", "curve")[number % 2]}))
    replies = [client.receive()[0] for _ in range(40)]
    assert sorted(reply["id"] for reply in replies) == list(range(40))
    assert all(reply["ok"] for reply in replies)
    assert client.request("ping")[0]["pid"] == daemon.pid
