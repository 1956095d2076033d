"""What a person sees in a prompt: short representations, and one line for a decision."""

from __future__ import annotations

import pytest

import paceline
from paceline.errors import ClosedError, InvalidValueError
from paceline.testing import ManualClock, ScriptedBackend


def client() -> paceline.Client:
    clock = ManualClock()
    return paceline.Client(backend=ScriptedBackend("one two", clock=clock), clock=clock, tracing=False)


def test_a_client_and_its_turns_tell_their_state():
    """Client, turn and stream say what they are and how far they came."""
    with client() as made:
        assert repr(made) == "<Client scripted: started>"
        turn = made.turn("desk")
        assert repr(turn).startswith("<Turn 'desk': not open, TTFT<200ms")
        with turn:
            assert repr(turn).startswith("<Turn 'desk': open")
            stream = turn.stream("hi", max_tokens=4)
            assert repr(stream) == "<Stream not begun>"
            next(stream)
            assert repr(stream) == "<Stream running, 3 characters>"
            stream.close()
            assert repr(stream) == "<Stream closed, 3 characters>"
        assert repr(turn).startswith("<Turn 'desk': closed")
    assert repr(made) == "<Client scripted: closed>"
    assert repr(paceline.AsyncClient("some.gguf")) == "<AsyncClient some.gguf: not started>"


def test_answers_decisions_and_reports_fit_a_screen():
    """None of them unrolls every candidate and time stamp."""
    with client() as made, made.turn() as turn:
        answer = turn.generate("hi", max_tokens=4)
        decision = turn.plan("hi", max_tokens=4)
        shortest = turn.plan("hi", max_tokens=1)
    for shown in (repr(answer), repr(decision), repr(turn.report), repr(turn.report.generations[0])):
        assert len(shown) < 900
    assert str(decision) == "run bf16 on scripted, at most 4 tokens (fits the SLO)"
    assert str(shortest) == "run bf16 on scripted, at most 1 token (fits the SLO)"


def test_a_turn_says_how_to_open_it():
    """A call on a turn that was never opened names both ways."""
    made = client()
    with pytest.raises(ClosedError, match=r"`async with .*`, or with `with` where"):
        made.turn().generate("hi")


def test_an_slo_given_as_text_is_told_how_to_be_read():
    """The remedy is the very call that reads the text."""
    with pytest.raises(InvalidValueError, match=r"use paceline\.SLO\.parse\('TTFT<1s'\)"):
        client().turn(slo="TTFT<1s")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", 5, None])
def test_a_turn_needs_a_name_that_is_a_text(name):
    """It is refused where it is given, and not in the tracing."""
    with pytest.raises(InvalidValueError) as refused:
        client().turn(name)
    assert refused.value.field == "name"


def test_no_option_of_a_generation_is_left_unexplained():
    """Every field of ``GenerateOptions`` has a docstring below it."""
    import ast
    import inspect
    from pathlib import Path

    from paceline import options

    tree = ast.parse(Path(inspect.getfile(options)).read_text(encoding="utf-8"))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "GenerateOptions").body
    for field, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(below, ast.Expr), ast.unparse(field)
