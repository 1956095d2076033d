"""Every compiled instruction set that this machine runs, and a source of random tensors."""

from collections.abc import Callable, Iterator

import pytest
import torch

from paceline_engine.kernels.native import NativeKernels
from paceline_engine.kernels.selection import INSTRUCTION_SETS, select


@pytest.fixture(params=INSTRUCTION_SETS)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    kernels = select(request.param).kernels
    if kernels is None or kernels.instruction_set != request.param:
        pytest.skip(f"{request.param} is not built or does not run here")
    return kernels


@pytest.fixture
def rand() -> Callable[..., torch.Tensor]:
    """Normally distributed fp32 tensors, the same in every run."""
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(shape, generator=generator)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products run faster on one thread; tests about threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
