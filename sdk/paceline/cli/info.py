"""The machine, the versions, the kernels in use and what is kept in the cache folder."""

from __future__ import annotations

import json
from typing import Any


def run(*, model: str, as_json: bool) -> None:
    """Print what decides the speed here."""
    facts = _facts(model)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for section, rows in facts.items():
        print(section)
        for key, value in rows.items():
            print(f"  {key:<20} {value}")


def _facts(model: str) -> dict[str, dict[str, Any]]:
    from paceline.cli.bench.base import machine, versions

    return {
        "machine": machine(),
        "versions": dict(versions()),
        "engine": _engine(model),
        "cache": _cache(),
    }


def _cache() -> dict[str, Any]:
    """The folder, and how much of each kind is kept there."""
    from paceline.profiles import cache_folder

    folder = cache_folder()
    found: dict[str, Any] = {"folder": str(folder)}
    for kind in ("weights", "tokenizers", "profiles"):
        sizes = [file.stat().st_size for file in (folder / kind).glob("*") if file.is_file()]
        files = "file" if len(sizes) == 1 else "files"
        found[kind] = f"{len(sizes)} {files}, {sum(sizes) / 1e6:.1f} MB"
    return found


def _engine(model: str) -> dict[str, Any]:
    from paceline_engine.errors import PacelineError

    try:
        from paceline_engine.kernels import describe
        from paceline_engine.loading import resolve
    except ImportError as error:
        return {"engine": f"not installed ({error}): pip install 'paceline[engine]'"}
    try:
        path = str(resolve(model))
    except PacelineError as error:
        path = str(error)
    return {"kernels": describe(), "model": model, "path": path}
