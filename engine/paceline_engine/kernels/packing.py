"""From fp32 matrices to the quantized holders."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline_engine.errors import InvalidValueError
from paceline_engine.kernels.weights import INT4_GROUP, Fp8Weight, Int4Weight, Int8Weight, pack_nibbles

FP8_MAX = 448.0
_CHUNK_ELEMENTS = 1 << 21
"""Rows are packed in chunks of about this many weights, so that temporaries stay in the cache."""
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.62)


def pack_int8(weight: Tensor) -> Int8Weight:
    """Round fp32 [N, K] to int8 with one scale for each row."""
    weight = checked(weight)
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(weight.shape[0])
    for rows in _row_chunks(weight):
        part = weight[rows].float()
        step = row_peak(part) / 127.0
        codes[rows] = (part / nonzero(step)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        scale[rows] = step
    return Int8Weight(codes=codes, scale=scale)


def pack_fp8(weight: Tensor) -> Fp8Weight:
    """Round fp32 [N, K] to e4m3fn with one scale for each row."""
    weight = checked(weight)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(weight.shape[0])
    for rows in _row_chunks(weight):
        part = weight[rows].float()
        step = row_peak(part) / FP8_MAX
        scaled = (part / nonzero(step)[:, None]).clamp_(-FP8_MAX, FP8_MAX)
        codes[rows] = scaled.to(torch.float8_e4m3fn)
        scale[rows] = step
    return Fp8Weight(codes=codes, scale=scale)


def pack_int4(weight: Tensor) -> Int4Weight:
    """Round fp32 [N, K] to 4 bits in groups of 32 along K, each with a scale and a minimum.

    For each group several clipped ranges are tried, each refined by a least-squares fit of scale and
    minimum to the codes it gives; the one with the smallest squared error stays.
    """
    weight = checked(weight)
    n_rows, n_inputs = weight.shape
    n_groups = -(-n_inputs // INT4_GROUP)
    codes = torch.empty((n_rows, n_groups * INT4_GROUP // 2), dtype=torch.uint8)
    scale = torch.empty((n_rows, n_groups), dtype=torch.bfloat16)
    minimum = torch.empty((n_rows, n_groups), dtype=torch.bfloat16)
    for rows in _row_chunks(weight):
        part = weight[rows].float()
        if n_inputs % INT4_GROUP:
            # The last value fills the group: it widens no range and leaves no error of its own.
            filler = part[:, -1:].expand(-1, n_groups * INT4_GROUP - n_inputs)
            part = torch.cat([part, filler], dim=1)
        groups = part.view(-1, n_groups, INT4_GROUP)
        scale[rows], minimum[rows] = search_int4(groups)
        codes[rows] = pack_nibbles(_encode_int4(groups, scale[rows], minimum[rows]).to(torch.uint8))
    return Int4Weight(codes=codes, scale=scale, minimum=minimum, n_inputs=torch.tensor(n_inputs))


def search_int4(
    groups: Tensor, importance: Tensor | None = None, *, clips: tuple[float, ...] = _CLIPS
) -> tuple[Tensor, Tensor]:
    """The best scales and minimums for these groups, bf16 [rows, n_groups].

    Args:
        groups: fp32 [rows, n_groups, 32].
        importance: fp32 [n_groups, 32], what the squared error of each column counts; None for all alike.
        clips: shares of a group's range to try.
    """
    low, high = groups.amin(-1), groups.amax(-1)
    middle, half = (low + high) / 2, (high - low) / 2
    best = _try_int4(groups, half * (2 / 15), low, importance)[1:]
    for clip in clips:
        codes, *first = _try_int4(groups, half * (clip * 2 / 15), middle - half * clip, importance)
        fitted = _fit(groups, codes, first[0], first[1], importance)
        for candidate in (first, _try_int4(groups, *fitted, importance)[1:]):
            better = candidate[2] < best[2]
            scale, minimum, error = (
                torch.where(better, new, old) for new, old in zip(candidate, best, strict=True)
            )
            best = scale, minimum, error
    return best[0], best[1]


def _try_int4(
    groups: Tensor, scale: Tensor, minimum: Tensor, importance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (as floats), the stored bf16 scale and minimum, and the squared error of each group."""
    stored_scale, stored_minimum = scale.bfloat16(), minimum.bfloat16()
    codes = _encode_int4(groups, stored_scale, stored_minimum)
    error = torch.addcmul(stored_minimum.float()[..., None], codes, stored_scale.float()[..., None])
    error.sub_(groups).square_()
    if importance is not None:
        error *= importance
    return codes, stored_scale, stored_minimum, error.sum(-1)


def _encode_int4(groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """The nearest codes, as floats, for a stored scale and minimum."""
    step, base = scale.float(), minimum.float()
    return (groups - base[..., None]).div_(nonzero(step)[..., None]).round_().clamp_(0, 15)


def _fit(
    groups: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, importance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Least-squares scale and minimum for fixed codes; where all codes are alike, what there was."""
    if importance is None:
        mean_code, mean = codes.mean(-1), groups.mean(-1)
        spread = weighted = codes - mean_code[..., None]
    else:
        shares = importance / importance.sum(-1, keepdim=True)
        mean_code, mean = (codes * shares).sum(-1), (groups * shares).sum(-1)
        spread = codes - mean_code[..., None]
        weighted = spread * shares
    variance = (spread * weighted).sum(-1)
    fitted = (weighted * groups).sum(-1) / nonzero(variance)
    usable = (variance > 0) & (fitted > 0)
    return (
        torch.where(usable, fitted, scale.float()),
        torch.where(usable, mean - fitted * mean_code, minimum.float()),
    )


def row_peak(part: Tensor) -> Tensor:
    return part.abs().amax(1) if part.shape[1] else part.new_zeros(part.shape[0])


def nonzero(step: Tensor) -> Tensor:
    """The step to divide by: 1 where it is 0, since all codes are 0 there anyway."""
    return torch.where(step == 0, 1.0, step)


def _row_chunks(weight: Tensor) -> list[slice]:
    n_rows, n_inputs = weight.shape
    size = max(1, _CHUNK_ELEMENTS // max(1, n_inputs))
    return [slice(start, min(start + size, n_rows)) for start in range(0, n_rows, size)]


def checked(weight: Tensor) -> Tensor:
    if weight.ndim != 2 or not weight.is_floating_point():
        raise InvalidValueError(
            "weight",
            observed=f"{weight.dtype} {list(weight.shape)}",
            limit="a floating-point matrix [N, K]",
            remedy="widen the tensor to fp32 before packing it",
        )
    for rows in _row_chunks(weight):
        part = weight[rows]
        # The extremes of values with a NaN are NaN.
        if part.numel() and not bool(torch.stack(part.aminmax()).isfinite().all()):
            raise InvalidValueError(
                "weight",
                observed="NaN or infinity",
                limit="finite",
                remedy="the checkpoint is damaged; fetch it again",
            )
    return weight
