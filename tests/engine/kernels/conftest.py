"""Every instruction set, and a source of random tensors.

Where the processor lacks AVX-512, its code is compiled for AVX2 with the intrinsics emulated, so that it is
tested everywhere.
"""

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from paceline_engine.kernels import fallback
from paceline_engine.kernels.native import NativeKernels
from paceline_engine.kernels.selection import INSTRUCTION_SETS, open_library, sets_that_run

ROOT = Path(__file__).parents[3]
EMULATED = "avx512 (emulated)"
TORCH = "torch"
EMULATION = ["-O2", "-mavx2", "-mfma", "-include", str(Path(__file__).with_name("avx512_emulated.h"))]


def _open_library() -> tuple[ctypes.CDLL | None, tuple[str, ...]]:
    """The compiled library, if there is one, and its sets that this processor runs."""
    try:
        library = open_library()
    except OSError:
        return None, ()
    return library, sets_that_run(library)


LIBRARY, RUNNABLE = _open_library()
SETS = [EMULATED if name == "avx512" and name not in RUNNABLE else name for name in INSTRUCTION_SETS]


@pytest.fixture(scope="session")
def build_hook() -> ModuleType:
    """The build hook, which no package holds."""
    pytest.importorskip("hatchling", reason="the build hook needs hatchling")
    found = importlib.util.spec_from_file_location("build_kernels", ROOT / "build_kernels.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def emulated_avx512(build_hook: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    """The AVX-512 kernels compiled for AVX2."""
    if "avx2" not in RUNNABLE:
        pytest.skip("emulating AVX-512 needs kernels that were built, and AVX2")
    compiler, reason = build_hook.find_compiler()
    if compiler is None:
        pytest.skip(f"emulating AVX-512 needs a C++ compiler: {reason}")
    path = build_hook.compile_kernels(
        compiler,
        ROOT / "engine/paceline_engine/kernels/csrc",
        tmp_path_factory.mktemp("avx512"),
        {"avx512": EMULATION},
    )
    return NativeKernels(ctypes.CDLL(str(path)), "avx512")


def _kernels(request: pytest.FixtureRequest) -> NativeKernels:
    if request.param == EMULATED:
        emulated: NativeKernels = request.getfixturevalue("emulated_avx512")
        return emulated
    if LIBRARY is None or request.param not in RUNNABLE:
        pytest.skip(f"{request.param} is not built or does not run here")
    return NativeKernels(LIBRARY, request.param)


@pytest.fixture(params=SETS)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    """One set's kernels, right or wrong: whether they pass the check at the start is for the tests to say."""
    return _kernels(request)


@pytest.fixture(params=[*SETS, TORCH])
def kernels(request: pytest.FixtureRequest) -> NativeKernels | ModuleType:
    """One set's kernels, or what runs where there are none: for what must hold of both."""
    return fallback if request.param == TORCH else _kernels(request)


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
