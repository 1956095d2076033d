"""Everything that runs on a GPU, on a fake one: devices, types, shapes, and where the host waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline_engine import loading
from paceline_engine.backends.embedded import EmbeddedConfig
from paceline_engine.backends.embedded.source import open_engine
from paceline_engine.core import Engine, EngineConfig
from paceline_engine.cuda.matrices import DeviceBf16, DeviceFp8, DeviceInt4, DeviceInt8
from paceline_engine.cuda.support import Support
from paceline_engine.fidelity import FidelityRequest
from paceline_engine.loading import pieces
from paceline_engine.loading.adapter_files import AdapterTensors, LowRankTensors
from paceline_engine.mode import Drafter, Mode, Speculation, Variant
from paceline_engine.model import runner as runner_module
from paceline_engine.model.adapter import Adapter
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.runner import TorchRunner
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt, SamplingParams, ScoreRequest
from paceline_engine.sampling.draw import RandomStream
from paceline_engine.sampling.rules import DrawRule
from paceline_engine.sampling.sampler import Row, draw_tokens, score_tokens

ALL = Support(wide_output=True, fp8=True, int8=True, int4=True, flash=True)
OpenRunner = Callable[..., TorchRunner]


@pytest.fixture(params=["gemma", "odd"])
def spec(request: pytest.FixtureRequest, specs: Any) -> Any:
    return specs[request.param]


def piece(n: int, position: int = 0, *, first_block: int = 0, logits: Logits = Logits.LAST) -> SequenceSlice:
    count = -(-(position + n) // 16)
    blocks = tuple(range(first_block, first_block + count))
    return SequenceSlice(token_ids=(3,) * n, position=position, block_table=blocks, logits=logits)


@pytest.mark.parametrize("support", [ALL, Support()], ids=["units", "plain"])
def test_every_variant_runs_every_kind_of_pass_without_waiting(
    support: Support, spec: Any, fake_cuda: Any, open_runner: OpenRunner
) -> None:
    """Prefill, chunk, decode and verification, alone and mixed; logits are fp32 on the device."""
    runner = open_runner(spec, support)
    fake_cuda.waits.clear()
    batches = [
        ([piece(40, logits=Logits.ALL)], 40),
        ([piece(90)], 1),
        ([piece(30, 90, logits=Logits.NONE)], 0),
        ([piece(1, 120), piece(5, 300, first_block=8, logits=Logits.ALL), piece(8, first_block=40)], 7),
        ([piece(1, 120), piece(1, 300, first_block=8)], 2),
    ]
    for variant in Variant:
        for slices, n_rows in batches:
            logits = runner.forward(slices, variant)
            assert logits.shape == (n_rows, spec.vocab_size)
            assert (logits.device, logits.dtype) == (fake_cuda.device, torch.float32)
    runner.copy_block(1, 2)
    assert fake_cuda.waits == []


def test_each_precision_has_its_units(specs: Any, open_runner: OpenRunner) -> None:
    """Matrices of a real model's sizes are in their units' layouts; odd ones are widened, 4-bit is padded."""
    kinds = {
        Variant.BF16: DeviceBf16,
        Variant.FP8: DeviceFp8,
        Variant.INT8: DeviceInt8,
        Variant.INT4: DeviceInt4,
    }
    runner, odd = (open_runner(specs[name], ALL) for name in ("gemma", "odd"))
    for variant, kind in kinds.items():
        layer = runner._weights[variant].layers[0]
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down, runner._weights[variant].output):
            assert type(matrix) is kind
        expected = kind if variant is Variant.INT4 else DeviceBf16
        assert type(odd._weights[variant].layers[0].qkv) is expected


@pytest.mark.parametrize("support", [ALL, Support()], ids=["units", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_run_beside_the_weights(
    dtype: torch.dtype, support: Support, specs: Any, fake_cuda: Any, open_runner: OpenRunner
) -> None:
    """For some of a pass's sequences and for all, over every variant, without waiting."""
    spec = specs["gemma"]
    runner = open_runner(spec, support)
    shapes = {"self_attn.k_proj": (256, 640), "mlp.up_proj": (2048, 640), "mlp.down_proj": (640, 2048)}
    updates = {
        f"model.layers.{layer}.{name}.weight": LowRankTensors(
            down=torch.empty((8, n_inputs), dtype=dtype), up=torch.empty((n_rows, 8), dtype=dtype), scale=2.0
        )
        for layer in range(spec.n_layers)
        for name, (n_rows, n_inputs) in shapes.items()
    }
    read = AdapterTensors(path="adapter", digest="0", updates=updates)
    adapter = Adapter.build(read, spec, device=fake_cuda.device, support=support)
    fake_cuda.waits.clear()
    adapted = replace(piece(9, 20, logits=Logits.ALL), adapter=adapter)
    for variant in Variant:
        for slices, n_rows in (([adapted], 9), ([adapted, piece(1, 40, first_block=8)], 10)):
            assert runner.forward(slices, variant).shape == (n_rows, spec.vocab_size)
    assert fake_cuda.waits == []


@pytest.mark.parametrize("support", [ALL, Support()], ids=["units", "plain"])
def test_a_captured_step_waits_for_nothing_and_copies_nothing_from_the_host(
    support: Support, spec: Any, fake_cuda: Any, open_runner: OpenRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a capture forbids does not happen in any variant's step; replays give logits of their rows."""
    runner = open_runner(spec, support)
    fake_cuda.waits.clear()

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("host memory in a captured step")

    def capture(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with monkeypatch.context() as patch:
            for name in ("pin_memory", "cpu"):
                patch.setattr(torch.Tensor, name, refuse)
            for name in ("tensor", "from_numpy"):
                patch.setattr(torch, name, refuse)
            work()
        return work

    assert runner.capture_decode(max_sequences=2, capture=capture) >= 10
    for variant in Variant:
        logits = runner.forward([piece(1, 7), piece(1, 20, first_block=4)], variant)
        assert (logits.shape, logits.device) == ((2, spec.vocab_size), fake_cuda.device)
    assert fake_cuda.waits == []


RULES = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.0, top_k=40),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9, min_p=0.05),
    "both": SamplingParams(temperature=1.0, top_k=40, top_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    "bias": SamplingParams(logit_bias={3: -100.0}, min_tokens=9),
    "logprobs": SamplingParams(logprobs=5),
}


@pytest.mark.parametrize("name", list(RULES))
def test_drawing_stays_on_the_device(name: str, fake_cuda: Any) -> None:
    """One look at the maxima, and one a row for what chance, masks or log probabilities need of it."""
    logits = torch.empty((3, 300), device=fake_cuda.device)
    rule = DrawRule(RULES[name], stream=RandomStream(seed=1), prompt_ids=(4, 5), end_ids=(1,))
    drawn = draw_tokens(logits, [Row(at=at, rule=rule, output_ids=[7, 7]) for at in (0, 2)])
    assert [token.token_id for token in drawn] == [0, 0]  # type: ignore[union-attr]
    per_row = {"greedy": 0, "logprobs": 3}.get(name, 1)
    assert len(fake_cuda.waits) == 1 + 2 * per_row


def test_scoring_reads_once(fake_cuda: Any) -> None:
    """All options' log probabilities come in one copy."""
    logits = torch.empty((40, 300), device=fake_cuda.device)
    assert score_tokens(logits, [0, 39, 39], [5, 6, 7]) == [0.0] * 3
    assert fake_cuda.waits == ["tolist"]


def test_the_engine_opens_on_the_device_that_is_named(
    specs: Any, fake_cuda: Any, open_runner: OpenRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes the current one, its units are tried, decode steps are captured, and the card is named."""
    current: list[int] = []
    checkpoint = open_runner(specs["gemma"], ALL, (Variant.BF16,))._store
    for target, name, value in (
        (loading, "open_checkpoint", lambda model, on_progress: checkpoint),
        (pieces, "piece_tokenizer", lambda digest, open_whole: Tokens()),
        (torch.cuda, "device_count", lambda: 2),
        (torch.cuda, "set_device", current.append),
        (torch.cuda, "get_device_name", lambda device: f"a card at {device}"),
        (runner_module, "cuda_capture", lambda device: lambda work: (work(), work)[1]),
        (Support, "probe", lambda device: ALL if device == torch.device("cuda:1") else Support()),
    ):
        monkeypatch.setattr(target, name, value)
    config = EmbeddedConfig(model="fake", device="cuda:1", max_sequences=2, kv_tokens=1024)
    opened = open_engine(config, step_policy=None, on_progress=lambda progress: None)
    assert current == [1]
    assert (opened.info.device, opened.info.device_name) == ("cuda", "a card at cuda:1")
    engine = opened.engine
    runner: TorchRunner = engine._runner  # type: ignore[attr-defined]
    assert runner._graphs is not None
    assert (
        runner._graphs.n_captured == 3 * 4
    )  # variants; one and two sequences, of up to 512 and 1,024 tokens
    plan = Plan(mode=Mode(variant=Variant.INT8), max_tokens=3)
    engine.submit(generation("g", 9, SamplingParams()), plan, submitted_at_s=0.0)
    while engine.has_work:
        assert engine.step().errors == ()


class Tokens:
    """Ids that stand for nothing; token 1 ends."""

    vocab_size = 262_144
    bos_token_id = None
    eos_token_ids = (1,)
    has_chat_template = False

    def encode(self, text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        return tuple(range(2, 2 + len(text)))

    def decode(self, ids: Sequence[int]) -> str:
        return "x" * len(list(ids))

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"

    def render_chat(self, messages: object, *, tools: object = None) -> tuple[int, ...]:
        raise NotImplementedError


def generation(name: str, n_prompt: int, sampling: SamplingParams, **options: Any) -> GenerationRequest:
    prompt = Prompt(messages=(), token_ids=tuple(range(5, 5 + n_prompt)), n_tokens=n_prompt)
    return GenerationRequest(id=name, prompt=prompt, sampling=sampling, ignore_eos=True, **options)


def test_a_chunk_that_draws_nothing_is_timed_to_its_end(
    specs: Any, fake_cuda: Any, open_runner: OpenRunner
) -> None:
    """The host waits for it, as for a chunk that a token is drawn from; else it would seem free of cost."""
    runner = open_runner(specs["gemma"], ALL, (Variant.BF16,))
    config = EngineConfig(max_prefill_tokens_per_step=32)
    engine = Engine(runner, Tokens(), config=config)  # type: ignore[arg-type]
    plan = Plan(mode=Mode(variant=Variant.BF16), max_tokens=1)
    engine.submit(generation("g", 60, SamplingParams()), plan, submitted_at_s=0.0)
    fake_cuda.waits.clear()
    engine.step()
    assert fake_cuda.waits == ["synchronize"]
    engine.step()
    assert fake_cuda.waits == ["synchronize", "tolist"]


def test_the_engine_runs_whole(specs: Any, fake_cuda: Any, open_runner: OpenRunner) -> None:
    """Chunked prefills beside decoding, drafts and their verification, choices, scores, changes of variant
    and the comparison of variants; every block comes back."""
    variants = (Variant.BF16, Variant.FP8, Variant.INT8, Variant.INT4)
    runner = open_runner(specs["gemma"], ALL, variants)
    config = EngineConfig(max_prefill_tokens_per_step=32, adapt_drafts=False)
    engine = Engine(runner, Tokens(), config=config)  # type: ignore[arg-type]
    drafts = Speculation(drafter=Drafter.SELF, max_draft_tokens=3, draft_variant=Variant.INT4)
    modes = [Mode(variant=variant, prefix_cache=False) for variant in variants]
    modes += [Mode(variant=Variant.BF16, speculation=drafts), Mode(variant=Variant.INT8, speculation=drafts)]
    for at, mode in enumerate(modes):
        rule = list(RULES.values())[at % len(RULES)]
        request = generation(f"g{at}", 20 + 15 * at, rule, n=2 if at == 3 else 1)
        engine.submit(request, Plan(mode=mode, max_tokens=4), submitted_at_s=0.0)
    scored = ScoreRequest(id="s", prompt=generation("", 12, RULES["greedy"]).prompt, options=("a", "bcd"))
    engine.submit_score(scored, Plan(mode=modes[0], max_tokens=1), submitted_at_s=0.0)
    compared = FidelityRequest(id="f", token_ids=tuple(range(40)), reference=Variant.BF16, first_compared=20)
    ended: list[str] = []
    while engine.has_work:
        output = engine.step()
        assert output.errors == ()
        ended += [id_ for id_, chunk in output.chunks if chunk.finish is not None]
        ended += [id_ for id_, _ in output.scores] + [id_ for id_, _ in output.fidelities]
        if "g0" in ended and "f" not in ended and compared is not None:
            engine.submit_fidelity(compared)
            compared = None  # type: ignore[assignment]
        engine.change_variant("g1", Variant.INT4)
    assert sorted(ended) == ["f", "g0", "g1", "g2", "g3", "g3", "g4", "g5", "s"]
    state = engine.snapshot(())
    assert state.free_blocks == state.total_blocks == 64
