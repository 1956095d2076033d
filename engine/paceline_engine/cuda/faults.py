"""What can go wrong on a device, in the terms of our errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from dataclasses import dataclass

import torch

from paceline_engine.errors import ModelLoadError
from paceline_engine.model.spec import ModelSpec

_GIB = 1 << 30
_PASSING = ("out of memory", "invalid argument", "invalid configuration argument", "capturing", "CUBLAS")
"""What CUDA says of errors after which the next call is as good as ever."""


def device_is_lost(error: Exception) -> bool:
    """Whether nothing can run on the device after ``error``: an illegal access, or the device is gone.

    CUDA answers every later call with the same error, so the process has to end. Memory that runs out, a
    call that is refused for its arguments, and a library that refuses one, are none of these.
    """
    first_line = str(error).partition("\n")[0]
    if any(words in first_line for words in _PASSING):
        return False
    kind: type[Exception] | None = getattr(torch, "AcceleratorError", None)
    if kind is not None:
        return isinstance(error, kind)
    return type(error) is RuntimeError and first_line.startswith("CUDA error: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What the KV cache needs of a GPU's memory."""

    kv_bytes: int
    free_bytes: int
    device: torch.device

    @classmethod
    def of_kv(
        cls, spec: ModelSpec, *, n_blocks: int, block_size: int, kv_dtype: torch.dtype, device: torch.device
    ) -> MemoryBudget | None:
        """None on a CPU, whose memory is taken as it is written."""
        if device.type != "cuda":
            return None
        per_token = 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * kv_dtype.itemsize
        free, _ = torch.cuda.mem_get_info(device)
        return cls(kv_bytes=n_blocks * block_size * per_token, free_bytes=free, device=device)

    def explain(self) -> str:
        kv, free = (f"{n / _GIB:.2f} GiB" for n in (self.kv_bytes, self.free_bytes))
        return f"{free} are free on {self.device}, of which the KV cache needs {kv} beside the weights"


@contextlib.contextmanager
def memory_explained(model: str, budget: MemoryBudget | None) -> Generator[None, None, None]:
    """Turn memory that runs out while loading into an error that says what took it.

    Raises:
        ModelLoadError: memory ran out, or would at once.
    """
    remedy = "set a smaller kv_tokens, load fewer variants, or choose another device"
    if budget is not None and budget.kv_bytes > budget.free_bytes:
        raise ModelLoadError(model, reason=budget.explain(), remedy=remedy)
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0] if budget is None else budget.explain()
        raise ModelLoadError(model, reason=reason, remedy=remedy) from error
    except RuntimeError as error:
        # What torch's allocator on a CPU raises has no class of its own.
        if "DefaultCPUAllocator" not in str(error):
            raise
        asked = re.search(r"allocate (\d+) bytes", str(error))
        size = f" of {int(asked[1]) / _GIB:.1f} GiB" if asked else ""
        reason = f"this machine has not the memory for one part{size}"
        raise ModelLoadError(model, reason=reason, remedy=remedy) from error
