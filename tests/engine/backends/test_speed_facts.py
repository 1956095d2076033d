"""What a saved profile is keyed by."""

from __future__ import annotations

import pytest

from paceline_engine.backends.embedded import EmbeddedConfig
from paceline_engine.backends.embedded.source import fingerprint_of, speed_facts
from paceline_engine.kernels import selection
from paceline_engine.quant import store


def test_whatever_decides_the_speed_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights' format, the kernels, PyTorch, the threads, the blocks and the model each count."""
    config = EmbeddedConfig(model="any", device="cpu", n_threads=2)
    found = [speed_facts("digest", config)]
    found.append(speed_facts("another", config))
    found.append(speed_facts("digest", EmbeddedConfig(model="any", device="cpu", n_threads=1)))
    found.append(speed_facts("digest", EmbeddedConfig(model="any", device="cpu", n_threads=2, block_size=32)))
    for target, name, value in (
        (selection, "identity", lambda: "other kernels"),
        (store, "FORMAT_VERSION", "next"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            found.append(speed_facts("digest", config))
    with monkeypatch.context() as patch:
        patch.setattr("torch.__version__", "99.0")
        found.append(speed_facts("digest", config))
    fingerprints = {fingerprint_of(each) for each in found}
    assert len(fingerprints) == len(found) == 7
    assert fingerprint_of(speed_facts("digest", config)) in fingerprints
