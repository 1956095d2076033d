"""A CUDA device of shapes and types without values, so that what runs on one is checked without one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from paceline_engine.cuda.support import Support
from paceline_engine.kernels import INT4_GROUP, Bf16Weight, Fp8Weight, Int4Weight, Int8Weight
from paceline_engine.kernels.selection import selected
from paceline_engine.mode import Variant
from paceline_engine.model import runner as runner_module
from paceline_engine.model.runner import TorchRunner
from paceline_engine.model.spec import Activation, LayerKind, ModelSpec, RopeSpec
from paceline_engine.quant import layout
from paceline_engine.quant.matrix import Fp32Weight, Matrix

_READERS = {"item": int, "tolist": list, "__int__": int, "__float__": float, "__bool__": bool}
_CUDA, _META = 1, 14
"""Numbers of ``c10::DeviceType``."""


@dataclass(frozen=True, kw_only=True)
class FakeCuda:
    """The device, and how often the host waited for it."""

    device: torch.device = field(default_factory=lambda: torch.device("cuda:0"))
    waits: list[str] = field(default_factory=list)
    """What read a value of the device's. All values read as zero."""


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Inside the test every tensor is one of torch's fakes: operators check devices, types and shapes as on
    the device itself, and compute nothing."""
    selected()  # compares kernels by their values, once a process
    fake = FakeCuda()
    for name, kind in _READERS.items():
        monkeypatch.setattr(FakeTensor, name, _reader(name, kind, fake.waits), raising=False)
    # torch computes with the values of small constants, which a torch without CUDA cannot do on CUDA.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: torch.empty_like(self))
    monkeypatch.setattr(torch.Tensor, "to", _forgetting(torch.Tensor.to))
    monkeypatch.setattr(torch, "tensor", _tensor(torch.tensor))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: fake.waits.append("synchronize"))
    with _device_guard(), FakeTensorMode(allow_non_fake_inputs=True):
        yield fake


def _reader(name: str, kind: type, waits: list[str]) -> Callable[..., Any]:
    real = getattr(FakeTensor, name)

    @functools.wraps(real)
    def read(self: FakeTensor, *args: Any) -> Any:
        if self.constant is not None:
            return real(self, *args)
        if self.is_cuda:
            waits.append(name)
        return _zeros(tuple(self.shape)) if name == "tolist" else kind(0)

    return read


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0.0


def _forgetting(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if isinstance(self, FakeTensor):
            self.constant = None
        return real(self, *args, **options)

    return to


def _tensor(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        made = real(data, **options)
        return made if device is None else made.to(device)

    return tensor


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Lets indexing from Python, which sets the current device, do so where torch was built without CUDA."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    if before is None:
        guards[_CUDA] = guards[_META]  # the one that does nothing
    yield
    guards[_CUDA] = before


GEMMA = ModelSpec(
    family="gemma3",
    n_layers=3,
    hidden_size=640,
    n_heads=4,
    n_kv_heads=1,
    head_dim=256,
    intermediate_size=2048,
    vocab_size=262_144,
    context_tokens=32_768,
    norm_eps=1e-6,
    activation=Activation.GELU_TANH,
    rope=RopeSpec(theta=1e6),
    local_rope=RopeSpec(theta=1e4),
    layer_kinds=(LayerKind.SLIDING, LayerKind.FULL, LayerKind.SLIDING),
    sliding_window=512,
    tied_embeddings=True,
    qk_norm=True,
    sandwich_norms=True,
    attention_scale=256**-0.5,
    embedding_scale=640**0.5,
    eos_token_ids=(1,),
)
"""Gemma 3 270M with three of its layers."""
ODD = ModelSpec(
    family="llama",
    n_layers=2,
    hidden_size=36,
    n_heads=3,
    n_kv_heads=3,
    head_dim=12,
    intermediate_size=20,
    vocab_size=97,
    context_tokens=512,
    norm_eps=1e-6,
    activation=Activation.SILU,
    rope=RopeSpec(theta=1e4),
    attention_bias=True,
    output_bias=True,
    eos_token_ids=(1,),
)
"""Sizes that no unit of a GPU takes, biases and an embedding table of its own."""


@dataclass(frozen=True, kw_only=True)
class FakeCheckpoint:
    """Gives tensors that have shapes alone, in every variant."""

    spec: ModelSpec
    name: str = "fake"
    path: Path = Path("fake")
    digest: str = "0" * 64

    def matrices(self, variant: Variant, *, on_fraction: object = None) -> dict[str, Matrix]:
        return {part.name: _matrix(*part.shape, variant) for part in layout.matrices(self.spec)}

    def embedding(self, variant: Variant) -> Matrix | None:
        part = layout.embedding(self.spec)
        return None if part is None else _matrix(*part.shape, variant)

    def vectors(self) -> dict[str, torch.Tensor]:
        return {part.name: torch.empty(part.shape) for part in layout.vectors(self.spec)}

    def has(self, variant: Variant) -> bool:
        return True


def _matrix(n_rows: int, n_inputs: int, variant: Variant) -> Matrix:
    n_groups = -(-n_inputs // INT4_GROUP)
    shape = (n_rows, n_inputs)
    match variant:
        case Variant.FP32:
            return Fp32Weight(data=torch.empty(shape))
        case Variant.BF16:
            return Bf16Weight(data=torch.empty(shape, dtype=torch.bfloat16))
        case Variant.FP8:
            return Fp8Weight(codes=torch.empty(shape, dtype=torch.float8_e4m3fn), scale=torch.empty(n_rows))
        case Variant.INT8:
            return Int8Weight(codes=torch.empty(shape, dtype=torch.int8), scale=torch.empty(n_rows))
        case Variant.INT4:
            return Int4Weight(
                codes=torch.empty((n_rows, n_groups * INT4_GROUP // 2), dtype=torch.uint8),
                scale=torch.empty((n_rows, n_groups), dtype=torch.bfloat16),
                minimum=torch.empty((n_rows, n_groups), dtype=torch.bfloat16),
                n_inputs=torch.tensor(n_inputs),
            )


@pytest.fixture
def open_runner(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TorchRunner]:
    """Loads a fake checkpoint onto the fake device, as ``TorchRunner.load`` does a real one."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 35, 1 << 36))
    monkeypatch.setattr(runner_module, "_page_in", lambda matrices: None)  # fakes have no pages
    monkeypatch.setattr(runner_module, "WeightStore", lambda checkpoint, directory: checkpoint)

    def load(spec: ModelSpec, support: Support, variants: Sequence[Variant] = tuple(Variant)) -> TorchRunner:
        return TorchRunner.load(
            FakeCheckpoint(spec=spec), variants=variants, device="cuda", n_blocks=64, support=support
        )

    return load


@pytest.fixture
def specs() -> dict[str, ModelSpec]:
    return {"gemma": GEMMA, "odd": ODD}
