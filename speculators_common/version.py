"""The version of the installed distribution."""

from __future__ import annotations

DISTRIBUTION = "dspark-jax"


def version() -> str:
    """What `pyproject.toml` said when the distribution was installed; `unknown` for sources that are not installed."""
    from importlib import metadata  # takes longer to import than all that `dspark --help` needs

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
