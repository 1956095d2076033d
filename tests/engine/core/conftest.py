"""A runner whose logits are a hash of the tokens that really stand in the blocks, and what drives it."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from paceline_engine.cache.quality import worst
from paceline_engine.chunk import Chunk, Finish, ScoreResult
from paceline_engine.core import Engine, EngineConfig
from paceline_engine.errors import PacelineError
from paceline_engine.mode import Mode, Variant
from paceline_engine.model.base import Logits, SequenceSlice, Vocabulary
from paceline_engine.model.spec import Activation, ModelSpec, RopeSpec
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt, SamplingParams, ScoreRequest

VOCAB = 64
EOS = 63


def spec(context_tokens: int = 4096) -> ModelSpec:
    return ModelSpec(
        family="llama",
        n_layers=1,
        hidden_size=8,
        n_heads=1,
        n_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        vocab_size=VOCAB,
        context_tokens=context_tokens,
        norm_eps=1e-6,
        activation=Activation.SILU,
        rope=RopeSpec(theta=10_000.0),
        eos_token_ids=(EOS,),
    )


class HashRunner:
    """Its KV is the tokens themselves, so a wrong block table or a block reused too early shows at once.

    A token's KV also names the variant that wrote it where ``variants_differ``.
    """

    def __init__(self, n_blocks: int = 32, block_size: int = 4, *, context_tokens: int = 4096) -> None:
        self.spec = spec(context_tokens)
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.variants = (Variant.BF16, Variant.INT4)
        self.kv: list[list[str]] = [["?"] * block_size for _ in range(n_blocks)]
        self.variants_differ = False
        self.passes: list[tuple[Variant, tuple[SequenceSlice, ...]]] = []
        self.before_pass: Callable[[Sequence[SequenceSlice]], None] = lambda slices: None
        self.change_logits: Callable[[SequenceSlice, torch.Tensor], None] = lambda part, logits: None
        self.change_row: Callable[[Sequence[str], torch.Tensor], None] = lambda seen, logits: None
        """Told the words that the row's token and those before it wrote."""

    def forward(
        self, slices: Sequence[SequenceSlice], variant: Variant, *, vocabulary: Vocabulary | None = None
    ) -> torch.Tensor:
        self.passes.append((variant, tuple(slices)))
        self.before_pass(slices)
        rows: list[torch.Tensor] = []
        for part in slices:
            for i, token_id in enumerate(part.token_ids):
                position = part.position + i
                word = f"{variant}{token_id}" if self.variants_differ else str(token_id)
                self.kv[part.block_table[position // self.block_size]][position % self.block_size] = word
                if part.logits is Logits.ALL or (part.logits is Logits.LAST and i == len(part.token_ids) - 1):
                    row = self._logits(part, position, variant)
                    self.change_logits(part, row)
                    rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def copy_block(self, source: int, target: int) -> None:
        self.kv[target] = list(self.kv[source])

    def _logits(self, part: SequenceSlice, position: int, variant: Variant) -> torch.Tensor:
        size = self.block_size
        seen = [self.kv[part.block_table[at // size]][at % size] for at in range(position + 1)]
        logits = logits_of(seen)
        self.change_row(seen, logits)
        return logits


class LateRunner(HashRunner):
    """Has bf16; loads another variant once ``let`` allows, or fails as ``error`` says."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.variants = (Variant.FP32, Variant.BF16, Variant.INT8, Variant.FP8, Variant.INT4)
        self.loaded: tuple[Variant, ...] = (Variant.BF16,)
        self.let = threading.Semaphore(0)
        self.error: Exception | None = None
        self.order: list[Variant] = []

    def load_variant(self, variant: Variant) -> None:
        self.order.append(variant)
        assert self.let.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        self.loaded += (variant,)

    def bytes_per_variant(self) -> dict[Variant, int]:
        return dict.fromkeys(self.variants, 4_000_000_000)

    def settle(self) -> None:
        """Wait until the load that ``let`` allowed has ended."""
        for thread in threading.enumerate():
            if thread.name == "paceline-loading":
                thread.join(20)


class TaintRunner(HashRunner):
    """A token's KV names the lowest quality of all that it was computed from: its own variant's, and that of
    the KV before it. Logits depend on the tokens alone.
    """

    def __init__(self, n_blocks: int, block_size: int) -> None:
        super().__init__(n_blocks, block_size)
        self.variants = (Variant.FP32, Variant.BF16, Variant.INT8, Variant.FP8, Variant.INT4)
        self.variants_differ = True

    def forward(
        self, slices: Sequence[SequenceSlice], variant: Variant, *, vocabulary: Vocabulary | None = None
    ) -> torch.Tensor:
        logits = super().forward(slices, variant, vocabulary=vocabulary)
        size = self.block_size
        for part in slices:
            taint = variant
            if part.position:
                before = part.position - 1
                taint = worst((variant, self.writer(part.block_table[before // size], before % size)))
            for place, token_id in enumerate(part.token_ids, start=part.position):
                self.kv[part.block_table[place // size]][place % size] = f"{taint}:{token_id}"
        return logits

    def _logits(self, part: SequenceSlice, position: int, variant: Variant) -> torch.Tensor:
        size = self.block_size
        at = [self.kv[part.block_table[place // size]][place % size] for place in range(part.position)]
        words = [word.rpartition(":")[2] for word in at]
        words += map(str, part.token_ids[: position + 1 - part.position])
        return logits_of(words)

    def writer(self, block: int, place: int) -> Variant:
        return Variant(self.kv[block][place].partition(":")[0])


def logits_of(words: Iterable[object]) -> torch.Tensor:
    """[vocab]: what the model says after these tokens."""
    digest = hashlib.shake_128(" ".join(map(str, words)).encode()).digest(VOCAB)
    logits = torch.frombuffer(bytearray(digest), dtype=torch.uint8).float() / 32
    logits[EOS] = -4.0
    return logits


class LetterTokenizer:
    """One letter a token: ids 0 to 61 are ``A`` to ``~``, 62 is a space, 63 ends."""

    vocab_size = VOCAB
    bos_token_id = None
    eos_token_ids = (EOS,)
    has_chat_template = False

    def encode(self, text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        return tuple(62 if letter == " " else ord(letter) - 65 for letter in text)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else b" " if token_id == 62 else bytes([65 + token_id])

    def render_chat(self, messages: Iterable[object], *, tools: object = None) -> tuple[int, ...]:
        raise NotImplementedError


@dataclass(slots=True)
class ManualClock:
    now_s: float = 100.0
    tick_s: float = 0.001

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


@dataclass(slots=True)
class Gathered:
    """All that the steps emitted."""

    chunks: dict[str, list[Chunk]] = field(default_factory=lambda: defaultdict(list))
    scores: dict[str, ScoreResult] = field(default_factory=dict)
    errors: dict[str, PacelineError] = field(default_factory=dict)

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(chunk.text for chunk in self.chunks[request_id] if chunk.index == index)

    def ids(self, request_id: str, index: int = 0) -> list[int]:
        return [
            token for chunk in self.chunks[request_id] if chunk.index == index for token in chunk.token_ids
        ]

    def finish(self, request_id: str, index: int = 0) -> Finish:
        (finish,) = [
            chunk.finish for chunk in self.chunks[request_id] if chunk.index == index and chunk.finish
        ]
        return finish


class Bench:
    """An engine over a runner, with short ways to use it."""

    def __init__(self, runner: HashRunner, config: EngineConfig | None = None, policy: object = None) -> None:
        self.runner = runner
        self.clock = ManualClock()
        self.tokenizer = LetterTokenizer()
        self.engine = Engine(
            runner,
            self.tokenizer,
            config=config,
            step_policy=policy,  # type: ignore[arg-type]
            clock=self.clock,
        )
        self.out = Gathered()

    def plan(self, max_tokens: int = 8, variant: Variant = Variant.BF16, **fields: object) -> Plan:
        mode = {
            name: fields.pop(name)
            for name in ("prefix_cache", "mix_cache", "batch_cap", "speculation")
            if name in fields
        }
        return Plan(mode=Mode(variant=variant, **mode), max_tokens=max_tokens, **fields)  # type: ignore[arg-type]

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        plan: Plan | None = None,
        *,
        sampling: SamplingParams | None = None,
        **fields: object,
    ) -> None:
        request = GenerationRequest(
            id=name,
            prompt=Prompt(messages=(), token_ids=tuple(prompt), n_tokens=len(prompt)),
            sampling=sampling or SamplingParams(),
            **fields,  # type: ignore[arg-type]
        )
        self.engine.submit(request, plan or self.plan(), submitted_at_s=self.clock.now_s)

    def score(
        self, name: str, prompt: Sequence[int], options: Sequence[str], plan: Plan | None = None
    ) -> None:
        request = ScoreRequest(
            id=name,
            prompt=Prompt(messages=(), token_ids=tuple(prompt), n_tokens=len(prompt)),
            options=tuple(options),
        )
        self.engine.submit_score(request, plan or self.plan(), submitted_at_s=self.clock.now_s)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            output = self.engine.step()
            for request_id, chunk in output.chunks:
                self.out.chunks[request_id].append(chunk)
            self.out.scores.update(output.scores)
            self.out.errors.update(output.errors)

    def run(self, most: int = 5000) -> Gathered:
        while self.engine.has_work:
            self.step()
            most -= 1
            assert most > 0, "the engine does not come to an end"
        return self.out

    @property
    def free(self) -> int:
        free = self.engine.snapshot(()).free_blocks
        assert free is not None
        return free


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors run fastest on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    def make(
        n_blocks: int = 32,
        block_size: int = 4,
        *,
        context_tokens: int = 4096,
        policy: object = None,
        **config: float,
    ) -> Bench:
        runner = HashRunner(n_blocks, block_size, context_tokens=context_tokens)
        return Bench(runner, EngineConfig(**config), policy)  # type: ignore[arg-type]

    return make


@pytest.fixture
def taint_bench() -> Bench:
    """Over a small cache whose KV tells what it was computed from."""
    return Bench(TaintRunner(22, 4), EngineConfig(max_sequences=8, adapt_drafts=False))


@pytest.fixture
def late_bench() -> Iterator[Bench]:
    """Over a runner that loads variants late."""
    runner = LateRunner()
    yield Bench(runner)
    for _ in range(9):  # no thread may outlive its test
        runner.let.release()
    runner.settle()


@pytest.fixture
def greedy_ids() -> Callable[[Sequence[int], int], list[int]]:
    """What greedy decoding of the hash model gives, found without the engine."""

    def find(prompt: Sequence[int], n: int) -> list[int]:
        ids = list(prompt)
        for _ in range(n):
            ids.append(int(logits_of(ids).argmax()))
        return ids[len(prompt) :]

    return find
