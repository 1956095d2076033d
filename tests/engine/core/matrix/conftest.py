"""Real tiny models in every mode: precision, drafting, cache, batch cap, chunks, step policy, pool size.

A mode's runner computes with the real weights in fp32 arithmetic. Its KV starts as NaN, so that one slot read
before it is written ruins an output, and it remembers which token each slot was written for.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_engine.core import Engine, EngineConfig
from paceline_engine.loading import open_checkpoint
from paceline_engine.mode import Drafter, Speculation, Variant
from paceline_engine.model.adapter import Adapter
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.kv import PagedKV
from paceline_engine.model.runner import TorchRunner
from paceline_engine.plan import Plan
from paceline_engine.schedule.default import EarliestFirst
from paceline_engine.speculate.speculator import Speculator
from paceline_policies.pacing import Pacer, StepNumbers
from paceline_policies.pacing.numbers import VariantNumbers
from paceline_policies.step_model import StepModel

FAMILIES = ("gemma3", "llama", "mistral", "qwen3")
BLOCK_SIZE = 4
ROOMY, CROWDED = 64, 10
OWN_PASS_S, OTHER_PASS_S = 0.06, 0.02
"""What a pass takes: of the mode's own variant, and of those that its streams may be moved to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mode of the engine."""

    variant: Variant
    drafter: str
    policy: str
    """``moving``: streams change their variant on the way, as a pacing policy moves them. All variants then
    compute as ``variant`` does, so that outputs stay comparable."""
    family: str
    cached: bool
    batch_cap: int
    chunk: int
    crowded: bool

    @property
    def label(self) -> str:
        extras = [
            self.family,
            "cache" if self.cached else "cold",
            f"cap{self.batch_cap}",
            f"chunk{self.chunk}",
            "crowded" if self.crowded else "roomy",
        ]
        return "-".join([str(self.variant), self.drafter, self.policy, *extras])

    @property
    def plain(self) -> Case:
        """What computes the same without any of the machinery."""
        return replace(
            self, drafter="none", policy="default", cached=False, batch_cap=8, chunk=256, crowded=False
        )

    @property
    def numbers(self) -> StepNumbers:
        """What the pacing policy knows."""
        return StepNumbers(
            variants={
                variant: VariantNumbers(
                    step=StepModel(
                        fixed_s=self.pass_s(variant),
                        chunk_s=0.002,
                        small_s=0.002,
                        large_s=0.002,
                        decode_s=0.001,
                    )
                )
                for variant in Variant
            }
        )

    def pass_s(self, variant: Variant) -> float:
        return OWN_PASS_S if variant is self.variant else OTHER_PASS_S

    @property
    def draft_variant(self) -> Variant:
        return Variant.INT8 if self.variant is Variant.INT4 else Variant.INT4

    @property
    def speculation(self) -> Speculation | None:
        if self.drafter == "none":
            return None
        if self.drafter == "ngram":
            return Speculation(drafter=Drafter.NGRAM, max_draft_tokens=5)
        return Speculation(drafter=Drafter.SELF, max_draft_tokens=4, draft_variant=self.draft_variant)


def _cases() -> list[Case]:
    """Every precision with every way of drafting and every policy, the rest spread evenly over them."""
    spread = random.Random(0)
    columns = {
        "family": FAMILIES,
        "cached": (True, False),
        "batch_cap": (8, 1),
        "chunk": (256, 3),
        "crowded": (False, True),
    }
    main = list(itertools.product(Variant, ("none", "self", "ngram"), ("default", "pacing", "moving")))
    rest: dict[str, list[Any]] = {}
    for name, values in columns.items():
        rest[name] = [values[i % len(values)] for i in range(len(main))]
        spread.shuffle(rest[name])
    return [
        Case(
            variant=variant,
            drafter=drafter,
            policy=policy,
            **{name: values[i] for name, values in rest.items()},
        )
        for i, (variant, drafter, policy) in enumerate(main)
    ]


CASES = _cases()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=[case.label for case in CASES])
    if "crowded_case" in metafunc.fixturenames:
        crowded = [case for case in CASES if case.crowded]
        metafunc.parametrize("crowded_case", crowded, ids=[case.label for case in crowded])


class Runner:
    """A loaded model with as many blocks as a mode has, whose passes take the time of their variant."""

    def __init__(self, inner: TorchRunner, case: Case, spend: Callable[[float], None]) -> None:
        self.spec = inner.spec
        self.block_size = inner.block_size
        self.variants = inner.variants
        self.n_blocks = CROWDED if case.crowded else ROOMY
        self.n_passes = 0
        self.before_pass: Callable[[], None] = lambda: None
        self.change_row: Callable[[Sequence[int], torch.Tensor], None] | None = None
        """Told the tokens that the row follows; may change its logits."""
        self._inner = inner
        self._pass_s = case.pass_s
        self._spend = spend
        self._as_one = case.variant if case.policy == "moving" else None
        self._written: dict[int, int] = {}
        self.kv = PagedKV.allocate(
            inner.spec,
            n_blocks=self.n_blocks,
            block_size=inner.block_size,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for cache in (self.kv.keys, self.kv.values):
            cache.fill_(torch.nan)

    def forward(
        self, slices: Sequence[SequenceSlice], variant: Variant, *, vocabulary: Any = "none is asked for"
    ) -> torch.Tensor:
        self.n_passes += 1
        self.before_pass()
        drafting = vocabulary != "none is asked for"
        self._spend(self._pass_s(variant) * (0.4 if drafting else 1.0))
        self._inner._kv = self.kv
        logits = self._inner.forward(
            slices, self._as_one or variant, vocabulary=vocabulary if drafting else None
        ).clone()
        row = 0
        for part in slices:
            for i, token_id in enumerate(part.token_ids):
                at = part.position + i
                self._written[self._slot(part, at)] = token_id
                if part.logits is Logits.ALL or (part.logits is Logits.LAST and i == len(part.token_ids) - 1):
                    if self.change_row is not None:
                        seen = [self._written[self._slot(part, place)] for place in range(at + 1)]
                        self.change_row(seen, logits[row])
                    if drafting and self._as_one and at % 4 == 0:  # would be right every time
                        logits[row] = logits[row].roll(1)
                    row += 1
        return logits

    def copy_block(self, source: int, target: int) -> None:
        self.kv.copy_block(source, target)
        size = self.block_size
        for offset in range(size):
            if (token_id := self._written.get(source * size + offset)) is not None:
                self._written[target * size + offset] = token_id

    def read_adapter(self, path: str) -> Adapter:
        return self._inner.read_adapter(path)

    def _slot(self, part: SequenceSlice, position: int) -> int:
        return part.block_table[position // self.block_size] * self.block_size + position % self.block_size


class Pieces:
    """A tokenizer of any size: every byte, then some words; what is left over says nothing."""

    WORDS = ("DEF", "G", "HI", "J", "DEFG", '{"', '":', "true", "the ", " is")
    bos_token_id = None
    has_chat_template = False

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._pieces = [bytes([byte]) for byte in range(256)] + [word.encode() for word in self.WORDS]
        self._pieces += [b""] * (vocab_size - len(self._pieces))
        for token_id in self.eos_token_ids:
            self._pieces[token_id] = b""

    def encode(self, text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def word(self, text: str) -> int:
        return 256 + self.WORDS.index(text)

    def render_chat(self, messages: Iterable[object], *, tools: object = None) -> tuple[int, ...]:
        raise NotImplementedError


@pytest.fixture(scope="session")
def loaded(
    tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], TorchRunner]:
    """The model of a family with all variants, loaded once."""
    found: dict[str, TorchRunner] = {}
    folder: Path = tmp_path_factory.mktemp("weights")

    def get(family: str) -> TorchRunner:
        if family not in found:
            found[family] = TorchRunner.load(
                open_checkpoint(str(tiny_model(family).safetensors)),
                variants=tuple(Variant),
                n_blocks=ROOMY,
                block_size=BLOCK_SIZE,
                kv_dtype=torch.float32,
                cache_dir=folder,
            )
        return found[family]

    return get


@pytest.fixture(scope="session")
def adapters(
    tiny_model: Callable[..., Any], tiny_adapter: Callable[..., Any]
) -> Callable[[str], dict[str, str]]:
    """Folders of three adapters of a family's tiny model; the third is what became of the first."""
    found: dict[str, dict[str, str]] = {}

    def get(family: str) -> dict[str, str]:
        if family not in found:
            model = tiny_model(family).reference
            found[family] = {
                name: str(tiny_adapter(model, seed=seed).folder)
                for seed, name in enumerate(("A", "B", "A reloaded"))
            }
        return found[family]

    return get


@pytest.fixture(scope="session")
def known() -> dict[Any, Any]:
    """What need not be found twice."""
    return {}


@pytest.fixture
def open_case(
    make_bench: Callable[..., Any], loaded: Callable[[str], TorchRunner], known: dict[Any, Any]
) -> Iterator[Callable[..., Any]]:
    """A bench in a mode, whose ``plan`` gives plans of the mode.

    When the test ends, each that was opened must have all its blocks back.
    """
    opened: list[Any] = []

    def start(case: Case, **config: Any) -> Any:
        bench = make_bench()
        bench.clock.tick_s = 1e-5

        def spend(seconds: float) -> None:
            bench.clock.now_s += seconds

        bench.runner = Runner(loaded(case.family), case, spend)
        bench.tokenizer = Pieces(bench.runner.spec.vocab_size, bench.runner.spec.eos_token_ids)
        bench.engine = Engine(
            bench.runner,
            bench.tokenizer,
            config=EngineConfig(
                **{"max_prefill_tokens_per_step": case.chunk, "adapt_drafts": False} | config
            ),
            step_policy=EarliestFirst() if case.policy == "default" else Pacer(case.numbers),
            clock=bench.clock,
        )
        bench.engine._speculator = Speculator(  # drafts with a part of the vocabulary
            bench.runner,
            range(7, bench.runner.spec.vocab_size),
            clock=bench.clock,
            adapt=config.get("adapt_drafts", False),
        )
        bench.engine._grammars = known.setdefault(("grammars", case.family), bench.engine._grammars)
        make_plan = bench.plan

        def plan(max_tokens: int = 16, variant: Variant = case.variant, **fields: Any) -> Plan:
            common: dict[str, Any] = {
                "prefix_cache": case.cached,
                "batch_cap": case.batch_cap,
                "speculation": case.speculation,
            }
            if case.policy != "default":
                common["tpot_target_s"] = 0.5
            if case.policy == "moving":
                common["tpot_target_s"] = 0.04
                common["fallback_variants"] = (case.draft_variant,)
            return make_plan(max_tokens, variant, **common | fields)

        bench.plan = plan
        bench.outcome = lambda name, index=0: outcome(bench.out, name, index)
        opened.append(bench)
        return bench

    yield start
    for bench in opened:
        assert not bench.engine.has_work
        assert bench.free == bench.runner.n_blocks
        pool = bench.engine._pool
        assert not any(pool.references(block) for block in range(pool.n_blocks))
        pool.evict_cached()
        assert len(pool._index) == 0
        assert sorted(pool._free) == list(range(pool.n_blocks))


@pytest.fixture(scope="session")
def every_case() -> list[Case]:
    return CASES


@pytest.fixture
def solo(open_case: Callable[..., Any], known: dict[Any, Any]) -> Callable[..., Any]:
    """What a request gives alone and without any machinery, of each choice as ``outcome`` gives it."""

    def run(
        case: Case,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        setup: Callable[[Any], None] = nothing,
        **fields: Any,
    ) -> list[tuple[Any, ...]]:
        key = (case.plain, tuple(prompt), max_tokens, setup, repr(sorted(fields.items())))
        if key not in known:
            bench = open_case(case.plain)
            setup(bench)
            bench.submit("solo", prompt, bench.plan(max_tokens), **fields)
            out = bench.run()
            assert not out.errors, out.errors
            known[key] = [outcome(out, "solo", index) for index in range(fields.get("n", 1))]
        return known[key]

    return run


def nothing(bench: Any) -> None:
    """Leave the bench as it is."""


def outcome(out: Any, name: str, index: int = 0) -> tuple[Any, ...]:
    """Tokens, text, log probabilities but for rounding, and how it ended."""
    finish = out.finish(name, index)
    logprobs = [
        (one.token_id, round(one.logprob, 2))
        for chunk in out.chunks[name]
        if chunk.index == index
        for one in chunk.logprobs or ()
    ]
    return out.ids(name, index), out.text(name, index), logprobs, finish.reason, finish.stop_text
