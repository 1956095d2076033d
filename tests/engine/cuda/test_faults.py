"""Faults of a GPU in the terms of our errors."""

from __future__ import annotations

import pytest
import torch

from paceline_engine.cuda.faults import MemoryBudget, device_is_lost, memory_explained
from paceline_engine.errors import ModelLoadError

GIB = 1 << 30


def budget(kv_gib: float, free_gib: float) -> MemoryBudget:
    return MemoryBudget(
        kv_bytes=int(kv_gib * GIB), free_bytes=int(free_gib * GIB), device=torch.device("cuda:1")
    )


def test_memory_that_runs_out_while_loading_names_what_took_it() -> None:
    """The error names the device, what is free and what the cache needs, and what to set."""
    with pytest.raises(ModelLoadError) as caught, memory_explained("m", budget(3, 8)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    for part in ("8.00 GiB are free on cuda:1", "3.00 GiB", "kv_tokens"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_cache_that_can_never_fit_is_refused_before_anything_loads() -> None:
    """Nothing runs, and the same error says why."""
    ran = False
    with pytest.raises(ModelLoadError, match=r"9\.00 GiB"), memory_explained("m", budget(9, 8)):
        ran = True
    assert not ran


def test_memory_that_runs_out_on_a_cpu_names_its_size() -> None:
    """torch's allocator on a CPU raises a plain RuntimeError; the error says how much was asked for."""
    with pytest.raises(ModelLoadError, match=r"4096\.0 GiB.*kv_tokens"), memory_explained("m", None):
        torch.empty(1 << 42, dtype=torch.uint8)


def test_other_errors_pass_unchanged() -> None:
    """Only memory is explained."""
    with pytest.raises(KeyError), memory_explained("m", None):
        raise KeyError("x")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure\nout of memory is another"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (torch.AcceleratorError("CUDA error: invalid configuration argument"), False),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling"), False),
        (ValueError("x"), False),
    ],
)
def test_which_errors_lose_the_device(error: Exception, lost: bool) -> None:
    """After a device's own fault nothing can run; after running out of memory much can."""
    assert device_is_lost(error) is lost


def test_before_torch_named_them_faults_are_known_by_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.8 raises RuntimeError for both."""
    monkeypatch.delattr(torch, "AcceleratorError")
    assert device_is_lost(RuntimeError("CUDA error: device-side assert triggered"))
    assert not device_is_lost(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED"))
    assert not device_is_lost(torch.OutOfMemoryError("CUDA error: out of memory"))
