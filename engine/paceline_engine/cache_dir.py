"""Where converted weights and fetched models are kept between starts."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "PACELINE_CACHE"


def cache_root() -> Path:
    """``$PACELINE_CACHE``, or the user's cache folder of this platform. It need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("paceline"))
