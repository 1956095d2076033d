"""The engine: takes requests from any thread, runs them step by step on one.

A step reads: schedule, run, commit, emit. The lock guards the scheduling state and is given back while the
model runs, so that submitting, aborting and looking never wait for a pass.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline_engine.cache.blocks import BlockPool
from paceline_engine.core import validate
from paceline_engine.core.adapters import Adapters
from paceline_engine.core.base import EngineConfig, StepOutput
from paceline_engine.core.drafting import DraftedStep, draft_step
from paceline_engine.core.generation import Generation
from paceline_engine.core.ledger import Ledger
from paceline_engine.core.measuring import Measurements
from paceline_engine.core.passes import PassResult, run_pass
from paceline_engine.core.residency import Residency
from paceline_engine.core.scoring import Scoring
from paceline_engine.errors import InvalidValueError
from paceline_engine.fidelity import FidelityRequest
from paceline_engine.grammar.base import Grammar
from paceline_engine.grammar.compiler import Compiled, GrammarCompiler
from paceline_engine.loading.base import Tokenizer
from paceline_engine.mode import Variant
from paceline_engine.model.base import ModelRunner
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, ScoreRequest
from paceline_engine.schedule.base import SequenceKey, StepPolicy
from paceline_engine.schedule.default import EarliestFirst
from paceline_engine.schedule.scheduler import Pass, Scheduler
from paceline_engine.schedule.sequence import SequenceState
from paceline_engine.snapshot import Snapshot
from paceline_engine.speculate.sessions import SessionKey
from paceline_engine.speculate.speculator import Speculator
from paceline_engine.speculate.vocabulary import common_ids


class Engine:
    """Continuous batching over one model runner.

    ``step`` belongs to one thread; every other method may be called from any thread at any time.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        *,
        config: EngineConfig | None = None,
        step_policy: StepPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._config = config if config is not None else EngineConfig()
        self._clock = clock
        self._lock = threading.Lock()
        self._pool = BlockPool(runner.n_blocks, runner.block_size)
        self._residency = Residency(runner, clock)
        self._scheduler = Scheduler(
            self._pool,
            step_policy if step_policy is not None else EarliestFirst(),
            variants=runner.variants,
            weights=self._residency,
            max_prefill_tokens=self._config.max_prefill_tokens_per_step,
            max_sequences=self._config.max_sequences,
            max_pinned_share=self._config.max_pinned_share,
        )
        self._measurements = Measurements(runner, self._pool, self._lock, self._residency)
        self._eos_ids = frozenset((*tokenizer.eos_token_ids, *runner.spec.eos_token_ids))
        self._grammars = GrammarCompiler(
            tokenizer,
            vocab_size=runner.spec.vocab_size,
            end_ids=self._eos_ids,
            others_run=lambda: self.has_work,
        )
        self._speculator = Speculator(
            runner,
            common_ids(tokenizer, runner.spec.vocab_size, also=self._eos_ids),
            clock=clock,
            ready=self._residency.ready,
            adapt=self._config.adapt_drafts,
        )
        self._ledger = Ledger(
            self._scheduler,
            self._residency,
            self._speculator.sessions,
            runner.copy_block,
            self._config.max_steps_recorded,
        )
        self._adapters = Adapters(runner, model_fingerprint=self._config.model_fingerprint)
        self._n_arrived = 0

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to run or to emit."""
        with self._lock:
            return bool(self._ledger.requests) or self._measurements.has_work

    def prepare_grammars(self) -> None:
        """Do now what is done once for all grammars, and holds the interpreter lock for half a second.

        Raises:
            MissingExtraError: the grammar library is not installed.
        """
        self._grammars.prepare()

    def submit(self, request: GenerationRequest, plan: Plan, *, submitted_at_s: float) -> None:
        """Queue a generation. A grammar is compiled here, on the caller's thread.

        Raises:
            InvalidValueError: the request or plan does not suit the model, or its grammar is not valid.
            UnknownOptionError: its adapter is not loaded.
            MissingExtraError: it has a grammar, and the grammar library is not installed.
            PromptTooLongError: it can never fit the context or the KV cache.
            DeadlineExpiredError: the plan's deadline has passed.
        """
        validate.check_generation(request, plan, self._runner)
        self._check_deadline(plan)
        sequence = self._new_sequence(request, plan, submitted_at_s, weight=request.n)
        grammar = None
        if request.grammar is not None:
            at_once = self._grammars.has(request.grammar)
            grammar = self._compile(request.grammar, plan)
            sequence.queued_at_s = None if at_once else self._clock()
        self._enter(
            Generation(
                request,
                plan,
                sequence,
                tokenizer=self._tokenizer,
                eos_ids=self._eos_ids,
                grammar=grammar,
            )
        )

    def submit_score(self, request: ScoreRequest, plan: Plan, *, submitted_at_s: float) -> None:
        """Queue a scoring. Raises as ``submit`` does."""
        options = list(request.option_token_ids) or [
            self._tokenizer.encode(option) for option in request.options
        ]
        validate.check_score(request, plan, options, self._runner)
        self._check_deadline(plan)
        sequence = self._new_sequence(request, plan, submitted_at_s, scored=True)
        self._enter(Scoring(request, plan, sequence, options))

    def submit_fidelity(self, request: FidelityRequest) -> None:
        """Queue a comparison of the variants on a text: streams wait while a stretch of it runs.

        Raises:
            InvalidValueError: ids that the model does not have.
            UnknownOptionError: the reference is not loaded.
            PromptTooLongError: it can never fit the context or the KV cache.
        """
        self._measurements.enter(request)

    def abort(self, request_id: str) -> None:
        """End a request from outside; unknown ids are ignored, since it may just have ended.

        Its KV blocks are free at once, or after the pass that writes to them. The next step emits a chunk
        with finish reason ``cancelled`` for each choice that had not ended.
        """
        with self._lock:
            self._ledger.cancel(request_id)
            self._measurements.cancel(request_id)

    def change_variant(self, request_id: str, variant: Variant) -> None:
        """Run the request with ``variant`` from its next token on, whatever the step policy would choose.

        Unknown ids are ignored. Where the variant has yet to be loaded, the request goes on as it is until
        then, and stays as it is where that fails.

        Raises:
            UnknownOptionError: the variant is not loaded.
        """
        validate.check_variant(variant, self._runner.variants)
        with self._lock:
            self._ledger.move(request_id, variant, self._clock())

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that are served."""
        return self._adapters.names

    def load_adapter(self, name: str, path: str) -> None:
        """Serve a LoRA adapter under a name; requests that name it from now on use it.

        Under a name that is taken it replaces the other, whose requests in flight end with it. What the
        prefix cache holds is kept by the adapter's weights: new ones find nothing of the old ones'.

        Raises:
            ModelError: it cannot be found or read, or is for another model.
        """
        self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Serve it no more; requests in flight end with it.

        Raises:
            UnknownOptionError: no adapter of that name is loaded.
        """
        self._adapters.unload(name)

    def pin(
        self,
        pin_id: str,
        token_ids: Sequence[int],
        *,
        hold_s: float,
        salt: str = "",
        adapter: str | None = None,
    ) -> int:
        """Keep a prompt's cached prefix from being evicted for ``hold_s``; gives the tokens that are kept.

        At most ``EngineConfig.max_pinned_share`` of all blocks are pinned: of what does not fit, as of
        what is not cached, nothing is kept. A pin of the same id is replaced. Pins end early, oldest
        first, where nothing else could run without their blocks.
        """
        scope = self._adapters.scope(self._adapters.get(adapter), salt)
        with self._lock:
            now_s = self._clock()
            self._scheduler.pins.expire(now_s)
            return self._scheduler.pins.pin(pin_id, token_ids, scope, expires_at_s=now_s + hold_s)

    def unpin(self, pin_id: str) -> None:
        """Let a pinned prefix be evicted again; an unknown or expired pin is ignored."""
        with self._lock:
            self._scheduler.pins.unpin(pin_id)

    def end_session(self, session: str, *, salt: str = "") -> None:
        """Forget what was said in a session, but for what streams that run draft from."""
        self._speculator.sessions.end(SessionKey(session=session, salt=salt))

    def snapshot(self, token_ids: Sequence[int], *, salt: str = "", adapter: str | None = None) -> Snapshot:
        """The state now, with how much of a prompt is cached. Does not wait for a running pass."""
        scope = self._adapters.scope(self._adapters.get(adapter), salt)
        with self._lock:
            self._scheduler.pins.expire(self._clock())
            running = [one for one in self._scheduler.sequences if one.decoding]
            waiting = [one for one in self._scheduler.sequences if not one.decoding]
            variants = Counter(one.variant for one in running).most_common(1)
            return Snapshot(
                taken_at_s=self._clock(),
                prompt_tokens=len(token_ids),
                adapter=adapter,
                cached_tokens=self._pool.cached_tokens(token_ids, scope, self._runner.variants),
                cached_mixed_tokens=self._pool.mixed_tokens(token_ids, scope),
                running=len(running),
                running_context_tokens=sum(len(one.token_ids) for one in running),
                running_variant=variants[0][0] if variants else None,
                waiting=len(waiting),
                waiting_prefill_tokens=sum(one.n_remaining for one in waiting),
                free_blocks=self._pool.n_free,
                total_blocks=self._pool.n_blocks,
                block_size=self._pool.block_size,
                pinned_blocks=self._scheduler.pins.n_blocks,
                loading_s=self._residency.remaining_s(self._runner.variants),
            )

    def step(self) -> StepOutput:
        """Run every sequence that may run once, and give what came of it.

        A failing pass ends its own requests with ``BackendError``, in the output. What is raised is a fault
        of the engine or of its step policy, after which it must not be used.
        """
        drafted = self._draft(self._schedule())
        results = [self._run(part) for part in drafted.passes]
        measured = self._measurements.step()
        output = self._commit(drafted, results)
        return replace(output, fidelities=measured.fidelities, errors=output.errors + measured.errors)

    def _schedule(self) -> tuple[Pass, ...]:
        with self._lock:
            now_s = self._clock()
            self._ledger.end_overdue(now_s)
            for loaded in self._residency.take_ended():
                self._ledger.settle(loaded)
            return self._scheduler.schedule(now_s)

    def _draft(self, passes: tuple[Pass, ...]) -> DraftedStep:
        return draft_step(passes, self._ledger.requests, self._speculator)

    def _run(self, part: Pass) -> PassResult:
        return run_pass(part, self._runner, self._ledger.requests, self._clock)

    def _commit(self, drafted: DraftedStep, results: Sequence[PassResult]) -> StepOutput:
        self._learn(drafted, results)
        with self._lock:
            ran = [step for step, _ in drafted.steps] + [each.step for each in results if each.error is None]
            self._scheduler.land(tuple(ran))
            self._ledger.commit_drafts(drafted, self._clock())
            for result in results:
                self._ledger.commit(result)
            return self._ledger.emit()

    def _compile(self, grammar: Grammar, plan: Plan) -> Compiled:
        compiled = self._grammars.compile(grammar)
        validate.check_grammar_fits(compiled, plan)
        self._check_deadline(plan)  # compiling takes time
        return compiled

    def _learn(self, drafted: DraftedStep, results: Sequence[PassResult]) -> None:
        for result in results:
            if result.error is None:
                self._speculator.observe(result.step)
        draws = {
            id(draw.choice): draw for result in results for part in result.results for draw in part.draws
        }
        for draft in drafted.drafts:
            if (draw := draws.get(id(draft.choice))) is not None and draft.choice.drafts is not None:
                n_accepted = draw.n_accepted(draft.proposal.token_ids)
                self._speculator.learn(draft.choice.drafts, draft.proposal, n_accepted)

    def _check_deadline(self, plan: Plan) -> None:
        if (error := validate.deadline_error(plan, self._clock())) is not None:
            raise error

    def _enter(self, job: Generation | Scoring) -> None:
        request_id = job.request.id
        with self._lock:
            if request_id in self._ledger.requests:
                raise InvalidValueError(
                    "id",
                    observed=request_id,
                    limit="unique among the requests in flight",
                    remedy="give each request an id of its own",
                )
            # The order of arrival is the order of entry, whatever the threads did before.
            self._n_arrived += 1
            job.first_sequence.arrival = self._n_arrived
            self._ledger.enter(job)
        self._residency.want(job.plan.mode.variant)
        speculation = job.plan.mode.speculation
        later = (None if speculation is None else speculation.draft_variant, *job.plan.fallback_variants)
        for variant in filter(None, later):
            self._residency.want(variant, urgent=False)

    def _new_sequence(
        self,
        request: GenerationRequest | ScoreRequest,
        plan: Plan,
        submitted_at_s: float,
        *,
        scored: bool = False,
        weight: int = 1,
    ) -> SequenceState:
        token_ids = list(request.prompt.token_ids)
        adapter = self._adapters.get(request.adapter)
        return SequenceState(
            SequenceKey(request_id=request.id, index=0),
            token_ids,
            n_prompt=len(token_ids),
            plan=plan,
            arrival=0,
            submitted_at_s=submitted_at_s,
            scope=self._adapters.scope(adapter, request.salt) if plan.mode.prefix_cache else None,
            adapter=adapter,
            scored=scored,
            weight=weight,
        )
