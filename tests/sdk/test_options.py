"""Options of a call as they are sent on."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from paceline.options import check_max_tokens, check_options, parse_options


class Id(IntEnum):
    STOP = 3


class Label(str):
    """A caller's own text, which no other process knows."""

    __slots__ = ()

    def __str__(self):
        return "shown otherwise"


def test_classes_of_the_callers_stay_with_the_caller():
    """Texts and numbers of other classes become plain ones: a worker could not read them."""
    options = parse_options(
        {
            "temperature": np.float32(0.5),
            "seed": np.int64(7),
            "stop": [Label("END")],
            "salt": Label("tenant"),
            "stop_token_ids": [Id.STOP, np.int64(4)],
            "logit_bias": {Id.STOP: np.float64(1.5)},
        }
    )
    assert options.stop == ("END",)
    assert options.salt == "tenant"
    assert options.stop_token_ids == (3, 4)
    assert options.sampling.logit_bias == {3: 1.5}
    found = [
        options.sampling.temperature,
        options.sampling.seed,
        *options.stop,
        options.salt,
        *options.stop_token_ids,
        *options.sampling.logit_bias,
        *options.sampling.logit_bias.values(),
        check_max_tokens(np.int64(5)),
        *check_options([Label("yes"), "no"]),
    ]
    assert {type(value) for value in found} == {int, float, str}
