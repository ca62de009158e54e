"""``llamaherd serve``: OpenAI's, llmstep's and LeanCopilot's protocols over HTTP.

Each setting is looked for on the command line, then in the environment (``LLAMAHERD_`` and its name), then in
the file of ``--config``, and last it has its default.
"""

from __future__ import annotations

import importlib
import ipaddress
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import LoraConfig, SchedulerConfig
from ..errors import ConfigError, FileError, InvalidParameterError, UnknownParameterError
from .options import model_path

if TYPE_CHECKING:
    from ..server.settings import ServerSettings
    from ..worker.wire import WorkerConfig

__all__ = ["register", "settings_of"]

_DEFAULTS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 8080,
    "lean": False,
    "lean_preset": "",
    "api_key": [],
    "cors_origin": [],
    "max_queue": 256,
    "max_sequences": 16,
    "n_ctx": None,
    "threads": None,
    "stages": 0,
    "cluster": "",
    "replicas": 0,
    "memory_limit": 0,
    "models_memory": 0,
    "cache_dir": "",
    "cache_size": "1G",
    "max_body": "8M",
    "shutdown_grace": 30.0,
    "heartbeat_timeout": 10.0,
    "step_timeout": 600.0,
    "log_level": "info",
    "log_format": "json",
    "log_prompts": False,
}
_OF_A_MODEL = (
    "n_ctx",
    "threads",
    "stages",
    "cluster",
    "replicas",
    "max_queue",
    "max_sequences",
    "memory_limit",
    "cache_dir",
    "cache_size",
)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_ENV = "LLAMAHERD_"


def _option(name: str, text: str, *more: str, metavar: str | None = None) -> Any:
    flag = "--" + name.replace("_", "-")
    return typer.Option(
        flag, *more, help=text, envvar=_ENV + name.upper(), metavar=metavar, show_envvar=False
    )


def register(app: typer.Typer) -> None:
    """Add ``serve`` to the command line."""
    app.command("serve")(serve)


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A GGUF file; the demo model if none is named.", envvar="LLAMAHERD_MODEL"),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", metavar="NAME=PATH", help="A further model; loaded on first use."),
    ] = None,
    config: Annotated[
        Path | None, _option("config", "A TOML file with any of these settings, and [models.NAME] tables.")
    ] = None,
    host: Annotated[str | None, _option("host", "Address to listen at [127.0.0.1].")] = None,
    port: Annotated[int | None, _option("port", "Port to listen at [8080].")] = None,
    lean: Annotated[
        bool | None,
        _option("lean", "Listen also at llmstep's port 6000 and LeanCopilot's 23337.", "--no-lean"),
    ] = None,
    lean_preset: Annotated[
        str | None, _option("lean_preset", "llmstep, reprover, few-shot, chat or tactics [by the model].")
    ] = None,
    api_key: Annotated[list[str] | None, _option("api_key", "A key that requests must bear.")] = None,
    cors_origin: Annotated[
        list[str] | None, _option("cors_origin", "An origin whose pages may call; * for all.")
    ] = None,
    max_queue: Annotated[int | None, _option("max_queue", "Requests that may wait [256].")] = None,
    max_sequences: Annotated[
        int | None, _option("max_sequences", "Sequences that decode at once [16].")
    ] = None,
    n_ctx: Annotated[
        int | None, _option("n_ctx", "Tokens of context, which all sequences share.", "-c")
    ] = None,
    threads: Annotated[int | None, _option("threads", "Threads of the engine.", "-t")] = None,
    stages: Annotated[
        int | None,
        _option("stages", "Cut the model by layers into so many processes of this machine."),
    ] = None,
    cluster: Annotated[
        str | None,
        _option("cluster", "Cut it over the machines of this cluster.", metavar="HOST[:PORT]"),
    ] = None,
    replicas: Annotated[
        int | None,
        _option("replicas", "So many engines on the machines of --cluster, behind this endpoint."),
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--set", "--param", metavar="NAME=VALUE", help="Any llama.cpp parameter by its name."),
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option("--lora", metavar="FILE[:SCALE]", help="Apply a LoRA adapter.")
    ] = None,
    memory_limit: Annotated[
        str | None, _option("memory_limit", "Replace a worker that takes more memory of its own (4G).")
    ] = None,
    models_memory: Annotated[
        str | None, _option("models_memory", "Unload the least recently used models above this (16G).")
    ] = None,
    cache_dir: Annotated[
        str | None, _option("cache_dir", "Keep idle KV state in this folder, over restarts.")
    ] = None,
    cache_size: Annotated[str | None, _option("cache_size", "Most bytes of that folder [1G].")] = None,
    max_body: Annotated[str | None, _option("max_body", "Most bytes of a request [8M].")] = None,
    shutdown_grace: Annotated[
        float | None, _option("shutdown_grace", "Seconds that running requests get at the end [30].")
    ] = None,
    heartbeat_timeout: Annotated[
        float | None, _option("heartbeat_timeout", "Seconds without a sign of life [10].")
    ] = None,
    step_timeout: Annotated[
        float | None, _option("step_timeout", "Seconds that one batch may take [600].")
    ] = None,
    log_level: Annotated[str | None, _option("log_level", "debug, info, warning or error [info].")] = None,
    log_format: Annotated[str | None, _option("log_format", "json or text [json].")] = None,
    log_prompts: Annotated[
        bool | None, _option("log_prompts", "Write prompts into the log.", "--no-log-prompts")
    ] = None,
) -> None:
    """Serve models over HTTP: OpenAI's endpoints, Lean's, and a page.

    Settings come from the command line, then LLAMAHERD_* variables, then --config, then defaults.
    """
    given = {name: value for name, value in locals().items() if name in _DEFAULTS and value is not None}
    try:
        from ..server import logs, run
    except ImportError as error:
        raise ConfigError(
            f"serving needs more packages ({error.name}): pip install 'llamaherd[server]'"
        ) from error
    file = _read(config) if config is not None else {}
    settings, chosen = settings_of(
        given, file, model=model, models=models or [], params=params or [], loras=lora or []
    )
    logs.configure(str(chosen["log_level"]), structured=chosen["log_format"] == "json")
    sockets = run.bind(settings)
    for listener in sockets:
        shown, at = listener.getsockname()[:2]
        print(f"listening at http://{_bracketed(shown)}:{at}", file=sys.stderr, flush=True)
    if settings.exposed:
        print(
            f"warning: {settings.host} can be reached from other machines, and no --api-key is set",
            file=sys.stderr,
            flush=True,
        )
    run.serve(settings, sockets)


def _bracketed(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


def settings_of(
    given: Mapping[str, Any],
    file: Mapping[str, Any],
    *,
    model: str | None = None,
    models: list[str] | None = None,
    params: list[str] | None = None,
    loras: list[str] | None = None,
) -> tuple[ServerSettings, dict[str, Any]]:
    """The server's settings, and all that was chosen by name.

    Args:
        given: from the command line and the environment.
        file: of ``--config``.
        model, models, params, loras: as on the command line.

    Raises:
        ConfigError: a name is unknown or a value out of range.
    """
    from ..server.settings import ServerSettings

    for key in file:
        if key not in _DEFAULTS and key not in ("model", "models", "set", "lora"):
            raise UnknownParameterError(
                key, [*_DEFAULTS, "model", "models", "set", "lora"], of="the config file"
            )
    settings = _DEFAULTS | {k: v for k, v in file.items() if k in _DEFAULTS} | dict(given)
    if settings["log_format"] not in ("json", "text"):
        raise InvalidParameterError("log_format", settings["log_format"], "json or text")
    if settings["log_level"] not in ("debug", "info", "warning", "error"):
        raise InvalidParameterError("log_level", settings["log_level"], "debug, info, warning or error")
    tables = _tables(file, model, models or [])
    common = dict(file.get("set", {})) | dict(_pair(p) for p in params or [])
    adapters = [*_list(file.get("lora", [])), *(loras or [])]
    workers = {name: _worker(name, table, settings, common, adapters) for name, table in tables.items()}
    return (
        ServerSettings(
            models=workers,
            host=settings["host"],
            port=settings["port"],
            lean=settings["lean"],
            lean_preset=settings["lean_preset"],
            api_keys=tuple(_list(settings["api_key"])),
            cors_origins=tuple(_list(settings["cors_origin"])),
            max_body=_bytes("max_body", settings["max_body"]),
            models_memory=_bytes("models_memory", settings["models_memory"]),
            shutdown_grace=settings["shutdown_grace"],
            heartbeat_timeout=settings["heartbeat_timeout"],
            step_timeout=settings["step_timeout"],
            log_prompts=settings["log_prompts"],
        ),
        settings,
    )


def _tables(file: Mapping[str, Any], model: str | None, models: list[str]) -> dict[str, dict[str, Any]]:
    """Name -> settings of each model; those of the command line come first."""
    tables: dict[str, dict[str, Any]] = {}
    in_file = file.get("models", {})
    if not isinstance(in_file, dict) or not all(isinstance(t, dict) for t in in_file.values()):
        raise InvalidParameterError("models", in_file, "tables [models.NAME] with a path")
    first = model if model is not None else file.get("model")
    if first is not None or not (models or in_file):
        path = model_path(first)
        tables["demo" if first in (None, "demo") else path.stem] = {"path": str(path)}
    for entry in models:
        name, equals, path_text = entry.partition("=")
        path = model_path(path_text if equals else name)
        tables[name if equals else path.stem] = {"path": str(path)}
    for name, table in in_file.items():
        if "path" not in table:
            raise InvalidParameterError(f"models.{name}", table, "a table with a path")
        tables.setdefault(name, table | {"path": str(model_path(table["path"]))})
    return tables


def _worker(
    name: str,
    table: Mapping[str, Any],
    settings: Mapping[str, Any],
    common: Mapping[str, Any],
    adapters: list[str],
) -> WorkerConfig:
    from ..worker.wire import WorkerConfig

    known = ("path", "set", "lora", *_OF_A_MODEL)
    for key in table:
        if key not in known:
            raise UnknownParameterError(key, known, of=f"[models.{name}]")
    own = {key: table.get(key, settings[key]) for key in _OF_A_MODEL}
    params = dict(common) | dict(table.get("set", {}))
    if own["n_ctx"] is not None:
        params.setdefault("n_ctx", own["n_ctx"])
    if own["threads"] is not None:
        params = {"n_threads": own["threads"], "n_threads_batch": own["threads"]} | params
    loras = tuple(_lora(text) for text in [*adapters, *_list(table.get("lora", []))])
    stages = own["stages"]
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 0:
        raise InvalidParameterError("stages", stages, "the number of processes, or 0 for none")
    replicas = own["replicas"]
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 0 <= replicas <= 1000:
        raise InvalidParameterError("replicas", replicas, "the number of engines, to 1000, or 0 for none")
    if replicas and not own["cluster"]:
        raise InvalidParameterError("replicas", replicas, "given with --cluster, whose machines hold them")
    if stages and own["cluster"]:
        raise InvalidParameterError("stages", stages, "without cluster, which has its machines")
    if (stages or (own["cluster"] and not replicas)) and loras:
        raise InvalidParameterError("lora", loras[0].path, "given without stages: adapters are not cut")
    return WorkerConfig(
        model=table["path"],
        params=params,
        loras=loras,
        stages=stages,
        cluster=own["cluster"],
        replicas=replicas,
        scheduler=SchedulerConfig(max_sequences=own["max_sequences"], max_queue=own["max_queue"]),
        memory_limit=_bytes("memory_limit", own["memory_limit"]),
        cache_dir=own["cache_dir"],
        cache_bytes=_bytes("cache_size", own["cache_size"]),
    )


def _read(path: Path) -> dict[str, Any]:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        settings: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        return settings
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(path, f"is no TOML: {error}") from error


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _pair(text: str) -> tuple[str, Any]:
    """``NAME=VALUE``; a value that reads as a number, true or false is one."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidParameterError("set", text, "NAME=VALUE")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def _lora(text: str) -> LoraConfig:
    path, colon, scale = text.rpartition(":")
    if not colon:
        return LoraConfig(text)
    try:
        return LoraConfig(path, float(scale))
    except ValueError:
        return LoraConfig(text)


def _bytes(name: str, value: Any) -> int:
    """Bytes from a number, or from text such as ``4G``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = str(value).strip().upper().removesuffix("IB").removesuffix("B")
    unit = text[-1:] if text[-1:] in "KMGT" else ""
    try:
        number = float(text[: len(text) - len(unit)]) * _UNITS[unit]
    except ValueError as error:
        raise InvalidParameterError(name, value, "bytes, such as 500M or 4G") from error
    if not 0 <= number < 2**63:
        raise InvalidParameterError(name, value, "bytes, such as 500M or 4G")
    return int(number)
