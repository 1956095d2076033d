"""Where the engine is opened."""

from __future__ import annotations

import pytest
import torch

from paceline_engine.backends.embedded.source import _device
from paceline_engine.errors import InvalidValueError


@pytest.mark.parametrize(
    ("name", "n_devices", "there"),
    [("cuda", 0, "none"), ("cuda:2", 2, "cuda:0, cuda:1"), ("gpu", 1, "cuda:0"), ("meta", 0, "none")],
)
def test_a_device_that_is_not_there_is_refused_by_name(
    name: str, n_devices: int, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error lists the devices that there are, and what chooses one by itself."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_devices)
    with pytest.raises(InvalidValueError) as caught:
        _device(name)
    for part in (name, f"({there})", "'auto'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("available", "kind"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_where_there_is_one(
    available: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the CPU; a device can be named all the same."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * available)
    assert _device("auto").type == kind
    assert _device("cpu").type == "cpu"
    if available:
        assert _device("cuda:1") == torch.device("cuda:1")
