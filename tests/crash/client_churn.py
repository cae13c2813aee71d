"""Clients that come, work and are killed: `client_churn.py SOCKET SEED SESSIONS LONGEST_MS`.

Each is a fork of this process that goes through the phases of a client's life, over and over in random order, until
it is killed with SIGKILL after a random time. Prints one JSON object: how many clients were killed in which phase.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import socket
import struct
import sys
import time
from collections import Counter
from typing import NoReturn

import engram_client
import engram_client.ring_client  # here rather than in each child at its first connection
import numpy as np

PHASES = (
    "connecting", "half a hello", "welcomed", "idle", "fetching", "waiting", "holding", "prefetching", "submitting",
    "leaving",
)  # fmt: skip


def live(path: str, chosen: random.Random, phase: mmap.mmap) -> NoReturn:
    def enter(name: str) -> None:
        phase[0] = PHASES.index(name)

    while True:
        enter("connecting")
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        raw.connect(path + ".ring")
        kind = chosen.randrange(8)
        if kind == 0:
            enter("half a hello")
            raw.send(struct.pack("=IHHII", 0x4D474E45, 1, 1, 16, 0)[: chosen.randrange(1, 17)])
            time.sleep(0.002)
        elif kind == 1:
            enter("welcomed")
            raw.send(struct.pack("=IHHIIIIQ64s", 0x4D474E45, 1, 1, 96, 0, 1, 1, 1 << 16, b"churn"))
            socket.recv_fds(raw, 4096, 8)
            time.sleep(0.002)
        else:
            try:
                client = engram_client.connect(path, arena_bytes=1 << 16, name="churn")
            except engram_client.Busy:
                continue
            table = client.table(layer=1)
            for _ in range(chosen.randrange(1, 8)):
                ids = np.array([chosen.randrange(table.num_rows) for _ in range(8)])
                act = chosen.randrange(6)
                if act == 0:
                    enter("idle")
                    time.sleep(0.001)
                elif act == 1:
                    enter("fetching")
                    table.fetch(np.arange(1500))
                elif act == 2:
                    enter("waiting")
                    with table.submit(ids) as ticket:
                        ticket.wait()
                elif act == 3:
                    enter("holding")
                    held = [table.submit(ids) for _ in range(3)]
                    views = [ticket.wait() for ticket in held]
                    assert len(views) == 3
                elif act == 4:
                    enter("prefetching")
                    table.prefetch(np.arange(chosen.randrange(1000), 2000))
                else:
                    enter("submitting")
                    tickets = [table.submit(ids) for _ in range(5)]
                    assert len(tickets) == 5
            enter("leaving")
            if chosen.random() < 0.5:
                client.close()
        raw.close()


def main() -> int:
    path, seed, sessions, longest_ms = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    chosen = random.Random(seed)
    killed: Counter[str] = Counter()
    phase = mmap.mmap(-1, 4096)
    for _ in range(sessions):
        child_seed = chosen.getrandbits(32)
        phase[0] = 0
        child = os.fork()
        if child == 0:
            live(path, random.Random(child_seed), phase)
        time.sleep(chosen.uniform(0, longest_ms / 1000))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            print(f"a client ended by itself, with status {status}", file=sys.stderr)
            return 1
        killed[PHASES[phase[0]]] += 1
    print(json.dumps(killed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
