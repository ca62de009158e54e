"""What a server is to do: frozen, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..config import _number
from ..errors import ConfigError, InvalidParameterError
from ..worker.wire import WorkerConfig

__all__ = ["LEAN_COPILOT_PORT", "LLMSTEP_PORT", "ServerSettings"]

LLMSTEP_PORT = 6000
LEAN_COPILOT_PORT = 23337


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        models: name -> what its worker runs; the first is the default.
        host, port: where it listens; port 0 takes a free one.
        lean: listen also where the stock clients of llmstep and LeanCopilot expect it.
        lean_preset: how a tactic state becomes a prompt; empty chooses by the model.
        api_keys: keys of which a request must bear one; none asks for none.
        cors_origins: origins whose pages may call; ``*`` for all.
        max_body: most bytes of a request's body.
        max_connections: most connections at once.
        models_memory: bytes that the loaded models may take together; the least recently used ones are
            unloaded first. 0 sets no limit.
        body_timeout: seconds that a request's body may take to arrive.
        shutdown_grace: seconds that running requests get to finish when the server stops.
        max_buffered_events: events that a slow reader may leave unread before its request is cancelled.
        heartbeat_timeout, step_timeout: see Supervisor.
        log_prompts: write prompts into the log.
    """

    models: Mapping[str, WorkerConfig] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8080
    lean: bool = False
    lean_preset: str = ""
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body: int = 8 << 20
    max_connections: int = 1000
    models_memory: int = 0
    body_timeout: float = 60.0
    shutdown_grace: float = 30.0
    max_buffered_events: int = 4096
    heartbeat_timeout: float = 10.0
    step_timeout: float = 600.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("a server needs at least one model")
        _number("port", self.port, 0, 65535, integer=True)
        _number("max_body", self.max_body, 1024, integer=True)
        _number("max_connections", self.max_connections, 1, integer=True)
        _number("models_memory", self.models_memory, 0, integer=True)
        _number("max_buffered_events", self.max_buffered_events, 16, integer=True)
        for name in ("body_timeout", "shutdown_grace", "heartbeat_timeout", "step_timeout"):
            _number(name, getattr(self, name), 0)
        if any(not key for key in self.api_keys):
            raise InvalidParameterError("api_key", "", "a key is not empty")

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where it listens."""
        addresses = [(self.host, self.port)]
        if self.lean:
            addresses += [(self.host, LLMSTEP_PORT), (self.host, LEAN_COPILOT_PORT)]
        return addresses

    @property
    def exposed(self) -> bool:
        """Whether others than this machine can reach it without a key."""
        return self.host not in ("127.0.0.1", "localhost", "::1") and not self.api_keys
