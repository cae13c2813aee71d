"""Takes the rows of prompts from the daemon where SGLang's scheduler would gather them from its host table.

DaemonRowStager takes the place of EngramRowStager: the same windows, the same hash on the scheduler's CPU, the same
result for the layers (values, scales and an event for each, copied on a stream of its own while the previous forward
runs). Only the gather of 16 threads over a host table has become one request for each layer over the ring.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from engram_client import Client, NgramHasher, Table
from engram_client.cuda import DeviceTable
from engram_client.engram_config import EngramConfig
from sglang.srt.layers import engram as native
from sglang.srt.layers import engram_staging
from sglang.srt.runtime_context import get_model, get_parallel

from ..core.mapped_layers import map_layers
from ..core.model_check import open_layers
from ..core.settings import EngineSettings, connect_when_up
from ..core.step_metrics import StepMetrics
from ..core.step_stager import StepStager
from ..prefetch import ArrivalPrefetcher
from .graph_lanes import GraphLanes
from .lookups import LayerLookup, SplitRows, make_target
from .mapped_rows import MappedRows


class DaemonRowStager(engram_staging.EngramRowStager):  # type: ignore[misc]
    """Of one rank. Used by the scheduler's thread, which is the one that runs the model.

    hasher: SGLang's. positions: places of this rank's layers in the hash, in the order of the decoder, and tables:
    theirs. prefetcher: of requests that wait; None on ranks that leave it to another. rank: what the metrics call it.
    """

    def __init__(
        self,
        client: Client,
        hasher: Any,
        positions: list[int],
        tables: list[Table],
        device: torch.device,
        deadline_s: float,
        prefetcher: ArrivalPrefetcher | None = None,
        rank: int = 0,
    ) -> None:
        self.hasher = hasher
        self.device = device
        self._rank = rank
        self._client = client
        self.prefetcher = prefetcher
        self.lanes: list[GraphLanes] = []
        self.lookups: list[LayerLookup] = []
        self._mapped: list[MappedRows] = []
        self.copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        columns = int(hasher.offsets.shape[1])
        self._layers = int(hasher.primes.shape[0])
        self._positions = positions
        self._memory = [SplitRows(table, columns) for table in tables]
        targets = [
            make_target(table, client.max_ticket_rows, memory, device, lambda: self.copy_stream)
            for table, memory in zip(tables, self._memory, strict=True)
        ]
        self._stager = StepStager(targets, positions, columns, deadline_s=deadline_s)
        layer_ids = [table.layer for table in tables]
        self._metrics = [StepMetrics("prompt", rank, [(self.counters, layer_ids)])]

    @property
    def counters(self) -> Any:
        """Of staged prompts; see StageCounters."""
        return self._stager.counters

    @classmethod
    def from_model(cls, model: torch.nn.Module, hasher: Any, device: torch.device) -> DaemonRowStager | None:
        """Connects a model's layers to the daemon; None for a model without Engram layers.

        Raises ModelMismatch where the daemon's table is not the model's, UnknownTable, DaemonLost once
        ENGRAMD_WAIT_S is over, ValueError, GpuError; for ENGRAMD_ROWS=mapped what MappedRows raises.
        """
        engrams = sorted(
            (module for module in model.modules() if isinstance(module, native.Engram)),
            key=lambda module: module.layer_hash_index,
        )
        settings = EngineSettings.find()
        if not engrams or settings is None:
            return None
        parallel = get_parallel()
        config = model.config.to_dict()
        client = connect_when_up(settings, name=f"sglang rank {parallel.tp_rank}")
        embeddings = [module.embed for module in engrams]
        tables = open_layers(
            client,
            config,
            head_dim=embeddings[0].dim,
            table=settings.table,
            revision=get_model().revision,
            layer_ids=[embedding.layer_id for embedding in embeddings],
        )
        prefetcher = None
        if parallel.attn_tp_rank == 0 and parallel.pp_rank == 0:
            dead_tokens = () if hasher.image_token_id is None else (hasher.image_token_id,)
            own_hasher = NgramHasher(EngramConfig.from_dict(config), hasher.token_map.cpu().numpy())
            prefetcher = ArrivalPrefetcher(
                settings.socket, own_hasher, table_name=tables[0].name, dead_tokens=dead_tokens
            )
        positions = [module.layer_hash_index for module in engrams]
        stager = cls(client, hasher, positions, tables, device, settings.deadline_s, prefetcher, parallel.tp_rank)
        try:
            stager.connect(client, embeddings, tables, settings)
        except BaseException:
            stager.close()
            raise
        return stager

    def connect(self, client: Client, embeddings: list[Any], tables: list[Table], settings: EngineSettings) -> None:
        """Gives the layers what they need for the rows that are not staged: the layers mapped, or else look-ups and
        lanes. Raises, where settings.rows is "mapped", why that cannot be."""
        columns = int(self.hasher.offsets.shape[1])
        mapped = map_layers(tables, settings, lambda table: MappedRows(table, self.device))
        self._mapped = mapped or []
        for position, (embedding, table) in enumerate(zip(embeddings, tables, strict=True)):
            lookup = LayerLookup(table, columns, client.max_ticket_rows, self.device, settings.deadline_s)
            self.lookups.append(lookup)
            if mapped is not None:
                embedding.connect(lookup, None, mapped[position])
                continue
            lanes = None
            if self.device.type == "cuda":
                rows = DeviceTable(table, self.device, layout="split")
                if rows.driver.has_stream_waits:
                    lanes = GraphLanes(rows, columns, self.device, settings.deadline_s)
                    self.lanes.append(lanes)
            embedding.connect(lookup, lanes)
        lookups = [(lookup.counters, [table.layer]) for lookup, table in zip(self.lookups, tables, strict=True)]
        self._metrics.append(StepMetrics("lookup", self._rank, lookups))

    def stage(self, batch: Any) -> list[Any] | None:
        """The rows of an extend batch: (values, scales, event) for each layer, None for layers of other ranks. None
        where the forward looks rows up itself: no extend batch, or a token that is still on the device.

        Raises DaemonLost, RequestTimeout, RowIdError, PageCorrupt, ReadFailed, TableMismatch, Busy, GpuError: the
        scheduler must not run the batch then.
        """
        if not batch.forward_mode.is_extend_without_speculative():
            return None
        self._tell_prefetcher(batch)
        windows = self._windows(batch)
        if windows is None:
            return None
        ids = self.hasher.hash_windows(*windows)[0].numpy()
        staged: list[Any] = [None] * self._layers
        with self._on_copy_stream():
            rows = [memory.allocate(ids.shape[0], self.device) for memory in self._memory]
            with self._stager.begin(ids) as step:
                for place, position in enumerate(self._positions):
                    step.finish(place)
                    staged[position] = (*rows[place], self._copied())
        return staged

    def close(self) -> None:
        """Hangs up. A server's process keeps its stager to its end."""
        if self.prefetcher is not None:
            self.prefetcher.close()
        for mapped in self._mapped:
            mapped.close()
        self._client.close()

    def check_graphs(self, after: Any) -> None:
        """Raises where a captured graph's rows were not served; see GraphLanes.check()."""
        for lanes in self.lanes:
            lanes.check(after)

    def tell_metrics(self) -> None:
        """After each batch, of whatever kind."""
        for metrics in self._metrics:
            metrics.tick()

    def _on_copy_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.copy_stream) if self.copy_stream is not None else contextlib.nullcontext()

    def _copied(self) -> Any:
        if self.copy_stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _tell_prefetcher(self, batch: Any) -> None:
        if self.prefetcher is not None:
            for request, prefix, extend in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
                self.prefetcher.reached(request.rid, prefix + extend)
