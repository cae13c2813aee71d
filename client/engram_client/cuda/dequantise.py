"""Fetched rows to bfloat16, as plain torch operations: FP8 E4M3 values in groups that share an E8M0 scale.

Works on any device torch has, inside captured graphs too: views, one product, no host work. torch is imported at the
first call only.
"""

from __future__ import annotations

from typing import Any


def dequantise(rows: Any, scales: Any = None, *, value_bytes: int = 256) -> Any:
    """bfloat16 [*S, value_bytes] of packed rows uint8 [*S, row_bytes], or of the pair of a split fetch.

    rows: torch tensor of bytes: packed rows (scales None), or values [*S, value_bytes] with scales [*S, scale_bytes].
    Each scale byte x stands for 2^(x - 127) and holds for value_bytes / scale_bytes successive values (32 in Engram
    tables). A row of zeros (row id -1) gives zeros. The product is exact: a power of two times a value of 4 significant
    bits, in the range that bfloat16 has.
    Raises ValueError where the shapes do not fit, ImportError without torch.
    """
    import torch

    if scales is None:
        if rows.shape[-1] <= value_bytes:
            raise ValueError(f"packed rows have more than {value_bytes} bytes, these {rows.shape[-1]}")
        values, scales = rows[..., :value_bytes], rows[..., value_bytes:]
    else:
        values = rows
        if values.shape[-1] != value_bytes:
            raise ValueError(f"values have {value_bytes} bytes, these {values.shape[-1]}")
    groups = scales.shape[-1]
    if groups == 0 or value_bytes % groups or values.shape[:-1] != scales.shape[:-1]:
        raise ValueError(f"{groups} scales do not divide {value_bytes} values, or the shapes differ")
    # The bytes of a bfloat16 with exponent x and no fraction: its bits are x << 7. 0 gives 0, which is right for the
    # row of zeros (2^-127 itself is below the smallest scale that tables have).
    powers = (scales.view(torch.uint8).to(torch.int16) << 7).view(torch.bfloat16)
    numbers = values.view(torch.float8_e4m3fn).to(torch.bfloat16)
    grouped = numbers.unflatten(-1, (groups, value_bytes // groups))
    return (grouped * powers.unsqueeze(-1)).flatten(-2)
