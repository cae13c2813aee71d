"""Control verbs over the engine's samples: its own miss curve, and recordings of row ids.

A recording tells which rows other users' text leads to, so it is for administrators alone. The daemon writes no file:
the client takes the samples and keeps them.
"""

from __future__ import annotations

from typing import Any

from engramd._engine import ffi, lib
from engramd.daemon.engine import Engine
from engramd.daemon.messages import Request, RequestError
from engramd.daemon.native_values import fields_of, text_of
from engramd.errors import EngramdError

SIMULATED_ROWS = 32_768  # of each size on the curve: about 0.7 MiB each once it is full
MAX_POINTS = 64
TAKE_SAMPLES = 1 << 17  # in one reply: 1 MiB
MAX_BUFFER_SAMPLES = 1 << 24
_ERROR_BYTES = 256


class Sampling:
    """The engine's sampler. Any thread; nothing here waits for longer than a round of the sampler's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def start_curve(self) -> None:
        """Begins to follow the demand. Raises EngramdError without memory."""
        error = ffi.new("char[]", _ERROR_BYTES)
        if lib.engram_engine_start_curve(self._engine.pointer, SIMULATED_ROWS, error, _ERROR_BYTES) != 0:
            raise EngramdError(f"the miss curve does not start: {text_of(error)}")

    def curve(self) -> dict[str, Any]:
        """`points` from the smallest cache on; empty where the curve is switched off or the tables are tiny."""
        points = ffi.new("engram_curve_point[]", MAX_POINTS)
        count = min(lib.engram_engine_read_curve(self._engine.pointer, points, MAX_POINTS), MAX_POINTS)
        found = [fields_of(points[index]) for index in range(count)]
        return {
            "lookups": found[0]["lookups"] if found else 0,
            "lost": found[0]["lost"] if found else 0,
            "points": [
                {
                    "rows": point["rows"],
                    "bytes": point["row_capacity_bytes"],
                    "sampled": point["sampled"],
                    "misses": point["misses"],
                    "hit_ratio": max(0.0, 1.0 - point["misses"] / point["lookups"]) if point["lookups"] else None,
                }
                for point in found
            ],
        }

    def start_recording(self, request: Request) -> dict[str, Any]:
        """Verb record_start. The reply describes the layers, whose handles the keys carry."""
        threshold = request.integer("threshold", 1, lib.ENGRAM_SAMPLE_ALL)
        capacity = request.integer("capacity", 1, MAX_BUFFER_SAMPLES)
        error = ffi.new("char[]", _ERROR_BYTES)
        if lib.engram_engine_start_recording(self._engine.pointer, threshold, capacity, error, _ERROR_BYTES) != 0:
            raise RequestError("Busy", text_of(error))
        return {"layers": self._layers()}

    def take_samples(self, request: Request) -> dict[str, Any]:
        """Verb record_take. `keys`: little-endian u64, handle << 40 | row id, oldest first. `layers`: those served now,
        since a reload gives its layers new handles."""
        threshold = request.integer("threshold", 0, lib.ENGRAM_SAMPLE_ALL, default=0)
        keys = ffi.new("uint64_t[]", TAKE_SAMPLES)
        state = ffi.new("engram_record_state *")
        count = lib.engram_engine_take_samples(self._engine.pointer, threshold, keys, TAKE_SAMPLES, state)
        if count < 0:
            raise RequestError("EngramError", "no recording runs: it ends when nobody takes its samples for 30 s")
        return {"keys": bytes(ffi.buffer(keys, count * 8)), **fields_of(state[0]), "layers": self._layers()}

    def stop_recording(self, request: Request) -> dict[str, Any]:
        """Verb record_stop."""
        lib.engram_engine_stop_recording(self._engine.pointer)
        return {}

    def _layers(self) -> list[dict[str, Any]]:
        """What is served, by the handles that keys carry."""
        return [
            {
                "handle": layer.handle,
                "table": layer.table.name,
                "layer": layer.layer,
                "rows": layer.rows,
                "row_bytes": layer.table.manifest.row_bytes,
                "identity": layer.table.manifest.identity,
                "generation": layer.table.manifest.generation,
                "heads": heads_of(layer.table.manifest.hash),
                "head_sizes": list(layer.head_sizes),
            }
            for layer in self._engine.layers
        ]


def heads_of(fields: dict[str, int | list[int]] | None) -> int:
    """Heads of each n-gram order, 0 where the table's hash is not known."""
    found = (fields or {}).get("engram_n_heads", 0)
    return found if isinstance(found, int) else 0
