"""The engine in a process of its own, because native code is mortal.

``Supervisor`` starts the process, keeps it alive and carries requests over its deaths; ``WorkerConfig`` says
what it runs.
"""

from .supervisor import Supervisor
from .wire import ModelInfo, WorkerConfig

__all__ = ["ModelInfo", "Supervisor", "WorkerConfig"]
