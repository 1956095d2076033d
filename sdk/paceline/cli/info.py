"""The machine, the versions, the kernels, the precisions with their measured quality, and what is cached."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline_engine.mode import Variant

if TYPE_CHECKING:
    from paceline_policies.profile import Profile

USES: Mapping[Variant, str] = MappingProxyType(
    {
        Variant.BF16: "the reference, where there is time for it",
        Variant.FP8: "GPUs with fp8 units; on a CPU int8 is faster and no larger",
        Variant.INT8: "CPUs, and GPUs without fp8 units",
        Variant.INT4: "where memory is slow or small, and to draft for the others",
    }
)
"""Where each precision makes sense."""


def run(*, model: str, as_json: bool) -> None:
    """Print what decides the speed here."""
    facts = facts_of(model)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for section, rows in facts.items():
        print(section)
        for key, value in rows.items():
            print(f"  {key:<20} {_line(value) if section == 'variants' else _plain(value)}")


def facts_of(model: str) -> dict[str, dict[str, Any]]:
    """Each section's facts by name, as ``--json`` prints them."""
    from paceline.cli.bench.base import machine, versions

    return {
        "machine": machine(),
        "versions": dict(versions()),
        "engine": _engine(model),
        "variants": _variants(model),
        "cache": _cache(),
    }


def _cache() -> dict[str, Any]:
    """The folder, and how much of each kind is kept there."""
    from paceline.profiles import cache_folder

    folder = cache_folder()
    found: dict[str, Any] = {"folder": str(folder)}
    for kind in ("weights", "tokenizers", "profiles"):
        sizes = [file.stat().st_size for file in (folder / kind).glob("*") if _is_kept(file)]
        files = "file" if len(sizes) == 1 else "files"
        total = sum(sizes)
        size = f"{total / 1e6:.1f} MB" if total >= 1e5 else f"{total / 1e3:.1f} kB"
        found[kind] = f"{len(sizes)} {files}, {size}"
    return found


def _is_kept(file: Path) -> bool:
    """Whether it holds something itself: the others note that a file's checksum was compared."""
    return file.is_file() and file.suffix != ".checked"


def _variants(model: str) -> dict[str, dict[str, Any]]:
    """Each precision: what a token reads, whether it is converted, what was measured here, and its use."""
    from paceline_engine.errors import PacelineError

    try:
        from paceline_engine.loading import open_checkpoint
        from paceline_engine.quant.layout import bytes_per_step
        from paceline_engine.quant.store import WeightStore

        checkpoint = open_checkpoint(model)
    except (ImportError, PacelineError):
        return {}
    store = WeightStore(checkpoint)
    profiles = _profiles(checkpoint.digest)
    found: dict[str, dict[str, Any]] = {}
    for variant, use in USES.items():
        n_bytes = bytes_per_step(checkpoint.spec, variant)
        row: dict[str, Any] = {"bytes_per_token": n_bytes, "converted": store.has(variant)}
        for profile in profiles:
            if (quality := profile.qualities.get(variant)) is not None and "quality" not in row:
                row["quality"] = dataclasses.asdict(quality)
            if (read := profile.read_bytes_per_s.get(variant)) and "decode_ms" not in row:
                row["decode_ms"] = round(n_bytes / read * 1e3, 1)
        found[str(variant)] = row | {"use": use}
    return found


def _profiles(digest: str) -> list[Profile]:
    """What was measured with these weights on this machine by this version, the latest first."""
    from paceline.calibrate import version
    from paceline.profiles import cache_folder
    from paceline_engine.backends.embedded import EmbeddedConfig
    from paceline_engine.backends.embedded.source import fingerprint_of, speed_facts
    from paceline_engine.errors import InvalidValueError
    from paceline_policies.profile import Profile

    fingerprint = fingerprint_of(speed_facts(digest, EmbeddedConfig(model="any")))
    found: list[Profile] = []
    files = (cache_folder() / "profiles").glob("*.json")
    for file in sorted(files, key=lambda each: each.stat().st_mtime, reverse=True):
        try:
            profile = Profile.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, InvalidValueError):
            continue
        if (profile.fingerprint, profile.version) == (fingerprint, version()):
            found.append(profile)
    return found


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['bytes_per_token'] / 1e6:.1f} MB a token"]
    if "decode_ms" in row:
        parts.append(f"{row['decode_ms']:.1f} ms a token here")
    quality = row.get("quality")
    if quality is None or quality["perplexity_ratio"] is None:
        parts.append("quality is measured on first use")
    else:
        parts.append(
            f"{quality['perplexity_ratio']:.4f} x the perplexity, KL {quality['kl_nats']:.4f}, "
            f"top-1 {quality['top1_agreement']:.1%}"
        )
    if not row["converted"]:
        parts.append("converted on first use")
    return f"{', '.join(parts)}: {row['use']}"


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
