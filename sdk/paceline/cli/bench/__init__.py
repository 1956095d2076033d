"""Benchmarks, one file each. ``--json`` prints one object; ``--check`` exits 1 when a goal is missed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.cli.bench.base import BenchOptions, BenchReport
from paceline_engine.errors import UnknownOptionError

NAMES = ("predict", "overhead", "modes")


def run(name: str, *, model: str, data: Path | None, quick: bool, check: bool, as_json: bool) -> int:
    """Run one benchmark and print it; the exit status is returned.

    Raises:
        UnknownOptionError: there is no benchmark of that name.
    """
    if name not in NAMES:
        raise UnknownOptionError(
            "name", observed=name, limit=f"one of {', '.join(NAMES)}", remedy="see 'paceline bench --help'"
        )
    measure: Callable[[BenchOptions], BenchReport] = import_module(f"paceline.cli.bench.{name}").measure
    report = measure(BenchOptions(model=model, data=data, quick=quick))
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_table(report)
    missed = [goal for goal in report.goals if not goal.met]
    for goal in missed:
        print(f"goal missed: {goal.name} is {goal.value:.4g}, goal {goal.goal:.4g}", file=sys.stderr)
    return 1 if check and missed else 0


def _explained(row: Mapping[str, Any]) -> str:
    """The unit, and what else belongs to the figure."""
    parts = [str(row.get("unit", ""))]
    if (found := row.get("gb_per_s")) is not None:
        parts.append(f"{found:.1f} of {row['machine_gb_per_s']:.1f} GB/s")
    if (found := row.get("acceptance")) is not None:
        parts.append(f"{found:.0%} of {row['drafted']} drafts accepted")
    if (found := row.get("kl_nats")) is not None:
        parts.append(f"KL {found:.4f}")
    if (found := row.get("top1_agreement")) is not None:
        parts.append(f"top-1 {found:.1%}")
    return ", ".join(parts)


def _print_table(report: BenchReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("figure", "minimum", "median", "maximum", "unit", title=f"paceline bench {report.name}")
    for name, row in report.results.items():
        if "median" in row:
            cells = (f"{row[key]:.4g}" for key in ("minimum", "median", "maximum"))
            table.add_row(name, *cells, _explained(row))
        elif "value" in row:
            table.add_row(name, "", f"{row['value']:.4g}", "", _explained(row))
    console.print(table)
    for goal in report.goals:
        sign = "<=" if goal.better == "lower" else ">="
        mark = "[green]met[/green]" if goal.met else "[red]missed[/red]"
        console.print(f"{goal.name}: {goal.value:.4g} {sign} {goal.goal:.4g} {mark}")
