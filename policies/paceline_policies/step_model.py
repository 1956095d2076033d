"""What one engine step costs: a model with a physical form, fitted to the steps that were seen.

    seconds = fixed                        reading the weights once, launching the operators
            + chunk        if it prefills  the other code path of a step that prefills
            + small  · min(P, knee)        prefill tokens while the pass is memory-bound
            + large  · max(0, P - knee)    prefill tokens once it is compute-bound: FLOPs / peak
            + decode · D                   tokens of sequences that decode
            + kv     · C                   KV entries read by a step that only decodes: bytes / bandwidth
            + pair   · A                   pairs of tokens that attend to each other

The two slopes of P are a roofline (Williams et al., 2009) in either direction: below the knee a token
may cost less than above it (weights are being read anyway) or more (small products run inefficiently).
All coefficients are non-negative, so more work never predicts less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline_engine.errors import InvalidValueError
from paceline_engine.timeline import StepTime, Timeline
from paceline_policies.nnls import nnls

FloatArray = NDArray[np.float64]

N_FEATURES = 7
_KNEES = (0, 16, 64)
_HUBER = 1.345
"""Residuals beyond this many robust deviations weigh less (95% efficient for normal noise; Huber, 1964)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """The work of one step, or the summed work of several."""

    passes: float = 1.0
    prefill_passes: float = 0.0
    prefill_sizes: tuple[tuple[float, float], ...] = ()
    """(how many passes, prefill tokens in each)."""
    decode_tokens: float = 0.0
    decode_context: float = 0.0
    """KV entries read in passes that only decode."""
    attended_pairs: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Coefficients of the form above, for one variant on one machine."""

    fixed_s: float
    chunk_s: float = 0.0
    small_s: float = 0.0
    """Per prefill token up to the knee."""
    large_s: float = 0.0
    """Per prefill token past the knee."""
    decode_s: float = 0.0
    kv_s: float = 0.0
    pair_s: float = 0.0
    knee: int = 0
    error: float = 0.0
    """Median relative error over the steps that it was fitted to."""

    def seconds(self, load: StepLoad) -> float:
        """Predicted time of the work."""
        total = self.fixed_s * load.passes + self.chunk_s * load.prefill_passes
        for n_passes, size in load.prefill_sizes:
            below = min(size, self.knee)
            total += n_passes * (self.small_s * below + self.large_s * (size - below))
        return (
            total
            + self.decode_s * load.decode_tokens
            + self.kv_s * load.decode_context
            + self.pair_s * load.attended_pairs
        )

    def pass_seconds(self, *, prefill: int, decode: float, context: float, pairs: float) -> float:
        """Predicted time of one pass: tokens that prefill and decode, KV entries, pairs that attend."""
        seconds = self.fixed_s + self.decode_s * decode + self.pair_s * pairs
        if prefill:
            below = min(prefill, self.knee)
            return seconds + self.chunk_s + self.small_s * below + self.large_s * (prefill - below)
        return seconds + self.kv_s * context

    def step_seconds(self, step: StepTime) -> float:
        """Predicted time of a step that was run."""
        return self.pass_seconds(
            prefill=step.prefill_tokens,
            decode=step.decode_tokens,
            context=step.context_tokens,
            pairs=step.attended_pairs,
        )


def features(steps: Sequence[StepTime], knee: int) -> FloatArray:
    """The load of each step in the order of the coefficients: [steps, N_FEATURES]."""
    rows = np.empty((len(steps), N_FEATURES))
    for row, step in zip(rows, steps, strict=True):
        prefill = step.prefill_tokens
        below = min(prefill, knee)
        row[:] = (
            1.0,
            prefill > 0,
            below,
            prefill - below,
            step.decode_tokens,
            0.0 if prefill else step.context_tokens,
            step.attended_pairs,
        )
    return rows


def fit(steps: Iterable[StepTime], *, knees: Sequence[int] = _KNEES) -> StepModel:
    """Fit the form to steps of one variant.

    Minimizes the relative error, sum of w · ((predicted - measured) / predicted)², over non-negative
    coefficients, by iteratively reweighted least squares with Huber's weights (Huber, 1964; the scale is
    the median absolute deviation), so that a few slow steps of a shared machine do not bend it. Steps
    that prefill weigh as much in sum as steps that do not. The knee is the one of ``knees`` whose
    absolute relative errors sum least; a later one must be better by 5%.

    Raises:
        InvalidValueError: no step took any time.
    """
    usable = [step for step in steps if step.ended_at_s > step.started_at_s]
    if not usable:
        raise InvalidValueError(
            "steps", observed=0, limit="at least one step with a duration", remedy="run the calibration again"
        )
    seconds = np.array([step.ended_at_s - step.started_at_s for step in usable])
    prefills = np.array([step.prefill_tokens > 0 for step in usable])
    n_prefills = int(prefills.sum())
    balance = np.ones(len(usable))
    if 0 < n_prefills < len(usable):
        balance[prefills] = (len(usable) - n_prefills) / n_prefills
    best: StepModel | None = None
    best_loss = np.inf
    for knee in knees:
        coefficients, errors = _robust_fit(features(usable, knee), seconds, balance)
        loss = float((balance * np.minimum(np.abs(errors), 1.0)).sum())
        if best is None or loss < 0.95 * best_loss:
            best_loss = loss
            best = StepModel(
                fixed_s=coefficients[0],
                chunk_s=coefficients[1],
                small_s=coefficients[2],
                large_s=coefficients[3],
                decode_s=coefficients[4],
                kv_s=coefficients[5],
                pair_s=coefficients[6],
                knee=knee,
                error=float(np.median(np.abs(errors))),
            )
    assert best is not None
    return best


def _robust_fit(x: FloatArray, seconds: FloatArray, balance: FloatArray) -> tuple[list[float], FloatArray]:
    """(coefficients, relative errors)."""
    weights, scale = balance, seconds
    coefficients = np.zeros(x.shape[1])
    errors = np.zeros_like(seconds)
    for _ in range(8):
        root = np.sqrt(weights) / scale
        coefficients = nnls(x * root[:, None], seconds * root)
        predicted = np.maximum(x @ coefficients, 1e-9)
        errors = seconds / predicted - 1.0
        deviation = max(1.4826 * float(np.median(np.abs(errors - np.median(errors)))), 1e-6)
        # Dividing by what is predicted, not by what was measured: the latter favours steps that
        # happened to be fast and would bend the fit below them.
        scale = predicted
        weights = balance * np.minimum(1.0, _HUBER * deviation / np.maximum(np.abs(errors), 1e-12))
    return [float(value) for value in coefficients], errors


def phase_steps(timeline: Timeline) -> tuple[StepTime, ...]:
    """One prefill step and one decode step that stand for the phases of a timeline without step records.

    A backend that does not tell its steps (a remote server) is learned in the same form this way: its
    network and queue end up in ``chunk_s``, its decoding in ``fixed_s``, ``decode_s`` and ``kv_s``.
    """
    ttft_ms, tpot_ms = timeline.ttft_ms(), timeline.tpot_ms()
    if ttft_ms is None:
        return ()
    first_at = timeline.submitted_at_s + ttft_ms / 1e3
    prompt = max(1, timeline.prompt_tokens)
    new = max(1, prompt - timeline.cached_tokens)
    steps = [
        StepTime(
            started_at_s=timeline.submitted_at_s,
            ended_at_s=first_at,
            variant=timeline.mode.variant,
            prefill_tokens=new,
            decode_tokens=0,
            n_sequences=1,
            context_tokens=prompt,
            attended_pairs=new * (prompt - new) + new * (new + 1) // 2,
        )
    ]
    if tpot_ms is not None:
        context = prompt + timeline.n_tokens // 2
        steps.append(
            StepTime(
                started_at_s=first_at,
                ended_at_s=first_at + tpot_ms / 1e3,
                variant=timeline.mode.variant,
                prefill_tokens=0,
                decode_tokens=1,
                n_sequences=1,
                context_tokens=context,
                attended_pairs=context,
            )
        )
    return tuple(steps)
