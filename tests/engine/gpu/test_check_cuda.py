"""The check of a GPU: its real run where there is one, and its logic on a CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline_engine.cuda.attention import flash_attention, masked_attention
from paceline_engine.cuda.support import Support

NO_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: run 'make gpu' on a machine that has one"
)


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_cuda", Path(__file__).with_name("check_cuda.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_cuda"] = module
    spec.loader.exec_module(module)
    return module


def bench_on_cpu(check: ModuleType, model: Any, folder: Path, **options: Any) -> Any:
    def capture(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        work()
        return work

    return check.Bench(
        str(model.safetensors),
        torch.device("cpu"),
        folder,
        n_tokens=24,
        support=Support(int8=True, fp8=True),
        capture=capture,
        **options,
    )


def test_without_a_device_the_check_says_so_and_does_not_pass(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A status of its own, and nothing that could be read as a result."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 77
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no CUDA device: nothing was checked" in printed.err


def test_the_check_runs_through_on_a_cpu_and_holds(
    check: ModuleType, tiny_model: Any, tmp_path: Path
) -> None:
    """Every part of it works on the operators of a GPU, and prints as JSON."""
    report = check.examine(bench_on_cpu(check, tiny_model("llama"), tmp_path))
    failed = [one for one in report["checks"] if not one["holds"]]
    assert not failed
    assert report["holds"]
    assert report["captured_steps"] > 0
    assert {"fp32", "bf16", "int8", "fp8", "int4"} < set(report["results"])
    assert json.loads(json.dumps(report)) == report


def test_the_check_fails_where_the_device_is_wrong(
    check: ModuleType, tiny_model: Any, tmp_path: Path
) -> None:
    """Logits that are a tenth off are found, in prefill and in decode steps."""
    bench = bench_on_cpu(check, tiny_model("llama"), tmp_path)
    right = bench.gpu.forward
    bench.gpu.forward = lambda *args, **options: right(*args, **options) * 1.1
    failed = [one.name for one in check.check_logits(bench) if not one.holds]
    assert "fp32: error of a prefill" in failed
    assert "bf16: error of eight decode steps" in failed


@NO_GPU
def test_everything_holds_on_this_gpu(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Logits, captured steps, prefix cache and speculation, with the real weights."""
    assert check.main([]) == 0, capsys.readouterr().out


@NO_GPU
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("n_rows", [1, 5])
def test_flash_attention_is_masked_attention(n_rows: int, window: int | None) -> None:
    """On a GPU with flash attention both give the same, whatever is used of what was gathered."""
    device = torch.device("cuda")
    if not Support.probe(device).flash:
        pytest.skip("this device or torch has no flash attention over unequal sequences")
    torch.manual_seed(1)
    q = torch.randn(3 * n_rows, 4, 256, device=device, dtype=torch.bfloat16)
    keys, values = (torch.randn(3 * 512, 1, 256, device=device, dtype=torch.bfloat16) for _ in range(2))
    used = torch.tensor([512, 17, 300], dtype=torch.int32, device=device)
    results = [
        run(q, keys, values, used, used.long() - n_rows, n_rows=n_rows, scale=0.06, window=window)
        for run in (flash_attention, masked_attention)
    ]
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


@NO_GPU
def test_a_hopper_or_newer_gpu_has_every_unit() -> None:
    """FP8, int8, 4-bit and flash attention are all found right where the hardware has them."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("compute capability below 9.0")
    found = Support.probe(torch.device("cuda"))
    assert (found.fp8, found.int8, found.int4, found.flash) == (True, True, True, True)
