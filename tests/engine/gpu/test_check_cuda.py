"""The check of a GPU: its real run where there is one, and its logic on a CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator
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
def check() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        yield _imported()


def _imported() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_cuda", Path(__file__).with_name("check_cuda.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_cuda"] = module
    spec.loader.exec_module(module)
    return module


def bench_on_cpu(check: ModuleType, model: str, folder: Path, *, n_tokens: int = 24) -> Any:
    return check.Bench(
        model,
        torch.device("cpu"),
        folder,
        n_tokens=n_tokens,
        support=Support(int8=True, fp8=True),
        capture=check.rehearse,
    )


def small_model(folder: Path) -> str:
    stand_in = sys.modules["stand_in"]
    return str(stand_in.write_stand_in(folder / "model", stand_in.SMALL))


def test_without_a_device_the_check_says_so_and_does_not_pass(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A status of its own, and nothing that could be read as a result."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 77
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no CUDA device: nothing was checked" in printed.err


def failed(checks: Iterable[Any]) -> list[tuple[str, float, str | None]]:
    return [(one.name, one.value, one.error) for one in checks if not one.holds]


@pytest.mark.parametrize("kind", ["checkpoint", "random weights"])
def test_the_check_runs_through_on_a_cpu_and_holds(
    kind: str,
    check: ModuleType,
    tiny_model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every part of it works on the operators of a GPU, says each check's figures and prints as JSON."""
    monkeypatch.setattr(check, "N_TOKENS", 12)
    model = str(tiny_model("llama").safetensors) if kind == "checkpoint" else small_model(tmp_path)
    report = check.examine(bench_on_cpu(check, model, tmp_path))
    assert [one for one in report["checks"] if not one["holds"]] == []
    assert report["holds"]
    assert report["captured_steps"] > 0
    assert {"fp32", "bf16", "int8", "fp8", "int4"} < set(report["results"])
    assert json.loads(json.dumps(report)) == report
    said = capsys.readouterr().err
    assert all(f"ok     {one['name']}: " in said for one in report["checks"])


@pytest.fixture
def bench(check: ModuleType, tmp_path: Path) -> Any:
    return bench_on_cpu(check, small_model(tmp_path), tmp_path)


def test_the_check_fails_where_the_device_is_wrong(check: ModuleType, bench: Any) -> None:
    """Logits that are a tenth off are found, in prefill, in decode steps and in mixed passes."""
    right = bench.gpu.forward
    bench.gpu.forward = lambda *args, **options: right(*args, **options) * 1.1
    names = [name for name, _, _ in failed(check.check_logits(bench))]
    assert "fp32: error of a prefill" in names
    assert "bf16: error of eight decode steps" in names
    assert "int8: error of verifying eight tokens beside a prefill" in names


def test_the_check_fails_where_captured_steps_are_wrong(check: ModuleType, bench: Any) -> None:
    """A replay that gives another step's result is found."""

    def capture(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        result = work()
        return lambda: result + torch.randn(result.shape, generator=torch.Generator().manual_seed(1))

    bench.capture = capture
    names = [name for name, _, _ in failed(check.check_capture(bench))]
    assert "bf16: error by capturing a step of one" in names
    assert "int4: error by capturing a step of three" in names


def test_a_part_that_breaks_off_fails_and_the_others_go_on(
    check: ModuleType, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was checked before stays, the error is named, and the whole does not hold."""
    monkeypatch.setattr(check, "PARTS", (check.check_logits, check.check_capture))
    monkeypatch.setattr(check, "BATCHES", (1, 4))
    right, calls = bench.gpu.forward, []

    def forward(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args[1])
        if len(calls) == 40:
            raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
        return right(*args, **options)

    bench.gpu.forward = forward
    report = check.examine(bench)
    broken = [one for one in report["checks"] if one["error"]]
    assert [one["error"] for one in broken] == ["RuntimeError: CUBLAS_STATUS_EXECUTION_FAILED"]
    assert report["checks"].index(broken[0]) > 0
    assert report["checks"][-1]["name"] == "measured variants"
    assert not report["holds"]


def test_a_rehearsal_never_passes(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU the status is that of a machine without a GPU, though every check holds."""
    model = small_model(tmp_path)
    monkeypatch.setattr(check, "chosen_model", lambda name, folder: model)
    monkeypatch.setattr(check, "PARTS", (check.check_units,))
    monkeypatch.setattr(check, "measure", lambda bench: dict.fromkeys(check.VARIANTS, 0.0))
    assert check.main(["--device", "cpu", "--cache", str(tmp_path)]) == 77
    printed = capsys.readouterr()
    assert json.loads(printed.out)["holds"]
    assert "no GPU was checked" in printed.err


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
