"""Checks and measures the engine on one GPU in a few minutes.

    python tests/engine/gpu/check_cuda.py [--model PATH] [--device cuda:0] [--cache FOLDER]

Each check is a line on standard error as it is made; at the end one JSON object is printed. It needs the
engine, installed or by ``PYTHONPATH=engine``, with torch, safetensors, tokenizers and Jinja2, and no network:
where Gemma 3 270M is not installed, random weights of its sizes take its place. A check that fails or breaks
off does not end the others.

Exit status: 0 where every check holds, 1 where one does not, 77 where there is no CUDA device, so that a
machine without one is never taken for a machine that passed. ``--device cpu`` rehearses it all on a CPU, and
never passes either.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from stand_in import write_stand_in
from torch import Tensor

from paceline_engine.backends.base import ModelInfo
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.chunk import Finish
from paceline_engine.core import Engine, EngineConfig
from paceline_engine.cuda.graphs import Capture
from paceline_engine.cuda.support import Support
from paceline_engine.errors import PacelineError
from paceline_engine.fidelity import FidelityRequest
from paceline_engine.loading import open_checkpoint, open_tokenizer
from paceline_engine.mode import Drafter, Mode, Speculation, Variant
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.runner import TorchRunner
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt, SamplingParams, ScoreRequest

NO_DEVICE = 77
TEXT = (
    "The agent reads the answer of the tool and tells the traveller what it found. Flight 212 to Oslo leaves "
    "at ten to nine from gate 14; the next one, at noon, is full. Rebooking costs nothing before midnight. "
)
VARIANTS = (Variant.FP32, Variant.BF16, Variant.INT8, Variant.FP8, Variant.INT4)
DRAFTS = Speculation(drafter=Drafter.SELF, max_draft_tokens=4, draft_variant=Variant.INT4)
REPEATS = Speculation(drafter=Drafter.NGRAM, max_draft_tokens=4)
BLOCK_SIZE = 16
BATCHES = (1, 4, 16)
ROOM_FOR_ROUNDING = 0.03
"""Error beyond some times that of the CPU's kernels, for activations rounded to bf16 or int8."""
TIMES, TIMES_FP8 = 1.5, 2.5
"""Those times. FP8 rounds activations as coarsely as weights, which the CPU's kernels do not round so."""
OTHER_ORDER, OTHER_CODES = 0.1, 0.4
"""Largest errors between passes that add the same numbers in another order, and where that may round inputs
to other FP8 codes. What belongs to another token or step is off by more than 1."""
N_TOKENS = 32
"""Of each generation."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One statement that has to hold."""

    name: str
    value: float
    limit: float
    holds: bool
    error: str | None = None
    """What broke the check off."""


Checks = Iterator[Check]


class Bench:
    """Two runners of one checkpoint, on the CPU's kernels and on the device."""

    def __init__(
        self,
        model: str,
        device: torch.device,
        cache_dir: Path,
        *,
        n_tokens: int,
        support: Support | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.device, self.n_tokens = device, n_tokens
        self.support = support if support is not None else Support.probe(device)
        self.model, self.cache_dir = model, cache_dir
        checkpoint, self.tokenizer = open_checkpoint(model), open_tokenizer(model)
        self.name = checkpoint.name
        ids = list(self.tokenizer.encode(TEXT))
        room = min(checkpoint.spec.context_tokens, 8 * n_tokens)
        self.ids = (ids * (room // len(ids) + 1))[:room]
        self.blocks = tuple(range(-(-room // BLOCK_SIZE)))
        # A quarter of the device's cache for single sequences, the rest for the engine and for batches.
        self.blocks_each = n_tokens // BLOCK_SIZE + 1
        n_blocks = max(4 * len(self.blocks), len(self.blocks) + max(BATCHES) * self.blocks_each)
        options: dict[str, Any] = {"block_size": BLOCK_SIZE, "cache_dir": cache_dir, "variants": VARIANTS}
        began = time.perf_counter()
        self.cpu = TorchRunner.load(checkpoint, n_blocks=len(self.blocks), kv_dtype=torch.float32, **options)
        loaded = time.perf_counter()
        self.gpu = TorchRunner.load(
            checkpoint, n_blocks=n_blocks, device=device, support=self.support, **options
        )
        self.load_s = {"convert_and_cpu": loaded - began, "device": time.perf_counter() - loaded}
        self.capture = capture
        self.n_captured = 0

    def prefill(self, runner: TorchRunner, variant: Variant, n: int, logits: Logits = Logits.LAST) -> Tensor:
        """The first ``n`` tokens from nothing; fp32 [rows, vocab] on the CPU."""
        piece = SequenceSlice(token_ids=self.ids[:n], position=0, block_table=self.blocks, logits=logits)
        return runner.forward([piece], variant).cpu()

    def decode(self, variant: Variant, at: int, token: int) -> Tensor:
        piece = SequenceSlice(token_ids=(token,), position=at, block_table=self.blocks)
        return self.gpu.forward([piece], variant)

    def batch(self, n: int, at: int, n_new: int = 1, logits: Logits = Logits.LAST) -> list[SequenceSlice]:
        """``n`` sequences with blocks of their own, each with its next tokens at position ``at``."""
        first = self.gpu.n_blocks - n * self.blocks_each
        starts = [first + index * self.blocks_each for index in range(n)]
        return [
            SequenceSlice(
                token_ids=self.ids[at + index : at + index + n_new],
                position=at,
                block_table=tuple(range(start, start + self.blocks_each)),
                logits=logits,
            )
            for index, start in enumerate(starts)
        ]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_s(self, work: Callable[[], object], *, n: int) -> float:
        """The median of ``n`` runs."""
        work()
        times: list[float] = []
        for _ in range(n):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.std())


def at_most(name: str, value: float, limit: float) -> Check:
    return Check(name=name, value=value, limit=limit, holds=value <= limit)


def at_least(name: str, value: float, limit: float) -> Check:
    return Check(name=name, value=value, limit=limit, holds=value >= limit)


def check_units(bench: Bench) -> Checks:
    """A GPU of capability 9.0 or newer multiplies and attends with every unit that it has."""
    if bench.device.type == "cuda" and torch.cuda.get_device_capability(bench.device) >= (9, 0):
        for name, used in asdict(bench.support).items():
            yield at_least(f"{name} is used", used, 1)


def check_logits(bench: Bench) -> Checks:
    """Each variant is about as near to fp32 on the CPU as the CPU's own kernels are."""
    reference = bench.prefill(bench.cpu, Variant.FP32, bench.n_tokens, Logits.ALL)
    for variant in VARIANTS:
        on_gpu = bench.prefill(bench.gpu, variant, bench.n_tokens, Logits.ALL)
        on_cpu = bench.prefill(bench.cpu, variant, bench.n_tokens, Logits.ALL)
        times = TIMES_FP8 if variant is Variant.FP8 else TIMES
        limit = times * relative(on_cpu, reference) + ROOM_FOR_ROUNDING
        yield at_most(f"{variant}: error of a prefill", relative(on_gpu, reference), limit)
        steps = range(bench.n_tokens - 8, bench.n_tokens)
        rows = torch.cat([bench.decode(variant, at, bench.ids[at]).cpu() for at in steps])
        yield at_most(f"{variant}: error of eight decode steps", relative(rows, reference[-8:]), limit)
        verified = SequenceSlice(
            token_ids=bench.ids[steps.start : steps.stop],
            position=steps.start,
            block_table=bench.blocks,
            logits=Logits.ALL,
        )
        beside = bench.batch(1, 0, n_new=bench.n_tokens // 2)
        mixed = bench.gpu.forward([*beside, verified], variant).cpu()
        yield at_most(
            f"{variant}: error of verifying eight tokens beside a prefill",
            relative(mixed[1:], reference[-8:]),
            limit,
        )


def check_capture(bench: Bench) -> Checks:
    """Captured decode steps give the logits of uncaptured ones, alone, in a batch and in a long context."""
    short, long = bench.n_tokens - 1, len(bench.ids) - 1

    def batch(variant: Variant, n: int) -> Tensor:
        bench.gpu.forward(bench.batch(n, 0, n_new=short, logits=Logits.NONE), variant)
        return torch.cat([bench.gpu.forward(bench.batch(n, short), variant).cpu() for _ in range(2)])

    def alone(variant: Variant) -> Tensor:
        bench.prefill(bench.gpu, variant, long)
        return torch.cat([bench.decode(variant, long, bench.ids[at]).cpu() for at in range(2)])

    runs: dict[str, Callable[[Variant], Tensor]] = {
        "one": lambda variant: batch(variant, 1),
        "three": lambda variant: batch(variant, 3),
        f"one after {long} tokens": alone,
    }
    before = {(variant, name): run(variant) for variant in VARIANTS for name, run in runs.items()}
    began = time.perf_counter()
    bench.n_captured = bench.gpu.capture_decode(max_sequences=max(BATCHES), capture=bench.capture)
    bench.load_s["capture"] = time.perf_counter() - began
    yield at_least("captured decode steps", bench.n_captured, len(VARIANTS) * len(BATCHES))
    for (variant, name), expected in before.items():
        error = relative(runs[name](variant), expected)
        limit = OTHER_CODES if variant is Variant.FP8 else OTHER_ORDER
        yield at_most(f"{variant}: error by capturing a step of {name}", error, limit)


def check_engine(bench: Bench) -> Checks:
    """Prefix cache, speculation and batch mates change no token, and do something; every block comes back."""
    engine = new_engine(bench)
    ids = bench.ids[: bench.n_tokens]
    plain = Mode(variant=Variant.BF16)
    cold, warm = (generate(engine, {name: (ids, plain)})[name] for name in ("cold", "warm"))
    # Steps of other shapes sum in another order: a token may differ at a near tie, and all after it.
    yield at_least("tokens served by the prefix cache", warm.n_cached, len(ids) // 2)
    yield at_least("equal tokens with the prefix cache", equal(cold, warm), N_TOKENS // 4)
    for name, speculation in (("int4", DRAFTS), ("ngram", REPEATS)):
        for variant in (Variant.BF16, Variant.INT8, Variant.FP8):
            mode = Mode(variant=variant)
            target = generate(engine, {"target": (ids, mode)})["target"]
            drafted = generate(engine, {"d": (ids, replace(mode, speculation=speculation))})["d"]
            least = N_TOKENS // (8 if variant is Variant.FP8 else 4)
            yield at_least(f"equal tokens of {variant} with drafts by {name}", equal(target, drafted), least)
            if name == "int4":
                yield at_most(f"steps of {variant} with drafts", drafted.n_steps, target.n_steps)
    texts = [bench.ids[start : start + bench.n_tokens // 2] for start in range(4)]
    alone = [generate(engine, {"one": (text, plain)})["one"] for text in texts]
    together = generate(engine, {str(at): (text, plain) for at, text in enumerate(texts)})
    shared = sum(equal(one, together[str(at)]) for at, one in enumerate(alone))
    yield at_least("equal tokens of four streams together", shared, N_TOKENS)
    chance = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
    drawn = [generate(engine, {"drawn": (ids, plain)}, sampling=chance)["drawn"] for _ in range(2)]
    yield at_least("equal tokens of one seed", equal(*drawn), N_TOKENS // 4)
    yield blocks_left(engine, "generations")


def check_changes(bench: Bench) -> Checks:
    """Streams change their variant, are cancelled, preempted, scored and compared; all end well."""
    engine = new_engine(bench)
    ids = bench.ids[: bench.n_tokens]
    requests = {str(variant): (ids, Mode(variant=variant)) for variant in VARIANTS}

    def change(step: int) -> None:
        engine.change_variant(VARIANTS[step % 5], VARIANTS[step * 2 % 5])
        if step == 6:
            engine.abort(Variant.INT4)

    made = generate(engine, requests, each_step=change)
    kept = [len(one.ids) for name, one in made.items() if name != Variant.INT4]
    yield at_least("tokens of streams that change their variant", min(kept), N_TOKENS)
    yield at_most("tokens of a cancelled stream", len(made[Variant.INT4].ids), N_TOKENS - 1)
    yield blocks_left(engine, "changes and a cancellation")
    # Prompts that fit together and outputs that do not: some are put back and computed again.
    n_streams = min(64, bench.gpu.n_blocks // bench.blocks_each + 1)
    mode = Mode(variant=Variant.INT8, prefix_cache=False, batch_cap=64)
    crowd = {f"crowd {at}": (ids, mode) for at in range(n_streams)}
    crowded = generate(engine, crowd)
    yield at_least(
        "tokens of each stream of a crowd", min(len(one.ids) for one in crowded.values()), N_TOKENS
    )
    yield at_least("preemptions in a crowd", sum(one.n_preempted for one in crowded.values()), 1)
    yield blocks_left(engine, "a crowd")
    plan = Plan(mode=Mode(variant=Variant.FP8), max_tokens=1)
    prompt = Prompt(messages=(), token_ids=tuple(ids), n_tokens=len(ids))
    scored = ScoreRequest(id="scored", prompt=prompt, options=(" yes", " no, not today"))
    engine.submit_score(scored, plan, submitted_at_s=time.monotonic())
    compared = FidelityRequest(id="c", token_ids=tuple(ids[:96]), reference=Variant.FP32, first_compared=16)
    engine.submit_fidelity(compared)
    scores, fidelities = 0, dict[Variant, Any]()
    while engine.has_work:
        output = engine.step()
        raise_errors(output)
        scores += len(output.scores)
        for _, found in output.fidelities:
            fidelities = dict(found)
    yield at_least("scored requests", scores, 1)
    worst = {variant: each.kl_nats / each.n_tokens for variant, each in fidelities.items()}
    yield at_most("divergence of bf16 from fp32, nats", worst[Variant.BF16], 0.02)
    yield at_most("divergence of int8 from fp32, nats", worst[Variant.INT8], 0.1)
    yield blocks_left(engine, "scores and a comparison")


def check_memory(bench: Bench) -> Checks:
    """Where memory runs out a request fails by name, the next one runs, and no block is lost."""
    if bench.device.type != "cuda":
        return
    engine = new_engine(bench, chunk=len(bench.ids))
    mode = Mode(variant=Variant.BF16, prefix_cache=False)
    before = generate(engine, {"before": (bench.ids[:64], mode)})["before"]
    torch.cuda.empty_cache()
    ballast: list[Tensor] = []
    size, _ = torch.cuda.mem_get_info(bench.device)
    while size >= 1 << 21:
        try:
            ballast.append(torch.empty(size, dtype=torch.uint8, device=bench.device))
        except torch.OutOfMemoryError:
            size //= 2
    crowd = {f"large {at}": (bench.ids[at:], mode) for at in range(3)}
    failure = ""
    try:
        generate(engine, crowd)
    except PacelineError as error:
        failure = str(error)
    ballast.clear()
    torch.cuda.empty_cache()
    yield at_least("a pass without memory fails by name", "out of memory" in failure, 1)
    while engine.has_work:
        engine.step()
    after = generate(engine, {"after": (bench.ids[:64], mode)})["after"]
    yield at_least("equal tokens after memory ran out", equal(before, after), N_TOKENS // 4)
    yield blocks_left(engine, "running out of memory")


def check_worker(bench: Bench) -> Checks:
    """A worker process of its own loads the model on the device, streams, and ends; so does the next one."""
    config = EmbeddedConfig(
        model=bench.model,
        device=str(bench.device),
        variants=(Variant.BF16, Variant.INT4),
        cache_dir=str(bench.cache_dir),
        kv_tokens=4096,
        start_timeout_s=240,
    )

    async def run() -> tuple[ModelInfo, float, Finish, list[int]]:
        backend = EmbeddedBackend(config)
        try:
            info = await backend.start()
            request = request_of("worker", bench.ids[: bench.n_tokens], SamplingParams())
            ids: list[int] = []
            finish = None
            plan = Plan(mode=Mode(variant=Variant.BF16, speculation=DRAFTS), max_tokens=N_TOKENS)
            async for chunk in backend.submit(request, plan):
                ids += chunk.token_ids
                finish = chunk.finish
            assert finish is not None
            return info, backend.start_s or 0.0, finish, ids
        finally:
            await backend.aclose()

    info, start_s, finish, ids = asyncio.run(run())
    bench.load_s["worker"] = start_s
    say(f"       {info.device_name}: ready after {start_s:.1f} s")
    yield at_least("the worker's device is the one asked for", info.device == bench.device.type, 1)
    yield at_least("tokens from the worker", len(ids), N_TOKENS)
    yield at_least("steps in its timeline", len(finish.timeline.steps), 2)
    _, _, _, again = asyncio.run(run())
    yield at_least("equal tokens from the next worker", common(ids, again), N_TOKENS // 4)


@dataclass(kw_only=True)
class Made:
    """What came of one request."""

    ids: list[int]
    n_steps: int = 0
    n_cached: int = 0
    n_preempted: int = 0


def new_engine(bench: Bench, *, chunk: int = 64) -> Engine:
    config = EngineConfig(
        model_fingerprint=bench.name,
        max_prefill_tokens_per_step=chunk,
        max_sequences=64,
        adapt_drafts=False,  # whether drafts pay is not the question
    )
    return Engine(bench.gpu, bench.tokenizer, config=config)


def generate(
    engine: Engine,
    requests: dict[str, tuple[Sequence[int], Mode]],
    *,
    sampling: SamplingParams | None = None,
    each_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Made]:
    """Run all of ``requests`` together to their end. Raises what one of them ends with."""
    for name, (ids, mode) in requests.items():
        request = request_of(name, ids, sampling or SamplingParams())
        engine.submit(request, Plan(mode=mode, max_tokens=N_TOKENS), submitted_at_s=time.monotonic())
    made = {name: Made(ids=[]) for name in requests}
    step = 0
    while engine.has_work:
        output = engine.step()
        step += 1
        raise_errors(output)
        for name, chunk in output.chunks:
            made[name].ids += chunk.token_ids
            made[name].n_steps = step
            if chunk.finish is not None:
                made[name].n_cached = chunk.finish.usage.cached_tokens
                names = [event.name for event in chunk.finish.timeline.events]
                made[name].n_preempted = names.count("preempted")
        each_step(step)
    return made


def request_of(name: str, ids: Sequence[int], sampling: SamplingParams) -> GenerationRequest:
    prompt = Prompt(messages=(), token_ids=tuple(ids), n_tokens=len(ids))
    return GenerationRequest(id=name, prompt=prompt, sampling=sampling, ignore_eos=True)


def raise_errors(output: Any) -> None:
    if output.errors:
        raise output.errors[0][1]


def blocks_left(engine: Engine, after: str) -> Check:
    state = engine.snapshot(())
    return at_most(f"blocks not given back after {after}", state.total_blocks - state.free_blocks, 0)


def equal(one: Made, other: Made) -> int:
    return common(one.ids, other.ids)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = list(zip(one, other, strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


def measure(bench: Bench) -> dict[str, Any]:
    """TTFT, TPOT alone and in batches, and how much of the memory's speed a decode step reaches."""
    size = (1 << 30) if bench.device.type == "cuda" else (1 << 24)
    bandwidth = 2 * size / bench.time_s(_copying(size, bench.device), n=10)
    results: dict[str, Any] = {"copy_gb_per_s": bandwidth / 1e9}
    n_bytes = bench.gpu.bytes_per_variant()
    for variant in VARIANTS:
        found: dict[str, float] = {}
        for n in (bench.n_tokens, len(bench.ids)):
            prefill_s = bench.time_s(lambda v=variant, n=n: bench.prefill(bench.gpu, v, n), n=5)  # type: ignore[misc]
            found[f"ttft_ms_{n}"] = 1e3 * prefill_s
        for n in BATCHES:
            slices = bench.batch(n, bench.n_tokens)

            def step(variant: Variant = variant, slices: list[SequenceSlice] = slices) -> list[int]:
                chosen: list[int] = bench.gpu.forward(slices, variant).argmax(-1).tolist()
                return chosen

            found[f"tpot_ms_batch_{n}"] = 1e3 * bench.time_s(step, n=50)
        speed = n_bytes[variant] / found["tpot_ms_batch_1"] * 1e3
        found |= {"weights_gb_per_s": speed / 1e9, "share_of_copy": speed / bandwidth}
        results[variant] = found
        say(f"{variant}: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    return results


def _copying(size: int, device: torch.device) -> Callable[[], object]:
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def memory(bench: Bench) -> dict[str, float]:
    if bench.device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(bench.device)
    return {
        "allocated_gib": torch.cuda.memory_allocated(bench.device) / (1 << 30),
        "peak_gib": torch.cuda.max_memory_allocated(bench.device) / (1 << 30),
        "reserved_gib": torch.cuda.memory_reserved(bench.device) / (1 << 30),
        "free_gib": free / (1 << 30),
        "total_gib": total / (1 << 30),
    }


PARTS: tuple[Callable[[Bench], Checks], ...] = (
    check_units,
    check_logits,
    check_capture,
    check_engine,
    check_changes,
    check_memory,
    check_worker,
)


def run_part(part: Callable[[Bench], Checks], bench: Bench) -> list[Check]:
    """Its checks as far as it comes; what breaks it off is a check that fails."""
    say(f"\n{part.__doc__}")
    found: list[Check] = []
    began = time.perf_counter()
    try:
        for check in part(bench):
            say(
                f"{'ok    ' if check.holds else 'FAILED'} {check.name}: {check.value:.4g} ({check.limit:.4g})"
            )
            found.append(check)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        say(f"FAILED {part.__name__} breaks off: {reason}")
        found.append(Check(name=f"{part.__name__} runs", value=0, limit=1, holds=False, error=reason))
    say(f"       {time.perf_counter() - began:.1f} s")
    return found


def examine(bench: Bench) -> dict[str, Any]:
    """All checks and measurements."""
    checks = [check for part in PARTS for check in run_part(part, bench)]
    results: dict[str, Any] = {}

    def measured(bench: Bench) -> Checks:
        """What it takes, in milliseconds and GB/s."""
        results.update(measure(bench))
        yield at_least("measured variants", sum(variant in results for variant in VARIANTS), len(VARIANTS))

    checks += run_part(measured, bench)
    on_cuda = bench.device.type == "cuda"
    return {
        "name": "cuda",
        "device": torch.cuda.get_device_name(bench.device) if on_cuda else str(bench.device),
        "capability": list(torch.cuda.get_device_capability(bench.device)) if on_cuda else None,
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "model": bench.name,
        "support": asdict(bench.support),
        "captured_steps": bench.n_captured,
        "seconds": bench.load_s,
        "checks": [asdict(check) for check in checks],
        "results": results,
        "memory": memory(bench),
        "holds": all(check.holds for check in checks),
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def chosen_model(name: str | None, folder: Path) -> str:
    """The model that was named; else Gemma 3 270M where it is installed, else random weights of its sizes."""
    if name is not None:
        return name
    try:
        open_checkpoint("gemma3-270m")
        open_tokenizer("gemma3-270m")
    except PacelineError as error:
        say(f"random weights take the place of gemma3-270m: {error}")
        return write_stand_in(folder / "random weights in the sizes of Gemma 3 270M")
    return "gemma3-270m"


def rehearse(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stands in for a capture on a CPU: the work runs again."""
    work()
    return work


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a path, an installed package's name or a hub id")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cache", type=Path, help="where converted weights are kept; else they are not")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    on_cuda = device.type == "cuda"
    if on_cuda and not torch.cuda.is_available():
        say("no CUDA device: nothing was checked")
        return NO_DEVICE
    if on_cuda:
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        cache = given.cache if given.cache is not None else Path(folder)
        os.environ.setdefault("PACELINE_CACHE", str(cache))
        bench = Bench(
            chosen_model(given.model, Path(folder)),
            device,
            cache,
            n_tokens=256,
            support=None if on_cuda else Support(int8=True, fp8=True),
            capture=None if on_cuda else rehearse,
        )
        report = examine(bench)
    print(json.dumps(report, indent=2))
    if not on_cuda:
        say("rehearsed on a CPU: no GPU was checked")
    n_failed = sum(not check["holds"] for check in report["checks"])
    say(f"{n_failed} of {len(report['checks'])} checks failed")
    return 1 if n_failed else 0 if on_cuda else NO_DEVICE


if __name__ == "__main__":
    sys.exit(main())
