"""Every exception that llamaherd raises on purpose, in one tree.

    LlamaherdError
    ├── ConfigError                     a setting is wrong before anything ran
    │   ├── UnknownParameterError           no parameter of that name (the nearest is named)
    │   └── InvalidParameterError           the name is right, the value is not
    ├── FileError                       a file is missing, broken or not what it should be
    │   ├── ModelNotFoundError
    │   ├── MalformedFileError              breaks its own format, at a known offset
    │   │   ├── NotAModelFileError              no known magic number
    │   │   └── TruncatedFileError              ends before it should
    │   ├── DuplicateTokenError             two vocabulary entries share one text
    │   ├── UnsupportedFileError            well-formed, but not for this purpose
    │   └── StateMismatchError              a saved state belongs to another model or context
    ├── NativeError                     llama.cpp refused, or is not what we rely on
    │   ├── LibraryError                    the installed llama-cpp-python breaks an assumption
    │   ├── ModelLoadError
    │   ├── ContextError                    a context could not be made
    │   ├── DecodeError                     llama_decode failed
    │   ├── DecodeAbortedError              a decode was stopped on request
    │   └── UnsupportedError                this model or context cannot do that
    ├── RequestError                    this request cannot be served as it stands
    │   ├── PromptTooLongError
    │   ├── EmptyPromptError
    │   ├── TokenError                      token id out of range
    │   ├── PositionError                   position out of range or not consecutive
    │   ├── SequenceError                   sequence id out of range or not in use
    │   ├── GrammarError
    │   ├── LogitsError                     the model produced NaN or no finite logit
    │   ├── ChatTemplateError
    │   ├── UnknownModelError               no model of that name is served
    │   └── DeadlineError                   out of time
    ├── CapacityError                   right now, there is no room
    │   ├── OutOfSequencesError
    │   ├── OutOfCellsError
    │   ├── QueueFullError
    │   ├── SlowReaderError                 events pile up unread
    │   └── ShuttingDownError               no new requests are taken
    ├── WorkerError                     the engine's process failed
    │   ├── WorkerStartError                it cannot be started
    │   ├── WorkerDiedError                 this request ended it more than once
    │   └── StageLostError                  a stage of a pipeline was lost
    └── ClosedError                     used after close()

Each carries what it talks about as attributes (the value, the limit), so that callers decide by type
and data, never by the message's text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from os import PathLike
from typing import Any

__all__ = [
    "CapacityError",
    "ChatTemplateError",
    "ClosedError",
    "ConfigError",
    "ContextError",
    "DeadlineError",
    "DecodeAbortedError",
    "DecodeError",
    "DuplicateTokenError",
    "EmptyPromptError",
    "FileError",
    "GrammarError",
    "InvalidParameterError",
    "LibraryError",
    "LlamaherdError",
    "LogitsError",
    "MalformedFileError",
    "ModelLoadError",
    "ModelNotFoundError",
    "NativeError",
    "NotAModelFileError",
    "OutOfCellsError",
    "OutOfSequencesError",
    "PositionError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "SequenceError",
    "ShuttingDownError",
    "SlowReaderError",
    "StageLostError",
    "StateMismatchError",
    "TokenError",
    "TruncatedFileError",
    "UnknownModelError",
    "UnknownParameterError",
    "UnsupportedError",
    "UnsupportedFileError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStartError",
]


def shown(value: Any) -> str:
    """A value as messages show it: its repr, cut to a readable length."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python prints, or another's broken __repr__
        return f"<{type(value).__name__}>"
    return text if len(text) <= 120 else text[:117] + "..."


def _rebuild(kind: type[LlamaherdError], args: tuple[Any, ...]) -> LlamaherdError:
    error = kind.__new__(kind)
    error.args = args
    return error


class LlamaherdError(Exception):
    """The base of every error that llamaherd raises on purpose. Errors can be pickled and copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        # not by calling __init__, as exceptions do by default: its arguments are not the message
        return _rebuild, (type(self), self.args), self.__dict__


# ---------------------------------------------------------------------------------------- config


class ConfigError(LlamaherdError, ValueError):
    """A setting is wrong; nothing has run yet."""


class UnknownParameterError(ConfigError, TypeError):
    """No parameter of that name. ``nearest`` is the closest known name, if one is close."""

    def __init__(self, name: str, known: Iterable[str], *, of: str) -> None:
        self.name = name
        self.known = tuple(sorted(known))
        close = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        self.nearest = close[0] if close else None
        hint = f"did you mean {self.nearest!r}?" if self.nearest else f"known: {', '.join(self.known)}"
        super().__init__(f"{of} has no parameter {shown(name)}; {hint}")


class InvalidParameterError(ConfigError):
    """A known parameter has a value outside what it may be."""

    def __init__(self, name: str, value: Any, limit: str) -> None:
        self.name = name
        self.value = value
        self.limit = limit
        super().__init__(f"{name} = {shown(value)} is not valid: {limit}")


# ----------------------------------------------------------------------------------------- files


class FileError(LlamaherdError):
    """A file cannot be used. ``path`` says which."""

    def __init__(self, path: str | PathLike[str], message: str) -> None:
        self.path = str(path)
        super().__init__(f"{self.path}: {message}")


class ModelNotFoundError(FileError, FileNotFoundError):
    """There is no such model file."""

    def __init__(self, path: str | PathLike[str], hint: str = "check the path") -> None:
        super().__init__(path, f"no such model file; {hint}")


class MalformedFileError(FileError):
    """A file breaks its own format. ``offset`` is the byte at which that shows, where one is known."""

    def __init__(self, path: str | PathLike[str], message: str, offset: int | None = None) -> None:
        self.offset = offset
        at = f" (at byte {offset})" if offset is not None else ""
        super().__init__(path, message + at)


class NotAModelFileError(MalformedFileError):
    """The first bytes are not the magic number of any container we know."""


class TruncatedFileError(MalformedFileError):
    """The file ends before its own contents say it should: ``needed`` bytes, ``size`` are there."""

    def __init__(
        self, path: str | PathLike[str], what: str, *, needed: int, size: int, offset: int | None = None
    ) -> None:
        self.needed = needed
        self.size = size
        super().__init__(
            path,
            f"truncated: {what} needs {needed} bytes, the file has {size}; fetch or copy it again",
            offset,
        )


class DuplicateTokenError(FileError):
    """Two vocabulary entries share one text; libllama would abort the process on such a file."""

    def __init__(self, path: str | PathLike[str], text: str, first: int, second: int) -> None:
        self.text = text
        self.first = first
        self.second = second
        super().__init__(
            path,
            f"vocabulary entries {first} and {second} are both {text!r}; token texts must be unique, "
            "so rename one of them in the file's tokenizer.ggml.tokens",
        )


class UnsupportedFileError(FileError):
    """The file is well-formed, but cannot serve this purpose; the message says what can."""


class StateMismatchError(FileError):
    """A saved sequence state belongs to another model, context shape or version."""


# ---------------------------------------------------------------------------------------- native


class NativeError(LlamaherdError):
    """llama.cpp refused. ``log`` holds what it logged about it."""

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(f"{message}\nllama.cpp: {log}" if log else message)


class LibraryError(NativeError, ImportError):
    """llama_cpp's libraries are missing, or are not what llamaherd relies on."""


class ModelLoadError(NativeError):
    """llama.cpp could not load the model at ``path``."""

    def __init__(self, path: str | PathLike[str], message: str, log: str = "") -> None:
        self.path = str(path)
        super().__init__(f"{self.path}: {message}", log)


class ContextError(NativeError):
    """llama.cpp could not make a context with these parameters."""


class DecodeError(NativeError):
    """llama_decode returned ``code`` (negative: fatal for this batch)."""

    def __init__(self, code: int, message: str, log: str = "") -> None:
        self.code = code
        super().__init__(f"{message} (llama_decode returned {code})", log)


class DecodeAbortedError(NativeError):
    """A decode was stopped by abort(); what it had not finished was rolled back."""

    def __init__(self) -> None:
        super().__init__("the decode was aborted on request; its tokens are not in the KV cache")


class UnsupportedError(NativeError):
    """This model or context cannot do that; the message says what can be done instead."""


# --------------------------------------------------------------------------------------- request


class RequestError(LlamaherdError, ValueError):
    """This request cannot be served as it stands; others are untouched."""


class PromptTooLongError(RequestError):
    """The prompt (``n_prompt`` tokens) does not fit the context (``n_ctx``)."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx
        super().__init__(
            f"the prompt has {n_prompt} tokens, but the context holds {n_ctx} and one must be left to "
            "generate; shorten the prompt or raise n_ctx"
        )


class EmptyPromptError(RequestError):
    """The prompt holds no token, and the model has no BOS token to start from."""

    def __init__(self) -> None:
        super().__init__(
            "the prompt is empty and this model has no BOS token to start from; give at least one token"
        )


class TokenError(RequestError):
    """A token id is outside [0, n_vocab)."""

    def __init__(self, token: int, n_vocab: int, index: int | None = None) -> None:
        self.token = token
        self.n_vocab = n_vocab
        self.index = index
        where = f" at index {index}" if index is not None else ""
        super().__init__(f"token id {shown(token)}{where} is outside [0, {n_vocab}), this model's vocabulary")


class PositionError(RequestError):
    """A position is negative, or does not continue its sequence."""

    def __init__(self, position: int, expected: str, sequence: int | None = None) -> None:
        self.position = position
        self.expected = expected
        self.sequence = sequence
        of = f" of sequence {sequence}" if sequence is not None else ""
        super().__init__(f"position {shown(position)}{of} is not valid: {expected}")


class SequenceError(RequestError):
    """A sequence id is out of range or not in use."""

    def __init__(self, sequence: int, expected: str) -> None:
        self.sequence = sequence
        self.expected = expected
        super().__init__(f"sequence id {shown(sequence)} is not valid: {expected}")


class GrammarError(RequestError):
    """A grammar does not parse, or cannot be followed."""

    def __init__(self, grammar: str, reason: str) -> None:
        self.grammar = grammar
        self.reason = reason
        head = grammar if len(grammar) <= 80 else grammar[:77] + "..."
        super().__init__(f"invalid grammar: {reason} (in {head!r})")


class LogitsError(RequestError):
    """The model produced NaN, +inf or no finite logit for this sequence: nothing can be sampled."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            f"the model's logits hold {what}; the weights may be damaged, or an activation overflowed "
            "(try another quantisation or KV type)"
        )


class ChatTemplateError(RequestError):
    """The model's chat template is missing, does not compile, or refused these messages."""


class UnknownModelError(RequestError):
    """No model of that ``name`` is served; ``served`` are."""

    def __init__(self, name: str, served: Iterable[str]) -> None:
        self.name = name
        self.served = tuple(served)
        super().__init__(f"there is no model {name[:100]!r} here; served: {', '.join(self.served)}")


class DeadlineError(RequestError):
    """The request's ``deadline`` (seconds) passed before its first token."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        super().__init__(f"the deadline of {deadline:g} s passed before the first token; allow more time")


# -------------------------------------------------------------------------------------- capacity


class CapacityError(LlamaherdError):
    """There is no room right now. ``limit`` is the size of what ran out."""

    def __init__(self, message: str, limit: int) -> None:
        self.limit = limit
        super().__init__(message)


class OutOfSequencesError(CapacityError):
    """Every sequence id is in use. ``used_by`` says what uses them, where that is known."""

    def __init__(self, wanted: int, free: int, limit: int, used_by: str = "") -> None:
        self.wanted = wanted
        self.free = free
        self.used_by = used_by
        super().__init__(
            f"{wanted} more sequences were asked for, {free} of {limit} are free; release some, or make "
            "the context with a larger n_seq_max" + (f" (in use: {used_by})" if used_by else ""),
            limit,
        )


class OutOfCellsError(CapacityError):
    """The KV cache holds no more tokens. ``used_by`` says what uses it, where that is known."""

    def __init__(self, wanted: int, used: int, limit: int, used_by: str = "") -> None:
        self.wanted = wanted
        self.used = used
        self.used_by = used_by
        super().__init__(
            f"{wanted} more tokens do not fit the KV cache: {used} of {limit} cells are used; release or "
            "trim sequences, or raise n_ctx" + (f" (in use: {used_by})" if used_by else ""),
            limit,
        )


class QueueFullError(CapacityError):
    """``limit`` requests already wait; try again after ``retry_after`` seconds."""

    def __init__(self, limit: int, retry_after: float = 1.0) -> None:
        self.retry_after = retry_after
        super().__init__(
            f"{limit} requests already wait (max_queue); try again in {retry_after:g} s or raise max_queue",
            limit,
        )


class SlowReaderError(CapacityError):
    """The request's events were not read: ``limit`` of them piled up, and it was cancelled."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} events were waiting to be read, so the request was cancelled; read faster", limit
        )


class ShuttingDownError(CapacityError):
    """The server takes no new requests because it stops; try again after ``retry_after`` seconds."""

    def __init__(self, retry_after: float = 5.0) -> None:
        self.retry_after = retry_after
        super().__init__(f"the server is shutting down; try again in {retry_after:g} s", 0)


# ----------------------------------------------------------------------------------------- worker


class WorkerError(LlamaherdError):
    """The process that computes failed. ``cause`` says how."""

    def __init__(self, message: str, cause: str = "") -> None:
        self.cause = cause
        super().__init__(message)


class WorkerStartError(WorkerError):
    """The worker process cannot be started, or not often enough to be of use."""


class WorkerDiedError(WorkerError):
    """The worker process died over this request, more than once; it is not tried again."""


class StageLostError(WorkerError):
    """A stage of a pipeline died, froze or lost its way. ``stage`` is its number, -1 if that is not known."""

    def __init__(self, stage: int, cause: str) -> None:
        self.stage = stage
        which = "a stage of the pipeline" if stage < 0 else f"stage {stage} of the pipeline"
        super().__init__(f"{which} was lost: {cause}", cause)


# ----------------------------------------------------------------------------------------- closed


class ClosedError(LlamaherdError, RuntimeError):
    """An object was used after close()."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"this {what} is closed; make another")
