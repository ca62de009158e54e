"""Random numbers that depend on (seed, candidate, token number) alone.

A candidate can then be continued anywhere, beside anything, and draws what it would have drawn.
"""

from __future__ import annotations

import secrets

__all__ = ["new_seed", "uniform"]

_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, candidate: int, step: int) -> float:
    """A uniform number in [0, 1) with 53 random bits."""
    return (_mix(_mix(_mix(seed) ^ candidate) ^ step) >> 11) * 2.0**-53


def new_seed() -> int:
    """A seed for a request that gives none."""
    return secrets.randbits(32)
