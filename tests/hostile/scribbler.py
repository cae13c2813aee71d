"""A client that does all it can to break the daemon: `scribbler.py SOCKET SEED STATES [HANDLES]`.

It makes real sessions, maps their rings, and brings them into wrong states: random bytes, moved tails, slots given out
twice, requests of absurd sizes, ids that change after submission, doorbells that are filled or drained, descriptors
that it tries to resize, to seal and to open for writing. Layouts are written out here once more: nothing of the
project's code is used. Prints one JSON object; exit status 1 where something succeeded that must not.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import random
import select
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable

MAGIC = 0x4D474E45
HELLO, WELCOME, REFUSED, CATALOGUE_REQUEST, CATALOGUE, MAPPED = 1, 2, 3, 4, 5, 6
STREAM_SLOTS = 1  # a flag of the hello
ARM_STREAMS = 3  # an operation
SLOT_BYTES = 256
F_ADD_SEALS, F_SEAL_WRITE = 1033, 0x8
PUNCH_HOLE_KEEP_SIZE = 3
WORDS = (0, 1, 2, 3, 0x7F, 0xFF, 0x100, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
LONG_WORDS = (*WORDS, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 8, (1 << 64) - 64)
LIBC = ctypes.CDLL(None, use_errno=True)


class Ended(Exception):
    """The daemon ended the session."""


def message(kind: int, body: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack("=IHHII", MAGIC, 1, kind, 16 + len(body), flags) + body


class Ring:
    """A session made by hand."""

    def __init__(self, path: str, arena_bytes: int = 1 << 16, flags: int = 0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.fds: list[int] = []
        try:
            self.socket.connect(path + ".ring")
            self.socket.send(message(HELLO, struct.pack("=IIQ64s", 1, 1, arena_bytes, b"scribbler"), flags))
            data, fds, _, _ = socket.recv_fds(self.socket, 4096, 8)
            self.fds = list(fds)
        except OSError:
            self.close()
            raise Ended from None
        if not data or struct.unpack_from("=IHH", data)[2] != WELCOME:
            self.close()
            raise Ended
        welcome = struct.unpack_from("=IIQq7QII", data, 16)
        (_, self.worker, self.session, _, self.ring_bytes, self.arena_bytes, self.submit, self.slots, self.ids,
         self.ids_bytes, _, self.slot_count, self.stream_slot_count) = welcome  # fmt: skip
        self.ring = mmap.mmap(self.fds[0], self.ring_bytes)
        self.state = mmap.mmap(self.fds[2], 4096, prot=mmap.PROT_READ)
        self.tail = 0
        try:
            self.socket.send(message(MAPPED))
        except OSError:
            self.close()
            raise Ended from None

    def close(self) -> None:
        self.socket.close()
        for name in ("ring", "state"):
            if hasattr(self, name):
                getattr(self, name).close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def ended(self) -> bool:
        return bool(select.select([self.socket], [], [], 0)[0])

    def knock(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self.fds[3], struct.pack("=Q", 1))

    def put(self, offset: int, form: str, *values: int) -> None:
        struct.pack_into(form, self.ring, offset, *values)

    def set_tail(self, tail: int) -> None:
        self.tail = tail & 0xFFFFFFFF
        self.put(self.submit, "=I", self.tail)

    def submit_slot(self, slot: int) -> None:
        self.put(self.submit + 64 + self.tail % self.slot_count * 4, "=I", slot & 0xFFFFFFFF)
        self.set_tail(self.tail + 1)

    def request(self, slot: int, fields: list[int]) -> None:
        """fields: operation, handle, row_count, id_bytes, layout, ids_offset, reply_offset, request_id, part_index,
        part_count, total_rows, reserved."""
        at = self.slots + slot * SLOT_BYTES
        self.put(at, "=IIIHHQQQIIQQ", *fields)
        self.put(at + 64, "=I", 0)
        self.put(at + 128, "=I", 0)

    def arm(self, slot: int, lease_ms: int) -> None:
        """Asks the daemon to look at the doorbells of the stream slots, which follow the others."""
        self.request(slot, [ARM_STREAMS, 0, 0, 0, 0, 0, 0, 0, 0, 1, lease_ms, 0])
        self.submit_slot(slot)

    def ring_stream(self, slot: int, value: int = 1) -> None:
        self.put(self.slots + slot * SLOT_BYTES + 192, "=I", value)

    def rings(self, slot: int) -> int:
        return int(struct.unpack_from("=I", self.ring, self.slots + slot * SLOT_BYTES + 192)[0])

    def completion(self, slot: int) -> int:
        return int(struct.unpack_from("=I", self.ring, self.slots + slot * SLOT_BYTES + 64)[0])


class Scribbler:
    def __init__(self, path: str, seed: int, handles: list[int]) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.handles = handles
        self.done: Counter[str] = Counter()
        self.sessions = 0
        self.broken: list[str] = []
        self.ring: Ring | None = None
        self.actions: list[Callable[[Ring], None]] = [
            self.random_bytes, self.move_tail, self.mutated_request, self.mutated_request, self.slot_twice,
            self.huge_count, self.changing_ids, self.doorbell, self.stream_doorbell, self.stream_request,
            self.stream_request, self.arm, self.descriptors, self.waiting,
            self.good_request, self.good_request, self.split, self.message, self.leave_in_flight,
        ]  # fmt: skip

    def run(self, states: int) -> None:
        for _ in range(states):
            if self.ring is None or self.ring.ended():
                self.reopen()
            ring = self.ring
            assert ring is not None
            action = self.random.choice(self.actions)
            self.done[action.__name__] += 1
            try:
                action(ring)
            except (BrokenPipeError, ConnectionResetError):
                self.reopen()
                continue
            if self.ring is not None and self.random.random() < 0.7:
                self.ring.knock()
            if self.random.random() < 0.3:
                time.sleep(0.0002)
        if self.ring is not None:
            self.ring.close()

    def reopen(self) -> None:
        if self.ring is not None:
            self.ring.close()
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                self.ring = Ring(self.path, flags=self.random.choice([0, STREAM_SLOTS, STREAM_SLOTS]))
                self.sessions += 1
                return
            except Ended:
                time.sleep(0.002)  # a limit: earlier sessions are being freed
        raise SystemExit("no session to be had for 30 s")

    def good_fields(self, ring: Ring) -> list[int]:
        count = self.random.choice([1, 3, 17, 48])
        ids = self.random.randrange(0, ring.ids_bytes - 8 * count) // 8 * 8
        for i in range(count):
            ring.put(ring.ids + ids + 8 * i, "=q", self.random.choice([-1, 0, 5, self.random.randrange(50000)]))
        reply = self.random.randrange(0, ring.arena_bytes - 264 * count) // 64 * 64
        return [
            1,
            self.random.choice(self.handles),
            count,
            8,
            0,
            ids,
            reply,
            self.random.getrandbits(16),
            0,
            1,
            count,
            0,
        ]

    def good_request(self, ring: Ring) -> None:
        """What a correct client does: it goes on being served in a session that has not been broken yet."""
        slot = self.random.randrange(ring.slot_count)
        ring.request(slot, self.good_fields(ring))
        ring.submit_slot(slot)

    def mutated_request(self, ring: Ring) -> None:
        fields = self.good_fields(ring)
        for _ in range(self.random.choice([1, 1, 1, 2, 4])):
            place = self.random.randrange(len(fields))
            bits = (32, 32, 32, 16, 16, 64, 64, 64, 32, 32, 64, 64)[place]
            value = self.random.choice([*LONG_WORDS, self.random.getrandbits(64), fields[place] + 1, fields[place] ^ 8])
            fields[place] = value & ((1 << bits) - 1)
        slot = self.random.randrange(ring.slot_count)
        ring.request(slot, fields)
        ring.submit_slot(slot)

    def split(self, ring: Ring) -> None:
        """Parts that lie about their number, index and total."""
        fields = self.good_fields(ring)
        fields[7] = self.random.randrange(4)
        fields[9] = self.random.choice([2, 3, 0xFFFFFFFF])
        fields[8] = self.random.choice([0, 1, 2, 0xFFFFFFFE])
        fields[10] = self.random.choice(LONG_WORDS)
        slot = self.random.randrange(ring.slot_count)
        ring.request(slot, fields)
        ring.submit_slot(slot)

    def huge_count(self, ring: Ring) -> None:
        fields = self.good_fields(ring)
        fields[2] = self.random.choice([ring.ids_bytes // 4, ring.ids_bytes // 8 + 1, 1 << 20, 0xFFFFFFFF, 0x20000001])
        fields[0] = self.random.choice([1, 2])
        fields[3] = self.random.choice([4, 8])
        fields[5] = self.random.choice([0, ring.ids_bytes - 8, (1 << 64) - 8])
        slot = self.random.randrange(ring.slot_count)
        ring.request(slot, fields)
        ring.submit_slot(slot)

    def random_bytes(self, ring: Ring) -> None:
        begin, end = self.random.choice(
            [(0, 4096), (ring.submit, ring.submit + 64 + 4 * ring.slot_count), (ring.slots, ring.ids),
             (ring.ids, ring.ring_bytes), (0, ring.ring_bytes)]
        )  # fmt: skip
        count = self.random.choice([1, 4, 64, 300])
        place = self.random.randrange(begin, max(begin + 1, end - count))
        data = self.random.randbytes(count)
        ring.ring[place : place + count] = data

    def move_tail(self, ring: Ring) -> None:
        step = self.random.choice(
            [-1, 1, 2, ring.slot_count, ring.slot_count + 1, 1 << 31, self.random.getrandbits(32)]
        )
        ring.set_tail(ring.tail + step)

    def slot_twice(self, ring: Ring) -> None:
        slot = self.random.choice([0, ring.slot_count - 1, ring.slot_count, 255, 256, 0xFFFFFFFF])
        if slot < ring.slot_count:
            ring.request(slot, self.good_fields(ring))
        for _ in range(self.random.choice([1, 2, ring.slot_count])):
            ring.submit_slot(slot)

    def changing_ids(self, ring: Ring) -> None:
        """Ids, counts and offsets that change while the daemon takes them."""
        slot = self.random.randrange(ring.slot_count)
        fields = self.good_fields(ring)
        fields[2], fields[5], fields[6] = 48, 0, 0
        ring.request(slot, fields)
        ring.submit_slot(slot)
        ring.knock()
        at = ring.slots + slot * SLOT_BYTES
        for turn in range(20):
            ring.ring[ring.ids : ring.ids + 384] = self.random.randbytes(384) if turn % 2 else bytes(384)
            ring.put(at + 8, "=I", self.random.choice([48, 0xFFFFFFFF]))
            ring.put(at + 16, "=QQ", self.random.choice(LONG_WORDS), self.random.choice(LONG_WORDS))

    def doorbell(self, ring: Ring) -> None:
        choice = self.random.randrange(4)
        try:
            if choice == 0:
                os.write(ring.fds[3], struct.pack("=Q", 0xFFFFFFFFFFFFFFFE))  # full: the next writer would block
            elif choice == 1:
                os.read(ring.fds[3], 8)
            elif choice == 2:
                flags = fcntl.fcntl(ring.fds[3], fcntl.F_GETFL)
                fcntl.fcntl(ring.fds[3], fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
                fcntl.fcntl(ring.fds[3], fcntl.F_SETFL, flags | os.O_NONBLOCK)
            else:
                for _ in range(50):
                    ring.knock()
        except BlockingIOError:
            pass

    def stream_doorbell(self, ring: Ring) -> None:
        """Doorbell and latch of any slot, also of those that have none."""
        slot = self.random.randrange(ring.slot_count + ring.stream_slot_count)
        self_at = ring.slots + slot * SLOT_BYTES + 192
        ring.put(self_at, "=II", self.random.choice(WORDS), self.random.choice(WORDS))

    def arm(self, ring: Ring) -> None:
        """Leases of any length, also in sessions without stream slots."""
        ring.arm(self.random.randrange(ring.slot_count), self.random.choice([0, 1, 1000, *LONG_WORDS]))

    def stream_request(self, ring: Ring) -> None:
        """A use of a stream slot: good, with wrong fields, with ids that change while it is taken, rung twice."""
        if ring.stream_slot_count == 0:
            return
        slot = ring.slot_count + self.random.randrange(ring.stream_slot_count)
        fields = self.good_fields(ring)
        kind = self.random.randrange(4)
        if kind == 0:
            fields[self.random.choice([0, 1, 2])] = self.random.choice(WORDS)
            fields[self.random.choice([5, 6, 10, 11])] = self.random.choice(LONG_WORDS)
        ring.request(slot, fields)
        ring.ring_stream(slot)
        if kind == 1:
            ring.knock()
            for turn in range(20):
                ring.ring[ring.ids : ring.ids + 384] = self.random.randbytes(384) if turn % 2 else bytes(384)
                ring.put(ring.slots + slot * SLOT_BYTES + 8, "=I", self.random.choice([48, 0xFFFFFFFF]))
        if kind == 2 and self.random.random() < 0.3:
            ring.knock()
            time.sleep(0.0005)
            ring.ring_stream(slot)

    def waiting(self, ring: Ring) -> None:
        slot = self.random.randrange(ring.slot_count)
        at = ring.slots + slot * SLOT_BYTES
        ring.put(at + 128, "=I", self.random.choice(WORDS))
        ring.put(at + 64, "=I", self.random.choice(WORDS))

    def message(self, ring: Ring) -> None:
        """Messages that have no place in an open session."""
        if self.random.random() < 0.7:
            return  # most of them end the session, and a state is worth more in a live one
        kind = self.random.choice([HELLO, WELCOME, REFUSED, CATALOGUE_REQUEST, CATALOGUE, MAPPED, 77])
        data = bytearray(message(kind, self.random.randbytes(self.random.choice([0, 0, 1, 80, 3000]))))
        if self.random.random() < 0.3:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        ring.socket.send(data)

    def leave_in_flight(self, ring: Ring) -> None:
        """The session ends with requests in flight."""
        if self.random.random() < 0.8:
            return
        for _ in range(4):
            self.good_request(ring)
        ring.knock()
        self.reopen()

    def descriptors(self, ring: Ring) -> None:
        """Whatever would let a client make the daemon fault, or write where it may only read. All must fail."""
        arena = ring.fds[1]
        attempts: dict[str, Callable[[], object]] = {
            "shrinks the ring": lambda: os.ftruncate(ring.fds[0], 0),
            "grows the ring": lambda: os.ftruncate(ring.fds[0], ring.ring_bytes * 2),
            "shrinks the arena": lambda: os.ftruncate(arena, 0),
            "writes to the arena": lambda: os.pwrite(arena, b"x", 0),
            "writes to the state page": lambda: os.pwrite(ring.fds[2], b"x", 0),
            "maps the arena for writing": lambda: mmap.mmap(arena, ring.arena_bytes).close(),
            "maps the state page for writing": lambda: mmap.mmap(ring.fds[2], 4096).close(),
            "seals the arena": lambda: fcntl.fcntl(arena, F_ADD_SEALS, F_SEAL_WRITE),
            "seals the state page": lambda: fcntl.fcntl(ring.fds[2], F_ADD_SEALS, F_SEAL_WRITE),
            "reopens the arena for writing": lambda: self.reopened(arena),
            "makes its arena mapping writable": lambda: self.protect(arena, ring.arena_bytes),
            "punches a hole into the arena": lambda: self.punch(arena),
            "writes to the catalogue": lambda: os.pwrite(ring.fds[4], b"x", 0),
        }
        name = self.random.choice(list(attempts))
        try:
            attempts[name]()
        except (OSError, ValueError):
            return
        self.broken.append(name)

    @staticmethod
    def reopened(fd: int) -> None:
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            os.pwrite(other, b"x", 0)
        finally:
            os.close(other)

    @staticmethod
    def protect(fd: int, size: int) -> None:
        LIBC.mmap.restype = ctypes.c_void_p
        address = LIBC.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
        failed = LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE)
        LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        if failed:
            raise OSError(ctypes.get_errno(), "mprotect")

    @staticmethod
    def punch(fd: int) -> None:
        if LIBC.fallocate(fd, PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(4096)):
            raise OSError(ctypes.get_errno(), "fallocate")


def main() -> int:
    path, seed, states = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    handles = [int(text) for text in sys.argv[4].split(",")] if len(sys.argv) > 4 else [1, 2]
    scribbler = Scribbler(path, seed, handles)
    begin = time.monotonic()
    scribbler.run(states)
    took = time.monotonic() - begin
    print(json.dumps({
        "seed": seed, "states": states, "sessions": scribbler.sessions, "took_s": round(took, 2),
        "actions": dict(scribbler.done), "broken": scribbler.broken,
    }))  # fmt: skip
    return 1 if scribbler.broken else 0


if __name__ == "__main__":
    sys.exit(main())
