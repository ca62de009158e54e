"""The optional libraries that checkpoints need."""

from __future__ import annotations

from importlib.util import find_spec

from llamaherd.errors import ConfigError

__all__ = ["require_extra"]


def require_extra(*modules: str) -> None:
    """Raise ConfigError, saying what to install, if one of ``modules`` is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(f"checkpoints need {' and '.join(missing)}: pip install 'llamaherd[transformers]'")
