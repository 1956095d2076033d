"""Comparisons of variants in flight: a stretch of text a step, on blocks of their own."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from paceline_engine.cache.blocks import BlockPool
from paceline_engine.core import validate
from paceline_engine.core.base import StepOutput
from paceline_engine.cuda.faults import device_is_lost
from paceline_engine.errors import BackendError
from paceline_engine.fidelity import FidelityRequest
from paceline_engine.model.base import ModelRunner
from paceline_engine.quant.fidelity import FidelityPasses, blocks_needed, fidelity_passes
from paceline_engine.schedule.base import Weights


@dataclass(slots=True, kw_only=True, eq=False)
class _Comparison:
    request: FidelityRequest
    blocks: list[int] = field(default_factory=list[int])
    passes: FidelityPasses | None = None
    """None until there were blocks for it."""
    cancelled: bool = False


class Measurements:
    """One comparison runs at a time, in the order of their arrival. The engine's lock guards the list."""

    def __init__(self, runner: ModelRunner, pool: BlockPool, lock: threading.Lock, weights: Weights) -> None:
        self._runner = runner
        self._weights = weights
        self._pool = pool
        self._lock = lock
        self._waiting: list[_Comparison] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def enter(self, request: FidelityRequest) -> None:
        """Queue a comparison.

        Raises:
            InvalidValueError: ids that the model does not have.
            UnknownOptionError: the reference is not loaded.
            PromptTooLongError: it can never fit the context or the KV cache.
        """
        validate.check_fidelity(
            request, self._runner, blocks_needed=blocks_needed(len(request.token_ids), self._runner)
        )
        with self._lock:
            self._waiting.append(_Comparison(request=request))

    def cancel(self, request_id: str) -> None:
        """Forget a comparison at the next step. The caller holds the lock."""
        for each in self._waiting:
            each.cancelled |= each.request.id == request_id

    def step(self) -> StepOutput:
        """Run a stretch of the first comparison; gives what it came to where it has ended."""
        if (one := self._first()) is None or one.passes is None:
            return StepOutput()
        try:
            next(one.passes)
            return StepOutput()
        except StopIteration as ended:
            output = StepOutput(fidelities=((one.request.id, ended.value),))
        except Exception as error:
            if device_is_lost(error):
                raise
            failure = BackendError(f"the comparison failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            output = StepOutput(errors=((one.request.id, failure),))
        self._leave(one)
        return output

    def _first(self) -> _Comparison | None:
        while self._waiting and self._waiting[0].cancelled:
            self._leave(self._waiting[0])
        if not self._waiting:
            return None
        one = self._waiting[0]
        if one.passes is None:
            if missing := [each for each in self._runner.variants if not self._weights.ready(each)]:
                self._weights.want(missing[0])
                return None
            needed = blocks_needed(len(one.request.token_ids), self._runner)
            with self._lock:
                if needed > self._pool.n_free:
                    return None
                one.blocks = self._pool.allocate(needed)
            one.passes = fidelity_passes(self._runner, one.request, one.blocks)
        return one

    def _leave(self, one: _Comparison) -> None:
        with self._lock:
            self._waiting.remove(one)
            self._pool.release(one.blocks)
