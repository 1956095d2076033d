"""Checks and measures the engine on one GPU in a few minutes, and prints one JSON object.

    python tests/engine/gpu/check_cuda.py [--model PATH] [--device cuda:0]

Exit status: 0 where every check holds, 1 where one does not, 77 where there is no CUDA device, so that a
machine without one is never taken for a machine that passed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline_engine.core import Engine, EngineConfig
from paceline_engine.cuda.graphs import Capture
from paceline_engine.cuda.support import Support
from paceline_engine.loading import open_checkpoint, open_tokenizer
from paceline_engine.mode import Drafter, Mode, Speculation, Variant
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.runner import TorchRunner
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt

NO_DEVICE = 77
TEXT = (
    "The agent reads the answer of the tool and tells the traveller what it found. Flight 212 to Oslo leaves "
    "at ten to nine from gate 14; the next one, at noon, is full. Rebooking costs nothing before midnight. "
)
VARIANTS = (Variant.FP32, Variant.BF16, Variant.INT8, Variant.FP8, Variant.INT4)
BLOCK_SIZE = 16
ROOM_FOR_ROUNDING = 0.03
"""Error beyond 1.5 times that of the CPU's kernels, for activations rounded to bf16, FP8 or int8."""
NEAR_TIE = 0.05
"""Share of the logits' spread within which two tokens may change places."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One statement that has to hold."""

    name: str
    value: float
    limit: float
    holds: bool


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
        checkpoint = open_checkpoint(model)
        self.tokenizer = open_tokenizer(model)
        self.name = checkpoint.name
        ids = list(self.tokenizer.encode(TEXT))
        room = min(checkpoint.spec.context_tokens, 8 * n_tokens)
        self.ids = (ids * (room // len(ids) + 1))[:room]
        self.blocks = tuple(range(-(-room // BLOCK_SIZE)))
        options: dict[str, Any] = {"block_size": BLOCK_SIZE, "cache_dir": cache_dir, "variants": VARIANTS}
        self.cpu = TorchRunner.load(checkpoint, n_blocks=len(self.blocks), kv_dtype=torch.float32, **options)
        # The device's cache has its second half for the engine's checks.
        self.gpu = TorchRunner.load(
            checkpoint, n_blocks=4 * len(self.blocks), device=device, support=self.support, **options
        )
        self.capture = capture
        self.n_captured = 0

    def capture_decode(self) -> None:
        self.n_captured = self.gpu.capture_decode(max_sequences=4, capture=self.capture)

    def prefill(self, runner: TorchRunner, variant: Variant, n: int, logits: Logits = Logits.LAST) -> Tensor:
        """The first ``n`` tokens from nothing; fp32 [rows, vocab] on the CPU."""
        piece = SequenceSlice(token_ids=self.ids[:n], position=0, block_table=self.blocks, logits=logits)
        return runner.forward([piece], variant).cpu()

    def decode(self, variant: Variant, at: int, token: int) -> Tensor:
        piece = SequenceSlice(token_ids=(token,), position=at, block_table=self.blocks)
        return self.gpu.forward([piece], variant)

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


def check_logits(bench: Bench) -> list[Check]:
    """Each variant is about as near to fp32 on the CPU as the CPU's own kernels are."""
    found: list[Check] = []
    reference = bench.prefill(bench.cpu, Variant.FP32, bench.n_tokens, Logits.ALL)
    for variant in VARIANTS:
        on_gpu = bench.prefill(bench.gpu, variant, bench.n_tokens, Logits.ALL)
        on_cpu = bench.prefill(bench.cpu, variant, bench.n_tokens, Logits.ALL)
        limit = 1.5 * relative(on_cpu, reference) + ROOM_FOR_ROUNDING
        found.append(at_most(f"{variant}: error of a prefill", relative(on_gpu, reference), limit))
        rows = [
            bench.decode(variant, at, bench.ids[at]).cpu() for at in range(bench.n_tokens - 8, bench.n_tokens)
        ]
        error = relative(torch.cat(rows), reference[-8:])
        found.append(at_most(f"{variant}: error of eight decode steps", error, limit))
    return found


def check_capture(bench: Bench) -> list[Check]:
    """The same tokens, decoded greedily before and after capturing, but for near ties."""
    before = {variant: _greedy(bench, variant) for variant in VARIANTS}
    bench.capture_decode()
    found = [at_least("captured decode steps", bench.n_captured, 1)]
    for variant in VARIANTS:
        changed = 0
        after = _greedy(bench, variant, along=[int(row.argmax()) for row in before[variant]])
        for ours, theirs in zip(before[variant], after, strict=True):
            chosen = ours[int(ours.argmax())] - ours[int(theirs.argmax())]
            changed += float(chosen) > NEAR_TIE * float(ours.std())
        found.append(at_most(f"{variant}: tokens changed by capturing", changed, 0))
    return found


def _greedy(bench: Bench, variant: Variant, along: Sequence[int] | None = None, n: int = 32) -> list[Tensor]:
    """Logits of ``n`` steps, of the most likely tokens or of those given."""
    rows = [bench.prefill(bench.gpu, variant, bench.n_tokens)[0]]
    for step in range(n - 1):
        token = int(rows[-1].argmax()) if along is None else along[step]
        rows.append(bench.decode(variant, bench.n_tokens + step, token)[0].cpu())
    return rows


def check_engine(bench: Bench) -> list[Check]:
    """Prefix cache and speculation change no token, and both do something."""
    engine = Engine(bench.gpu, bench.tokenizer, config=EngineConfig(model_fingerprint=bench.name))
    ids = bench.ids[: bench.n_tokens]
    cold = _generate(engine, "cold", ids, Mode(variant=Variant.BF16))
    warm = _generate(engine, "warm", ids, Mode(variant=Variant.BF16))
    drafted = _generate(
        engine,
        "drafted",
        ids,
        Mode(
            variant=Variant.BF16,
            speculation=Speculation(drafter=Drafter.SELF, max_draft_tokens=4, draft_variant=Variant.INT4),
        ),
    )
    # Steps of other shapes sum in another order: a token may differ at a near tie, and all after it.
    return [
        at_least("tokens served by the prefix cache", warm["cached"], len(ids) // 2),
        at_least("equal tokens with the prefix cache", _equal(cold["ids"], warm["ids"]), 8),
        at_least("equal tokens with speculation", _equal(cold["ids"], drafted["ids"]), 8),
        at_most("steps of 32 tokens with speculation", drafted["steps"], cold["steps"]),
    ]


def _generate(engine: Engine, name: str, ids: Sequence[int], mode: Mode) -> dict[str, Any]:
    request = GenerationRequest(
        id=name, prompt=Prompt(messages=(), token_ids=tuple(ids), n_tokens=len(ids)), ignore_eos=True
    )
    engine.submit(request, Plan(mode=mode, max_tokens=32), submitted_at_s=time.monotonic())
    made: list[int] = []
    n_steps, cached = 0, 0
    while engine.has_work:
        output = engine.step()
        n_steps += 1
        if output.errors:
            raise output.errors[0][1]
        for _, chunk in output.chunks:
            made += chunk.token_ids
            if chunk.finish is not None:
                cached = chunk.finish.usage.cached_tokens
    return {"ids": made, "steps": n_steps, "cached": cached}


def _equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = list(zip(one, other, strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


def measure(bench: Bench) -> dict[str, Any]:
    """TTFT and TPOT of each variant, and how much of the memory's speed a decode step reaches."""
    size = (1 << 30) if bench.device.type == "cuda" else (1 << 24)
    bandwidth = 2 * size / bench.time_s(_copying(size, bench.device), n=10)
    results: dict[str, Any] = {"copy_gb_per_s": bandwidth / 1e9}
    n_bytes = bench.gpu.bytes_per_variant()
    for variant in VARIANTS:
        at = bench.n_tokens

        def step(variant: Variant = variant, at: int = at) -> int:
            return int(bench.decode(variant, at, bench.ids[at]).argmax())

        ttft = {
            f"ttft_ms_{n}": 1e3 * bench.time_s(lambda v=variant, n=n: bench.prefill(bench.gpu, v, n), n=5)  # type: ignore[misc]
            for n in (bench.n_tokens, len(bench.ids))
        }
        tpot_s = bench.time_s(step, n=50)
        results[variant] = {
            **ttft,
            "tpot_ms": 1e3 * tpot_s,
            "weights_gb_per_s": n_bytes[variant] / tpot_s / 1e9,
            "share_of_copy": n_bytes[variant] / tpot_s / bandwidth,
        }
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


def examine(bench: Bench) -> dict[str, Any]:
    """All checks and measurements."""
    checks: list[Check] = []
    for part in (check_logits, check_capture, check_engine):
        print(part.__doc__, file=sys.stderr)
        checks += part(bench)
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
        "checks": [asdict(check) for check in checks],
        "results": measure(bench),
        "memory": memory(bench),
        "holds": all(check.holds for check in checks),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="gemma3-270m", help="a path, an installed package's name or a hub id"
    )
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return NO_DEVICE
    device = torch.device(given.device)
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with tempfile.TemporaryDirectory() as folder:
        report = examine(Bench(given.model, device, Path(folder), n_tokens=256))
    print(json.dumps(report, indent=2))
    return 0 if report["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
