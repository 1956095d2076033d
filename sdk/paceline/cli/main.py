"""Commands and options. What a command needs is imported when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline_policies.slo import SLO

app = typer.Typer(
    name="paceline",
    help="Inference for agents that must answer in time.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Rich would take longer to import than everything else that the help needs.
    rich_markup_mode=None,
)

ModelOption = Annotated[
    str, typer.Option("--model", help="A GGUF file, a safetensors folder, 'gemma3-270m' or a hub id.")
]
SloOption = Annotated[
    str | None,
    typer.Option("--slo", help="Budgets, such as 'TTFT<200ms, TPOT<30ms, E2E<2s'. The default is these."),
]
InfeasibleOption = Annotated[
    str | None,
    typer.Option("--on-infeasible", help="'degrade', 'shorten' or 'reject'; overrides what --slo says."),
]
ProfileOption = Annotated[
    str,
    typer.Option(
        "--profile",
        help="Where predictions come from: 'auto' (saved, else calibrate), 'calibrate', 'quick' or 'assume'.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output.")]

DEFAULT_MODEL = "gemma3-270m"
DEFAULT_QUESTION = "Hi, my booking is KX4TRM. What time does my flight leave, and can I still change it?"


@app.command()
def demo(
    slo: SloOption = None,
    on_infeasible: InfeasibleOption = None,
    model: ModelOption = DEFAULT_MODEL,
    question: Annotated[str, typer.Option(help="What the customer asks.")] = DEFAULT_QUESTION,
    max_tokens: Annotated[int, typer.Option(help="Token cap of the answer.")] = 32,
    cold: Annotated[
        bool, typer.Option("--cold", help="Do not warm the system policy into the prefix cache first.")
    ] = False,
    otlp: Annotated[
        str | None,
        typer.Option(
            help="Send the traces there, such as http://localhost:4317 (gRPC), http://localhost:4318 (HTTP) "
            "or, at another port, grpc://host:9999."
        ),
    ] = None,
    profile: ProfileOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Play one turn of an airline agent on a real model, under budgets."""
    from paceline.cli import demo as command

    options = command.DemoOptions(
        question=question,
        slo=_slo(slo, on_infeasible),
        model=model,
        max_tokens=max_tokens,
        warm=not cold,
        otlp_endpoint=otlp,
        profile=profile,  # type: ignore[arg-type]  # the client checks it
    )
    command.run(options, as_json=as_json)


@app.command()
def plan(
    prompt: Annotated[str, typer.Argument(help="The user's message; '-' reads standard input.")],
    slo: SloOption = None,
    on_infeasible: InfeasibleOption = None,
    model: ModelOption = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Token cap.")] = 48,
    profile: ProfileOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Predict and decide without running: what each mode would take, and what would fit."""
    from paceline.cli import plan as command

    text = sys.stdin.read() if prompt == "-" else prompt
    decision = command.decide(
        text,
        slo=_slo(slo, on_infeasible),
        model=model,
        max_tokens=max_tokens,
        profile=profile,  # type: ignore[arg-type]  # the client checks it
    )
    command.show(decision, as_json=as_json)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="'predict', 'overhead' or 'modes'.")],
    model: ModelOption = DEFAULT_MODEL,
    data: Annotated[
        Path | None,
        typer.Option(help="Trajectories (JSON lines with 'messages') instead of the excerpt that ships."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer runs, and no goals stated.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a goal is missed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure on this machine, beside the goals."""
    from paceline.cli import bench as command

    raise typer.Exit(command.run(name, model=model, data=data, quick=quick, check=check, as_json=as_json))


@app.command()
def info(model: ModelOption = DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Show the machine, the versions, the kernels in use and what is cached."""
    from paceline.cli import info as command

    command.run(model=model, as_json=as_json)


def _slo(text: str | None, on_infeasible: str | None) -> SLO:
    import dataclasses

    from paceline_policies.slo import SLO

    slo = SLO() if text is None else SLO.parse(text)
    return slo if on_infeasible is None else dataclasses.replace(slo, on_infeasible=on_infeasible)  # type: ignore[arg-type]


def main() -> None:
    """Entry point: an error of ours or of the options is one plain line, not a traceback."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="paceline", standalone_mode=False))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe has left; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        print(f"paceline: {_plain(error)}", file=sys.stderr)
        sys.exit(2)


def _plain(error: Exception) -> str:
    """What a person is told; errors that are neither ours nor the options' are raised on.

    The parser's errors alone have ``format_message``; which module they live in depends on its version.
    """
    from paceline_engine.errors import PacelineError

    if (told := getattr(error, "format_message", None)) is not None:
        return " ".join(str(told()).split())
    if isinstance(error, PacelineError):
        return str(error)
    raise error


if __name__ == "__main__":
    main()
