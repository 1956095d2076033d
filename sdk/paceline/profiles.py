"""Saved profiles: one file for each machine, model and what else decides the speed, in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from paceline_engine.backends.base import ModelInfo
from paceline_engine.errors import InvalidValueError
from paceline_policies.profile import Profile

CACHE_VARIABLE = "PACELINE_CACHE"
STALE_LOCK_S = 600.0
"""A lock older than this was left by a process that died."""


def cache_folder() -> Path:
    """Where profiles lie: ``PACELINE_CACHE``, else the platform's cache folder."""
    if (given := os.environ.get(CACHE_VARIABLE)) is not None and given:
        return Path(given).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("paceline")


def profile_path(info: ModelInfo, *, version: str) -> Path:
    """The file of one machine, one model and all that its fingerprint stands for."""
    device = info.device_name or info.device
    variants = ",".join(info.variants)
    key = hashlib.sha256(
        "\0".join((info.fingerprint, device, variants, version, str(os.cpu_count()))).encode()
    )
    name = "".join(char if char.isalnum() or char in "-_." else "_" for char in info.name)[:60]
    return cache_folder() / "profiles" / f"{name}-{key.hexdigest()[:16]}.json"


def load(path: Path, info: ModelInfo, *, version: str) -> Profile | None:
    """The saved profile; None where there is none, or it is damaged or of another model."""
    try:
        profile = Profile.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, InvalidValueError, RecursionError):
        return None
    if not profile.matches(info, version=version):
        return None
    missing = [variant for variant in info.variants if variant not in profile.variants and variant != "fp32"]
    return None if missing else profile


def why_stale(path: Path, info: ModelInfo, *, version: str) -> str | None:
    """Why none of the model's saved profiles may be used, where there are some; None where there are none.

    Args:
        path: where the one that could be used would lie.
    """
    found: list[tuple[str, ...]] = []
    files = path.parent.glob(f"{path.stem.rpartition('-')[0]}-*.json")
    for file in sorted(files, key=_changed_at_s, reverse=True):
        if file == path:
            continue
        try:
            profile = Profile.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, InvalidValueError, RecursionError):
            continue
        if set(info.variants) <= set(profile.variants) and profile.speed_facts:
            found.append(profile.changes(info, version=version))
    # Of several, as of other models by this name, the one that is the most like this.
    closest = min(filter(None, found), key=len, default=None)
    return None if closest is None else "; ".join(closest)


def _changed_at_s(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def save(path: Path, profile: Profile) -> bool:
    """Write it in one move, so that no reader ever sees half of it. False where that failed."""
    text = json.dumps(profile.to_dict())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
    except OSError:
        return False
    return True


@contextmanager
def claim(path: Path) -> Generator[bool]:
    """Hold the file's lock while calibrating: True for the one holder, False while another has it.

    Two calibrations at once would each measure a machine that the other keeps busy. Where no lock can be
    made (a read-only folder), everyone holds it.
    """
    lock = path.with_suffix(".lock")
    held = False
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            if time.time() - lock.stat().st_mtime > STALE_LOCK_S:
                lock.unlink()
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        held = True
    except FileExistsError:
        yield False
        return
    except OSError:
        pass
    try:
        yield True
    finally:
        if held:
            with contextlib.suppress(OSError):
                lock.unlink()
