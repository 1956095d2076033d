"""What a device is found to do."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from paceline_engine.cuda.matrices import DeviceInt8
from paceline_engine.cuda.support import Support


def test_what_this_machine_lacks_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU there is no flash attention and no 4-bit product, and each says why."""
    with caplog.at_level(logging.INFO):
        found = Support.probe(torch.device("cpu"))
    assert not found.flash
    assert not found.int4
    assert found.int8
    assert {record.args[0] for record in caplog.records if record.args} >= {"flash", "int4"}


@pytest.mark.parametrize("fault", [1.3, float("nan")])
def test_an_operator_that_is_wrong_is_not_used(
    fault: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A product that differs from its reference, or is not a number, is refused aloud."""
    right = DeviceInt8.multiply

    def wrong(self: DeviceInt8, x: Tensor) -> Tensor:
        return right(self, x) * (fault if x.shape[0] == 24 else 1.0)

    monkeypatch.setattr(DeviceInt8, "multiply", wrong)
    assert not Support.probe(torch.device("cpu")).int8
    assert "differs from its reference" in caplog.text
