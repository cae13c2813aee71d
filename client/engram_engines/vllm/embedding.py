"""Stands where vLLM's Engram layer had its table: a layer's rows of one step, in static device memory.

StagedEmbedding takes the place of ParallelEngramEmbedding. It has no parameters and allocates memory for the rows of
one step alone. Before the step (rows.py) its values and scales are filled from the daemon's reply, and vLLM's own
lookup kernel turns them into what the layer reads: row i of the staged values is the row of the step's i-th id, so the
ids that the kernel is given are 0, 1, 2 ... The numbers are therefore vLLM's own, bit for bit. Rows past the step's
tokens are written as zeros.

StagedEngram is the layer with that embedding. What a captured graph holds reads the layer's static `staged_rows` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engram_client.cuda.device_table import rank_columns
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.models.deepseek_v41.common import engram as native

from ..core.model_check import VALUES_PER_SCALE

#: Rows that one program of the lookup kernel takes at a time, as vLLM launches it.
_BLOCK_ROWS = 16


class StagedEmbedding(nn.Module):  # type: ignore[misc]
    """One layer's rows of one step, of this rank's columns. Used by the thread that runs the model.

    The attributes without a comment are those of ParallelEngramEmbedding that vLLM reads.
    head_sizes: rows of each hash column. max_tokens: of one step. strided: this rank takes every tp_size-th column.
    """

    cpu_offload = False
    dp_shared_memory = False
    dp_size = 1
    peer_rows = 0

    def __init__(
        self, num_embeddings: int, dim: int, head_sizes: tuple[int, ...], max_tokens: int, *, strided: bool
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.dim = dim
        self.block_size = VALUES_PER_SCALE
        self.n_hash_cols = len(head_sizes)
        self.tp_size = get_tensor_model_parallel_world_size()
        rank = get_tensor_model_parallel_rank()
        self.part_n_hash_cols = self.n_hash_cols // self.tp_size
        self.strided = strided and self.tp_size > 1
        #: This rank's columns of the hash.
        self.columns = rank_columns(self.n_hash_cols, rank, self.tp_size, strided=self.strided)
        self.max_tokens = max_tokens
        rows = max_tokens * self.part_n_hash_cols
        #: uint8 [rows, dim] and [rows, dim / 32]: the step's rows as they came. Not part of a state dict.
        self.register_buffer("values", torch.zeros(rows, dim, dtype=torch.uint8), persistent=False)
        self.register_buffer("scales", torch.zeros(rows, dim // self.block_size, dtype=torch.uint8), persistent=False)
        positions = torch.arange(rows, dtype=torch.int32).view(max_tokens, self.part_n_hash_cols)
        self.register_buffer("positions", positions, persistent=False)
        #: Real tokens whose rows are staged; None before the first step and in dummy steps, which need no rows.
        self.staged_tokens: int | None = None
        #: Completes rows that were left on their way (rows.py); None where there are none.
        self.complete: Callable[[], None] | None = None
        self._programs: int | None = None

    def place(self, first_token: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where values and scales of these tokens' rows lie: uint8 [rows, dim] and [rows, dim / 32]."""
        columns = self.part_n_hash_cols
        rows = slice(first_token * columns, (first_token + tokens) * columns)
        return self.values[rows], self.scales[rows]

    def lookup(self, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
        """Writes the staged rows into `out`, as vLLM's table would the rows of `indices`.

        indices: [tokens, n_hash_cols], of which only the number of tokens is looked at. out: bfloat16
        [tokens, columns of this rank, dim], or uint8 [tokens, columns, dim + dim / 32]: values, then scales.
        background: not used. Raises RuntimeError where the rows of so many tokens have not been staged.
        """
        self.expect(indices.shape[0])
        if self.complete is not None:
            self.complete()
        self.write(out)

    def expect(self, tokens: int) -> None:
        """Raises RuntimeError where a step's rows were staged for other tokens than the layer now asks for."""
        if self.staged_tokens is not None and tokens < self.staged_tokens:
            raise RuntimeError(
                f"the layer asks for rows of {tokens} tokens, but those of {self.staged_tokens} were staged: this "
                "vLLM runs a step otherwise than the engramd plug-in expects"
            )

    def write(self, out: torch.Tensor) -> None:
        """Writes the staged rows into `out` as lookup() does, with zeros past the staged tokens."""
        rows = out.shape[0] * self.part_n_hash_cols
        if not rows:
            return
        staged = (self.staged_tokens or 0) * self.part_n_hash_cols
        tiles = -(-rows // _BLOCK_ROWS)
        grid = min(tiles, self._most_programs(out.device))
        native._engram_lookup_kernel[(grid,)](
            self.values.view(torch.float8_e4m3fn),
            self.scales,
            self.positions,
            self.positions,
            out,
            0,
            staged,
            rows,
            self.part_n_hash_cols,
            1,
            HEAD_START=0,
            LOCAL_HEADS=self.part_n_hash_cols,
            TOTAL_HEADS=self.part_n_hash_cols,
            DIM=self.dim,
            QUANT_BLOCK=self.block_size,
            BLOCK_R=_BLOCK_ROWS,
            GRID=grid,
            SORTED=False,
            PACKED=out.dtype == torch.uint8,
            OUT_STRIDE=out.stride(0),
            PEER_ROWS=0,
        )

    def _most_programs(self, device: torch.device) -> int:
        if self._programs is None:
            is_cuda = device.type == "cuda"
            self._programs = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1
        return self._programs

    def collapse_huge_pages(self) -> None:
        """There is no table whose pages could be collapsed."""


class StagedEngram(native.Engram):  # type: ignore[misc]
    """vLLM's Engram layer over a StagedEmbedding."""

    strided = False

    def _create_embedding(self, layout: Any, layer_hash_index: int) -> StagedEmbedding:
        scheduler = native.get_current_vllm_config().scheduler_config
        return StagedEmbedding(
            layout.num_embeddings[layer_hash_index],
            layout.head_dim,
            tuple(size for order in layout.primes[layer_hash_index] for size in order),
            scheduler.max_num_batched_tokens,
            strided=self.strided,
        )

    def prepare_embeddings(self, hash_ids: torch.Tensor) -> None:
        """The rows were staged before the step: only checks that they are this step's."""
        self.embed_tokens.expect(hash_ids.shape[0])

    def embed(self, hash_ids: torch.Tensor) -> torch.Tensor:
        """As in vLLM: [tokens, n_hash_cols, dim] in the order of the columns, gathered from all ranks."""
        embedding = self.embed_tokens
        if embedding.complete is not None:
            embedding.complete()
        rows = super().embed(hash_ids)
        if embedding.strided:
            # Gathered rank by rank: column c of the hash is the (c // ranks)-th of rank c % ranks.
            by_rank = rows.unflatten(1, (embedding.tp_size, embedding.part_n_hash_cols))
            rows = by_rank.transpose(1, 2).flatten(1, 2)
        return rows


class StridedEngram(StagedEngram):
    """The layer whose ranks take every tp_size-th column each, so that all have their share of each n-gram order."""

    strided = True
