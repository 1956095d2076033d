"""The build hook: when the kernels are compiled, and what happens when they cannot be."""

import sys

import pytest


@pytest.fixture
def clean(monkeypatch):
    for name in ("CXX", "PACELINE_NO_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_environment_can_leave_the_kernels_out(build_hook, clean):
    """PACELINE_NO_KERNELS=1 wins over a compiler."""
    clean.setenv("CXX", "g++")
    clean.setenv("PACELINE_NO_KERNELS", "1")
    assert build_hook.find_compiler() == (None, "PACELINE_NO_KERNELS=1")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="compiled on Linux only")
def test_without_a_compiler_there_is_a_plain_reason(build_hook, clean, tmp_path):
    """A machine without a compiler gets a pure wheel and one line that says why."""
    clean.setenv("PATH", str(tmp_path))
    compiler, reason = build_hook.find_compiler()
    assert compiler is None
    assert "install g++" in reason


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="compiled on Linux only")
def test_the_chosen_compiler_is_taken(build_hook, clean):
    """CXX is used as it is, also with arguments."""
    clean.setenv("CXX", "ccache g++")
    assert build_hook.find_compiler() == ("ccache g++", "")


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("no-such-compiler", "could not be run"), ("false", "compiling the kernels failed")],
)
def test_a_compiler_that_fails_stops_the_build(build_hook, tmp_path, compiler, message):
    """A broken compiler is an error with the way out, never a quietly slower wheel."""
    with pytest.raises(RuntimeError, match=message) as failure:
        build_hook.compile_kernels(compiler, tmp_path, tmp_path / "out", build_hook.sets_here())
    assert "PACELINE_NO_KERNELS=1" in str(failure.value)
