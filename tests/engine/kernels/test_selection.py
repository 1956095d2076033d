"""Which kernels are chosen, and why."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from paceline_engine.errors import UnknownOptionError
from paceline_engine.kernels import fallback, linear_fp32, selection
from paceline_engine.kernels.native import NativeKernels
from paceline_engine.kernels.selection import INSTRUCTION_SETS, open_library, select, sets_that_run
from paceline_engine.kernels.selfcheck import first_wrong


def _skip_unless_runnable(name):
    try:
        runnable = sets_that_run(open_library())
    except OSError as error:
        pytest.skip(str(error))
    if name not in runnable:
        pytest.skip(f"this processor does not run {name}")


def test_off_turns_the_kernels_off():
    """``off`` leaves the fallbacks, and says so."""
    chosen = select("off")
    assert chosen.kernels is None
    assert "PACELINE_KERNELS=off" in chosen.reason


def test_an_unknown_set_is_refused():
    """A misspelt set is an error that lists what there is."""
    with pytest.raises(UnknownOptionError, match="avx512, avx2, generic"):
        select("avx3")


@pytest.mark.parametrize(("here", "words"), [(("avx2", "generic"), r"avx2, generic"), ((), "none")])
def test_a_set_that_the_processor_lacks_is_refused(monkeypatch, here, words):
    """A set that does not run here is an error that lists those that do, never quietly another one."""
    _skip_unless_runnable("generic")
    monkeypatch.setattr(selection, "_runs", lambda library, name: name in here)
    with pytest.raises(UnknownOptionError, match=rf"processor runs \({words}\), got 'avx512'"):
        select("avx512")


def test_a_missing_library_means_fallbacks(monkeypatch, tmp_path):
    """An installation without the compiled library runs on torch and says why."""
    monkeypatch.setattr(selection, "_LIBRARY", tmp_path / "absent.so")
    chosen = select(None)
    assert chosen.kernels is None
    assert "not built" in chosen.reason


def test_a_damaged_library_means_fallbacks(monkeypatch, tmp_path):
    """A library that cannot be loaded is passed over with the loader's words."""
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(selection, "_LIBRARY", broken)
    chosen = select(None)
    assert chosen.kernels is None
    assert "broken.so" in chosen.reason


def test_every_set_that_runs_here_passes_its_check(native):
    """The sets under test are right by their own check."""
    assert first_wrong(native) is None


@pytest.mark.parametrize(
    "name", ["linear_fp32", "linear_bf16", "linear_fp8", "linear_int8", "linear_int4", "paged_attention"]
)
@pytest.mark.parametrize("damage", [lambda out: out * 1.01, lambda out: out * float("nan")])
@pytest.mark.parametrize("wanted", INSTRUCTION_SETS)
def test_a_wrong_kernel_is_found_and_its_set_not_used(monkeypatch, caplog, wanted, name, damage):
    """A kernel 1% off, or giving NaN, takes its whole set out of use, with one warning that names it."""
    _skip_unless_runnable(wanted)
    right = getattr(NativeKernels, name)

    def wrong(self, *args, **kwargs):
        out = right(self, *args, **kwargs)
        return damage(out) if self.instruction_set == wanted else out

    monkeypatch.setattr(NativeKernels, name, wrong)
    with caplog.at_level(logging.WARNING):
        chosen = select(wanted)
    assert chosen.kernels is None or chosen.kernels.instruction_set != wanted
    assert [record.getMessage() for record in caplog.records if name in record.getMessage()]


def test_tensors_that_the_kernels_cannot_read_go_to_torch():
    """fp64 inputs take the fallback."""
    x, w = torch.ones(2, 3, dtype=torch.float64), torch.ones(4, 3)
    assert selection.native_for(x) is None
    assert torch.equal(linear_fp32(x.float(), w), fallback.linear_fp32(x.float(), w))


def test_a_fresh_process_takes_the_set_it_is_told_and_shares_the_threads_of_torch():
    """PACELINE_KERNELS names the set, and loading it maps no second OpenMP runtime into the process."""
    _skip_unless_runnable("generic")
    code = (
        "import re; from paceline_engine.kernels import describe; print(describe());"
        "print(len(set(re.findall(r'/\\S*lib(?:gomp|iomp5|omp)\\b\\S*', open('/proc/self/maps').read()))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PACELINE_KERNELS": "generic"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["native kernels: generic", "1"]


def test_importing_the_engine_needs_no_torch():
    """``import paceline_engine`` leaves torch out."""
    code = "import sys, paceline_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_instruction_sets_are_best_first():
    """The widest set is tried first."""
    assert INSTRUCTION_SETS == ("avx512", "avx2", "generic")


def test_the_identity_tells_builds_and_sets_apart(monkeypatch, tmp_path):
    """Another build, another set and no kernels at all are each of another identity."""
    choices = {name: select(name) for name in ("generic", "off")}
    found = {selection.identity()}
    library = tmp_path / "other.so"
    library.write_bytes(b"another build")
    for chosen in choices.values():
        monkeypatch.setattr(selection, "selected", lambda chosen=chosen: chosen)
        found.add(selection.identity())
    monkeypatch.setattr(selection, "_LIBRARY", library)
    monkeypatch.setattr(selection, "selected", lambda: choices["generic"])
    found.add(selection.identity())
    assert len(found) == 4
