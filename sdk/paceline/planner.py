"""The policy of a client: predictors that were calibrated or learn from traffic, and the choice of a mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from paceline.policy import Ask, Served
from paceline.step_policy import StepPolicyLink
from paceline_engine.mode import Mode
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import Timeline
from paceline_policies.decide import BackendState, Remaining, decide
from paceline_policies.decision import Decision
from paceline_policies.modes import candidate_modes
from paceline_policies.predictor import Predictor
from paceline_policies.profile import Profile

DEFAULT_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    served: Served
    predictor: Predictor
    modes: tuple[Mode, ...]
    save: Callable[[Profile], object] | None
    step_policy: StepPolicyLink | None

    @property
    def mixing_modes(self) -> tuple[Mode, ...]:
        """The modes with a prefix cache that serves what lower variants computed."""
        return tuple(replace(mode, mix_cache=True) for mode in self.modes)


class Planner:
    """Implements ``paceline.policy.Policy``; safe for threads."""

    def __init__(
        self,
        served: Mapping[str, Served],
        profiles: Mapping[str, Profile],
        *,
        save: Mapping[str, Callable[[Profile], object]] | None = None,
    ) -> None:
        # Predictors are not safe for threads, and turns may run in several loops at once.
        self._lock = threading.Lock()
        self._known = {
            name: _Known(
                served=each,
                predictor=Predictor(profiles[name], chunk_tokens=_chunk_tokens(each)),
                modes=candidate_modes(each.info),
                save=(save or {}).get(name),
                step_policy=StepPolicyLink.of(each.backend),
            )
            for name, each in served.items()
        }
        for known in self._known.values():
            if known.step_policy is not None:
                known.step_policy.renew(known.predictor.profile)

    def decide(self, ask: Ask, snapshots: Mapping[str, Snapshot]) -> Decision:
        states = [
            BackendState(
                name=name,
                snapshot=snapshot,
                predictor=self._known[name].predictor,
                info=self._known[name].served.info,
                modes=self._known[name].mixing_modes if ask.mix_cache else self._known[name].modes,
            )
            for name, snapshot in snapshots.items()
        ]
        left = Remaining(ttft_ms=ask.left.ttft_ms, tpot_ms=ask.left.tpot_ms, e2e_ms=ask.left.e2e_ms)
        with self._lock:
            return decide(
                ask.slo,
                left,
                states,
                max_tokens=max(1, ask.max_tokens),
                now_s=ask.now_s,
                kind="choose" if ask.option_tokens else "chat",
                option_tokens=ask.option_tokens,
                choices=ask.n,
            )

    def queue_ms(self, decision: Decision, snapshot: Snapshot) -> float:
        waits_for = snapshot.running or snapshot.waiting_prefill_tokens or snapshot.loading_s
        if decision.plan is None or not waits_for:
            return 0.0
        idle = replace(
            snapshot,
            running=0,
            running_context_tokens=0,
            running_variant=None,
            waiting=0,
            waiting_prefill_tokens=0,
            loading_s={},
        )
        predictor = self._known[decision.backend].predictor
        with self._lock:
            found = [
                predictor.predict(decision.plan.mode, look, max_tokens=1).ttft.p50_ms
                for look in (snapshot, idle)
            ]
        return max(0.0, found[0] - found[1])

    def observe(self, decision: Decision, snapshot: Snapshot, timeline: Timeline) -> None:
        if decision.plan is None:
            return
        known = self._known[decision.backend]
        with self._lock:
            known.predictor.observe(decision.plan.mode, snapshot, decision.prediction, timeline)
            if known.step_policy is not None:
                known.step_policy.renew(known.predictor.profile)

    def profile(self, backend: str) -> Profile:
        """What is known of a backend now."""
        with self._lock:
            return self._known[backend].predictor.profile

    def save(self) -> None:
        for name, known in self._known.items():
            if known.save is not None:
                known.save(self.profile(name))


def _chunk_tokens(served: Served) -> int:
    """Most prompt tokens in one step of the backend, where its configuration tells."""
    config = getattr(served.backend, "config", None)
    found = getattr(config, "max_prefill_tokens_per_step", None)
    return found if isinstance(found, int) else DEFAULT_CHUNK_TOKENS
