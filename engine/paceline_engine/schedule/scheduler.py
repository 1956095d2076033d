"""Who runs in each step, and in which blocks.

Decodes run first. Prompts follow in the policy's order, in chunks; a queued one is admitted when there are
blocks for all of its tokens and every batch cap allows one more. When a decoding sequence finds no block,
the least urgent sequence gives its blocks back and is computed again later (preemption by recomputation, as
in vLLM, Kwon et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from paceline_engine.cache.blocks import BlockPool
from paceline_engine.cache.pins import Pins
from paceline_engine.cache.quality import worst
from paceline_engine.errors import UnknownOptionError
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.schedule.base import SequenceKey, StepDecision, StepPolicy, StepState, Weights
from paceline_engine.schedule.default import urgency
from paceline_engine.schedule.sequence import SequenceState
from paceline_engine.timeline import VARIANT_CHANGED, StepTime, TimelineEvent

CopyBlock = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sequence's part of a pass."""

    sequence: SequenceState
    token_ids: tuple[int, ...]
    logits: Logits
    decodes: bool
    block_table: tuple[int, ...]
    """Covers the tokens, and the drafts that may follow them."""
    max_drafts: int = 0
    """Draft tokens that there is room for after the one token of a decoding sequence."""
    n_drafts: int = 0
    """Draft tokens among ``token_ids``: the last of them."""

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.n_drafts :]

    @property
    def n_rows(self) -> int:
        """Rows of logits that it gets."""
        return {Logits.NONE: 0, Logits.LAST: 1, Logits.ALL: len(self.token_ids)}[self.logits]

    def with_drafts(self, token_ids: Sequence[int]) -> Work:
        """The same work, with drafts to verify: each of its tokens gets logits."""
        return replace(
            self,
            token_ids=(*self.token_ids, *token_ids),
            logits=Logits.ALL,
            n_drafts=len(token_ids),
        )

    def slice(self) -> SequenceSlice:
        return SequenceSlice(
            token_ids=self.token_ids,
            position=self.sequence.n_computed,
            block_table=self.block_table,
            logits=self.logits,
            adapter=self.sequence.adapter,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The sequences of one variant that run together."""

    variant: Variant
    work: tuple[Work, ...]


class _Selection:
    """The sequences taken into a step so far, under the batch caps of all of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._units: set[SequenceKey] = set()
        self.keys: set[SequenceKey] = set()
        self.work: list[Work] = []

    def admits(self, sequence: SequenceState) -> bool:
        if not self._units or sequence.unit in self._units:
            return True
        return len(self._units) + 1 <= min(self._most, sequence.plan.mode.batch_cap)

    def add(self, work: Work) -> None:
        sequence = work.sequence
        self._units.add(sequence.unit)
        self._most = min(self._most, sequence.plan.mode.batch_cap)
        self.keys.add(sequence.key)
        self.work.append(work)


class Scheduler:
    """The scheduling state: every sequence that has not ended, and the pool. Not thread-safe."""

    def __init__(
        self,
        pool: BlockPool,
        policy: StepPolicy,
        *,
        variants: Sequence[Variant],
        weights: Weights,
        max_prefill_tokens: int,
        max_sequences: int,
        max_pinned_share: float = 0.5,
    ) -> None:
        self.pool = pool
        self.policy = policy
        self._variants = frozenset(variants)
        self._weights = weights
        self._max_prefill_tokens = max_prefill_tokens
        self._max_sequences = max_sequences
        self.pins = Pins(pool, max_share=max_pinned_share)
        self._sequences: dict[SequenceKey, SequenceState] = {}
        self._in_flight: set[SequenceKey] = set()
        self._removed_in_flight: list[SequenceState] = []
        self._n_steps = 0
        self._previous: tuple[StepTime, ...] = ()

    @property
    def sequences(self) -> Iterable[SequenceState]:
        return self._sequences.values()

    def add(self, sequence: SequenceState) -> None:
        self._sequences[sequence.key] = sequence

    def remove(self, sequence: SequenceState) -> None:
        """Forget the sequence. Blocks that a running pass writes to are given back when it lands."""
        if self._sequences.pop(sequence.key, None) is None:
            return
        sequence.removed = True
        if sequence.key in self._in_flight:
            self._removed_in_flight.append(sequence)
        else:
            self._give_back(sequence)

    def schedule(self, now_s: float) -> tuple[Pass, ...]:
        """Choose the step's work and allocate its blocks. ``land`` must follow when it has run."""
        self._n_steps += 1
        self.pins.expire(now_s)
        # Those whose variant is being loaded hold no blocks yet: to the others it is as if they had not come.
        able = [sequence for sequence in self.sequences if self._weights.ready(sequence.variant)]
        decoding = [sequence for sequence in able if sequence.decoding]
        prefilling = [sequence for sequence in able if not sequence.decoding]
        if not decoding and not prefilling:
            return ()
        decision = self.policy.decide_step(self._state(now_s, decoding, prefilling))
        self._change_variants(decision, now_s)
        selection = _Selection(self._max_sequences)
        self._select_decodes(decoding, selection, now_s)
        self._select_prefills(decision, prefilling, selection)
        while not selection.work and self.pins.drop_oldest():
            self._select_prefills(decision, prefilling, selection)
        for work in selection.work:
            work.sequence.last_step = self._n_steps
        self._in_flight = selection.keys
        return _passes([self._make_room_for_drafts(work) for work in selection.work])

    def land(self, steps: tuple[StepTime, ...] = ()) -> None:
        """The step's passes have run, as ``steps`` tells: nothing writes to any block now."""
        self._in_flight = set()
        self._previous = steps
        for sequence in self._removed_in_flight:
            self._give_back(sequence)
        self._removed_in_flight.clear()

    def commit(self, sequence: SequenceState, n_tokens: int, variant: Variant) -> None:
        """``n_tokens`` more tokens stand in the sequence's blocks, written by ``variant``.

        Blocks that were taken for drafts, and hold none that was accepted, are given back.
        """
        sequence.n_computed += n_tokens
        n_kept = self._blocks_for(len(sequence.token_ids))
        self.pool.release(sequence.blocks[n_kept:])
        del sequence.blocks[n_kept:]
        sequence.kv_quality = worst(filter(None, (sequence.kv_quality, variant)))
        if sequence.scope is None:
            return
        size = self.pool.block_size
        for i in range(sequence.n_published, sequence.n_computed // size):
            tokens = sequence.token_ids[i * size : (i + 1) * size]
            sequence.node, sequence.blocks[i] = self.pool.publish(
                sequence.node or sequence.scope, sequence.blocks[i], tokens, sequence.kv_quality
            )
            sequence.n_published = i + 1

    def branch(self, parent: SequenceState, child: SequenceState, copy_block: CopyBlock) -> None:
        """Add ``child``, which shares the KV of ``parent``'s prompt.

        Full blocks are shared; the last one, where it is not full, is copied, because both will write to it.
        Where blocks are short the child starts with nothing and is computed again.
        """
        self.add(child)
        n_full, n_rest = divmod(parent.n_prompt, self.pool.block_size)
        n_own = self._blocks_for(len(child.token_ids)) - n_full
        if not parent.blocks or n_own > self.pool.n_free:
            return
        shared, own = parent.blocks[:n_full], self.pool.allocate(n_own)
        self.pool.retain(shared)
        if n_rest:
            copy_block(parent.blocks[n_full], own[0])
        child.blocks = shared + own
        child.n_computed = parent.n_prompt
        child.kv_quality = parent.kv_quality
        child.n_published = parent.n_published
        child.node = parent.node

    def set_variant(self, sequence: SequenceState, variant: Variant, now_s: float, *, why: str) -> None:
        """Run the sequence with ``variant`` from the next step on."""
        if variant == sequence.variant:
            return
        sequence.events.append(
            TimelineEvent(
                at_s=now_s,
                name=VARIANT_CHANGED,
                attributes={"from": str(sequence.variant), "to": str(variant), "why": why},
            )
        )
        sequence.variant = variant
        sequence.variant_changes += 1
        sequence.variant_since_tokens = max(0, sequence.n_output)

    def _state(
        self, now_s: float, decoding: Iterable[SequenceState], prefilling: Iterable[SequenceState]
    ) -> StepState:
        return StepState(
            now_s=now_s,
            decoding=tuple(sequence.view() for sequence in decoding),
            prefilling=tuple(sequence.view() for sequence in prefilling),
            free_blocks=self.pool.n_free,
            block_size=self.pool.block_size,
            max_prefill_tokens=self._max_prefill_tokens,
            previous=self._previous,
        )

    def _change_variants(self, decision: StepDecision, now_s: float) -> None:
        for key, variant in decision.variants.items():
            if variant not in self._variants:
                raise UnknownOptionError(
                    "variant",
                    observed=str(variant),
                    limit=f"one of {', '.join(sorted(self._variants))}",
                    remedy="let the step policy choose a variant that is loaded",
                )
            sequence = self._sequences.get(key)
            if sequence is None or sequence.variant_held:
                continue
            if not self._weights.ready(variant):
                self._weights.want(variant, urgent=False)  # the policy asks again while there is need
            else:
                self.set_variant(sequence, variant, now_s, why=decision.reasons.get(key, "the step policy"))

    def _select_decodes(self, decoding: Iterable[SequenceState], selection: _Selection, now_s: float) -> None:
        # Where caps do not let all of them run, those that have waited longest come first.
        for sequence in sorted(decoding, key=lambda one: (one.last_step, _urgency(one))):
            if sequence.decoding and selection.admits(sequence):
                self._make_room(sequence, selection, now_s)
                if sequence.blocks:
                    selection.add(self._work(sequence, 1, decodes=True))

    def _select_prefills(
        self, decision: StepDecision, prefilling: Sequence[SequenceState], selection: _Selection
    ) -> None:
        budget = min(decision.prefill_tokens, self._max_prefill_tokens)
        order: Sequence[SequenceKey] = decision.prefill_order
        if not selection.work:  # nothing else runs, so something must
            budget = max(1, budget)
            order = order or [sequence.key for sequence in sorted(prefilling, key=_urgency)]
        admitting = True
        for key in order:
            sequence = self._sequences.get(key)
            if budget < 1:
                return
            if sequence is None or sequence.decoding or not selection.admits(sequence):
                continue
            if not sequence.blocks:
                # What stands behind one that does not fit waits too, or small ones would starve it.
                admitting = admitting and self._admit(sequence)
                if not admitting:
                    continue
            n_tokens = min(budget, sequence.n_remaining)
            budget -= n_tokens
            selection.add(self._work(sequence, n_tokens, decodes=False))

    def _admit(self, sequence: SequenceState) -> bool:
        """Give a queued sequence blocks for all its tokens, cached ones first."""
        residents = {one.unit: one for one in self.sequences if one.blocks}
        caps = [self._max_sequences, sequence.plan.mode.batch_cap]
        caps += [one.plan.mode.batch_cap for one in residents.values()]
        crowd = sum(one.weight for one in residents.values()) + sequence.weight
        if residents and sequence.unit not in residents and crowd > min(caps):
            return False
        blocks: list[int] = []
        match = None
        if sequence.scope is not None:
            mix = sequence.plan.mode.mix_cache
            match = self.pool.match(sequence.reusable_ids, sequence.scope, sequence.variant, mix=mix)
            blocks += match.blocks
        self.pool.retain(blocks)
        missing = self._blocks_for(len(sequence.token_ids)) - len(blocks)
        if missing > self.pool.n_free:
            self.pool.release(blocks)
            return False
        if match is not None and match.blocks:
            sequence.node = match.node
            sequence.kv_quality = worst(match.written_by)
        sequence.n_published = len(blocks)
        sequence.n_computed = len(blocks) * self.pool.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.n_computed
        sequence.blocks = blocks + self.pool.allocate(missing)
        return True

    def _make_room(self, sequence: SequenceState, selection: _Selection, now_s: float) -> None:
        """A block for the next token; less urgent sequences give theirs, or else this one its own."""
        if len(sequence.blocks) >= self._blocks_for(sequence.n_computed + 1):
            return
        while self.pool.n_free == 0:
            victims = (one for one in self.sequences if one.blocks and one.key not in selection.keys)
            victim = max(victims, key=_urgency)
            if victim is sequence and self.pins.drop_oldest():
                continue
            self._preempt(victim, now_s)
            if victim is sequence:
                return
        sequence.blocks += self.pool.allocate(1)

    def _make_room_for_drafts(self, work: Work) -> Work:
        """Blocks for the drafts of a decoding sequence, out of those that nobody needs in this step."""
        sequence = work.sequence
        speculation = sequence.plan.mode.speculation
        if speculation is None or not work.decodes:
            return work
        n_left = sequence.plan.max_tokens - sequence.n_output
        wanted = min(speculation.max_draft_tokens, n_left - 1)
        n_more = self._blocks_for(sequence.n_computed + 1 + wanted) - len(sequence.blocks)
        if n_more > 0:
            sequence.blocks += self.pool.allocate(min(n_more, self.pool.n_free))
        room = len(sequence.blocks) * self.pool.block_size - sequence.n_computed - 1
        return replace(work, block_table=tuple(sequence.blocks), max_drafts=max(0, min(wanted, room)))

    def _preempt(self, sequence: SequenceState, now_s: float) -> None:
        attributes = {"computed_tokens": sequence.n_computed}
        sequence.events.append(TimelineEvent(at_s=now_s, name="preempted", attributes=attributes))
        self._give_back(sequence)

    def _give_back(self, sequence: SequenceState) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.n_computed = 0
        sequence.n_published = 0
        sequence.node = None
        sequence.kv_quality = None

    def _work(self, sequence: SequenceState, n_tokens: int, *, decodes: bool) -> Work:
        start, end = sequence.n_computed, sequence.n_computed + n_tokens
        logits = Logits.LAST if end == len(sequence.token_ids) else Logits.NONE
        if sequence.scored and end > sequence.n_prompt:
            logits = Logits.ALL
        size = self.pool.block_size
        table = sequence.blocks[: self._blocks_for(end)]
        assert all(self.pool.references(block) == 1 for block in table[start // size :]), (
            "a pass would write to a shared block"
        )
        return Work(
            sequence=sequence,
            token_ids=tuple(sequence.token_ids[start:end]),
            logits=logits,
            decodes=decodes,
            block_table=tuple(table),
        )

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.pool.block_size)


def _urgency(sequence: SequenceState) -> tuple[float, float, int, int]:
    return (*urgency(sequence.plan, sequence.arrival), sequence.key.index)


def _passes(work: Iterable[Work]) -> tuple[Pass, ...]:
    by_variant: dict[Variant, list[Work]] = {}
    for part in work:
        by_variant.setdefault(part.sequence.variant, []).append(part)
    return tuple(Pass(variant=variant, work=tuple(parts)) for variant, parts in by_variant.items())
