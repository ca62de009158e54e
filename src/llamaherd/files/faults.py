"""What is wrong with a file, collected instead of raised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Fault", "Faults"]


@dataclass(frozen=True)
class Fault:
    """One fault: how bad, where (a tensor, a metadata key, or the file), what, and the byte if known.

    An error makes the file unusable: it breaks its format, or libllama refuses it or aborts the process.
    A warning is about what runs, but not as one would wish.
    """

    severity: Literal["error", "warning"]
    where: str
    message: str
    offset: int | None = None

    def __str__(self) -> str:
        at = f" (at byte {self.offset})" if self.offset is not None else ""
        return f"{self.severity}: {self.where}: {self.message}{at}"


class Faults:
    """Collects faults in ``found``."""

    def __init__(self) -> None:
        self.found: list[Fault] = []

    def error(self, where: str, message: str, offset: int | None = None) -> None:
        """Add a fault that makes the file unusable."""
        self.found.append(Fault("error", where, message, offset))

    def warning(self, where: str, message: str, offset: int | None = None) -> None:
        """Add a fault that one can live with."""
        self.found.append(Fault("warning", where, message, offset))
