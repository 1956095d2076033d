"""Every tensor type against gguf's own reference, and the K-quants against a block worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from paceline_engine.loading.gguf_file import BLOCKS_PER_CHUNK, widen
from paceline_engine.loading.gguf_header import TENSOR_TYPES

QUANTIZED = [name for name, per_block, _ in TENSOR_TYPES.values() if per_block > 1]


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_widening_in_chunks_is_the_reference(type_name: str) -> None:
    """More blocks than one chunk holds give what gguf gives for all at once."""
    width = next(block for name, _, block in TENSOR_TYPES.values() if name == type_name)
    random = np.random.default_rng(3)
    raw = random.integers(0, 120, (BLOCKS_PER_CHUNK + 3) * width, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(raw.reshape(1, -1), GGMLQuantizationType[type_name]).reshape(-1)
    np.testing.assert_array_equal(widen(raw, type_name), expected)


def test_a_q4_k_block_by_hand() -> None:
    """w = d * scale * q - dmin * min, with 6-bit scales for each 32 values."""
    block = np.zeros(144, np.uint8)
    block[0:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block[2:4] = np.frombuffer(np.float16(0.25).tobytes(), np.uint8)
    block[4] = 3
    block[8] = 2
    block[16] = 7
    values = widen(block, "Q4_K")
    assert values[0] == 0.5 * 3 * 7 - 0.25 * 2
    assert values[1] == -0.25 * 2
    assert not values[32:].any()


def test_a_q5_k_block_by_hand() -> None:
    """The fifth bit adds 16 to the value."""
    block = np.zeros(176, np.uint8)
    block[0:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block[4] = 3
    block[16] = 1
    block[48] = 7
    values = widen(block, "Q5_K")
    assert values[0] == 0.5 * 3 * (7 + 16)
    assert not values[1:].any()


def test_a_q6_k_block_by_hand() -> None:
    """Six bits less 32, with an 8-bit scale for each 16 values."""
    block = np.zeros(210, np.uint8)
    block[0] = 5
    block[128] = 2
    block[192] = 4
    block[208:210] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    values = widen(block, "Q6_K")
    assert values[0] == 0.5 * 4 * (5 + 2 * 16 - 32)
    assert values[1] == 0.5 * 4 * -32
    assert not values[16:].any()
