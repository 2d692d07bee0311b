"""Where files live: the user's cache folder, and content shipped beside the package."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder for models and measurements (`DLITE_CACHE` overrides)."""
    override = os.environ.get("DLITE_CACHE")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dlite-agent"


def content_dir(name: str) -> Path:
    """Folder `tools` or `sessions`: inside an installed wheel, else at the root of the checkout."""
    package = Path(__file__).parent
    installed = package / "content" / name
    return installed if installed.is_dir() else package.parent / name
