"""Dequantisation with torch against an oracle in numpy. Skipped where torch is not installed."""

from __future__ import annotations

import numpy as np
import pytest
from engram_client.cuda.dequantise import dequantise
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="torch is not installed (an optional extra; its wheel is large)")


def oracle(rows: NDArray[np.uint8]) -> NDArray[np.float64]:
    """float64 [n, 256] of packed rows, from the definitions of E4M3 and E8M0."""
    values, scales = rows[:, :256].astype(np.int64), rows[:, 256:].astype(np.int64)
    sign = np.where(values & 0x80, -1.0, 1.0)
    exponent, fraction = (values >> 3) & 15, values & 7
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    factor = np.where(scales == 0, 0.0, 2.0 ** (scales - 127.0))
    numbers: NDArray[np.float64] = sign * magnitude * np.repeat(factor, 32, axis=1)
    return numbers


def test_every_value_and_scale() -> None:
    generator = np.random.default_rng(1)
    rows = generator.integers(0, 256, (500, 264), dtype=np.uint8)
    rows[:, :256][(rows[:, :256] & 0x7F) == 0x7F] = 0
    rows[:, 256:] = 107 + rows[:, 256:] % 21
    rows[0] = 0
    packed = dequantise(torch.from_numpy(rows))
    assert packed.dtype == torch.bfloat16
    assert packed.shape == (500, 256)
    assert np.array_equal(packed.to(torch.float64).numpy(), oracle(rows))
    shaped = torch.from_numpy(rows.reshape(20, 25, 264))
    split = dequantise(shaped[..., :256].contiguous(), shaped[..., 256:].contiguous())
    assert torch.equal(split.reshape(500, 256), packed)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 256"):
        dequantise(torch.zeros(3, 256, dtype=torch.uint8))
    with pytest.raises(ValueError, match="these 255"):
        dequantise(torch.zeros(3, 255, dtype=torch.uint8), torch.zeros(3, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="7 scales"):
        dequantise(torch.zeros(3, 256, dtype=torch.uint8), torch.zeros(3, 7, dtype=torch.uint8))
