"""Vocabularies: GGUF's ``tokenizer.ggml.*`` keys, the plain lists of older files, and between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from llamaherd.files.metadata import TypedValue, Value, ValueType
from llamaherd.files.strings import StringArray

__all__ = ["find_duplicate_token", "from_legacy", "to_legacy"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_SPACE = "▁".encode()  # SentencePiece's visible space
_UNK, _BOS, _EOS = 0, 1, 2  # of every SentencePiece llama vocabulary
_FIRST_BYTE, _FIRST_PIECE = 3, 259

# the pre-tokenizer that today's tokenizer needs for each architecture's usual vocabulary
_PRE = {
    "gpt2": "gpt-2",
    "gptneox": "gpt-2",
    "gptj": "gpt-2",
    "mpt": "mpt",
    "falcon": "falcon",
    "bloom": "bloom",
}

_SPECIAL = re.compile(rb"<\|.*\|>|</?s>|<pad>|<unk>|>>[A-Z_]+<<", re.DOTALL)


def find_duplicate_token(metadata: Mapping[str, Value]) -> tuple[int, int, str | bytes] | None:
    """The first two vocabulary entries that llama.cpp would take for one text: (first, second, text).

    llama.cpp aborts the process on such a file, so this is asked before every load; it takes a few ms.
    Empty texts are no duplicates (llama.cpp names them by their index); a text ends at its first NUL.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        tokens = metadata.get("tokens")
    if isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes, StringArray)):
        tokens = StringArray.from_texts(text for text in tokens if isinstance(text, (str, bytes)))
    if not isinstance(tokens, StringArray):
        return None
    found = tokens.find_duplicate(c_strings=True)
    return None if found is None else (*found, tokens[found[1]])


# ---------------------------------------------------------------------------------- legacy -> GGUF


def from_legacy(
    tokens: StringArray, scores: npt.NDArray[np.float32] | None, architecture: str
) -> dict[str, TypedValue]:
    """The ``tokenizer.ggml.*`` keys for an older file's vocabulary.

    llama: a SentencePiece vocabulary; GGML files have no ``scores``, so entries are ranked by their index,
    which is how SentencePiece numbers them. Others: byte-level BPE, its merges found again from the order of
    the entries.
    """
    raws = list(tokens.raws())
    if architecture == "llama":
        return _spm(raws, scores)
    return _bpe(raws, architecture)


def _spm(raws: list[bytes], scores: npt.NDArray[np.float32] | None) -> dict[str, TypedValue]:
    first = [_spm_token(index, raw) for index, raw in enumerate(raws[:_FIRST_PIECE])]
    pieces = raws[_FIRST_PIECE:]
    texts = [*(text for text, _ in first), *_spaced(pieces)]
    types = [*(kind for _, kind in first), *(NORMAL if piece else CONTROL for piece in pieces)]
    if scores is None:
        scores = np.minimum(_FIRST_PIECE - np.arange(len(raws)), 0).astype(np.float32)
    keys: dict[str, TypedValue] = {
        "model": TypedValue(ValueType.STRING, "llama"),
        "pre": TypedValue(ValueType.STRING, "default"),
        "tokens": TypedValue(ValueType.ARRAY, StringArray.from_texts(_unique(texts)), ValueType.STRING),
        "scores": TypedValue(ValueType.ARRAY, np.asarray(scores, "<f4"), ValueType.FLOAT32),
        "token_type": TypedValue(ValueType.ARRAY, np.array(types, "<i4"), ValueType.INT32),
        "bos_token_id": TypedValue(ValueType.UINT32, _BOS),
        "eos_token_id": TypedValue(ValueType.UINT32, _EOS),
        "unknown_token_id": TypedValue(ValueType.UINT32, _UNK),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _spm_token(index: int, raw: bytes) -> tuple[bytes, int]:
    if index == _UNK:
        return b"<unk>", UNKNOWN
    if index == _BOS:
        return b"<s>", CONTROL
    if index == _EOS:
        return b"</s>", CONTROL
    if not raw:
        return b"", CONTROL
    if len(raw) == 1:
        return b"<0x%02X>" % raw[0], BYTE
    return raw.replace(b" ", _SPACE), NORMAL


def _spaced(pieces: list[bytes]) -> list[bytes]:
    """The pieces with SentencePiece's sign for a space; all at once, as every load of a file asks for it."""
    joined = b"\0".join(pieces)
    if joined.count(b"\0") == len(pieces) - 1:
        return joined.replace(b" ", _SPACE).split(b"\0")
    return [piece.replace(b" ", _SPACE) for piece in pieces]


def _bpe(raws: list[bytes], architecture: str) -> dict[str, TypedValue]:
    texts = [_to_symbols(raw) for raw in raws]
    merges = _find_merges(texts)
    products = {"".join(pair) for pair in merges}
    types = [
        CONTROL if _SPECIAL.fullmatch(raw) and text not in products else NORMAL
        for raw, text in zip(raws, texts, strict=True)
    ]
    unique = _unique(text.encode() for text in texts)
    keys: dict[str, TypedValue] = {
        "model": TypedValue(ValueType.STRING, "gpt2"),
        "pre": TypedValue(ValueType.STRING, _PRE.get(architecture, "default")),
        "tokens": TypedValue(ValueType.ARRAY, StringArray.from_texts(unique), ValueType.STRING),
        "token_type": TypedValue(ValueType.ARRAY, np.array(types, "<i4"), ValueType.INT32),
        "merges": TypedValue(
            ValueType.ARRAY, StringArray.from_texts(" ".join(pair) for pair in merges), ValueType.STRING
        ),
    }
    for text in (b"<|endoftext|>", b"</s>"):
        if text in raws:
            token = raws.index(text)
            keys["bos_token_id"] = keys["eos_token_id"] = TypedValue(ValueType.UINT32, token)
            break
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _unique(texts: Iterable[bytes]) -> list[bytes]:
    """The texts, later copies renamed by their index: llama.cpp aborts on equal ones."""
    texts = list(texts)
    if len(set(texts)) == len(texts):
        return texts
    seen: set[bytes] = set()
    out = []
    for index, text in enumerate(texts):
        if text and text in seen:
            text = b"[DUPLICATE_%d]" % index
        seen.add(text)
        out.append(text)
    return out


@lru_cache(maxsize=1)
def _byte_symbols() -> tuple[str, ...]:
    """GPT-2's printable character for each byte (``bytes_to_unicode`` in OpenAI's encoder.py)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, extra = [], 0
    for byte in range(256):
        if byte in plain:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + extra))
            extra += 1
    return tuple(symbols)


def _to_symbols(raw: bytes) -> str:
    symbols = _byte_symbols()
    return "".join(symbols[byte] for byte in raw)


def _find_merges(texts: list[str]) -> list[tuple[str, str]]:
    """The merges of a BPE vocabulary whose entries are numbered in the order they were learnt.

    Tokenising an entry with the merges learnt before it must leave exactly the two parts it was made of.
    """
    known = set(texts)
    ranks: dict[tuple[str, str], int] = {}
    for text in texts:
        if len(text) < 2:
            continue
        parts = list(text)
        if any(part not in known for part in parts):
            continue
        while len(parts) > 2:
            rank, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(parts)))
            if rank == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            ranks.setdefault((parts[0], parts[1]), len(ranks))
    return list(ranks)


# ---------------------------------------------------------------------------------- GGUF -> legacy


def to_legacy(metadata: Mapping[str, Value]) -> tuple[list[bytes], npt.NDArray[np.float32]]:
    """The plain texts and scores that an older file stores for a GGUF vocabulary.

    Raises KeyError without ``tokenizer.ggml.tokens``, ValueError for a tokenizer that is neither
    SentencePiece ("llama") nor byte-level BPE ("gpt2").
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, (StringArray, list))
    raws = list(tokens.raws()) if isinstance(tokens, StringArray) else [_encoded(t) for t in tokens]
    scores = metadata.get("tokenizer.ggml.scores")
    values = np.zeros(len(raws), np.float32)
    if isinstance(scores, (np.ndarray, list)) and len(scores) == len(raws):
        values = np.asarray(scores, np.float32)
    if model == "llama":
        kinds = metadata.get("tokenizer.ggml.token_type")
        types = list(kinds) if isinstance(kinds, (np.ndarray, list)) else [NORMAL] * len(raws)
        types += [NORMAL] * (len(raws) - len(types))
        return [_plain_spm(i, raw, types[i]) for i, raw in enumerate(raws)], values
    if model == "gpt2":
        back = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
        return [_plain_bpe(raw, back) for raw in raws], values
    raise ValueError(f"a {model!r} vocabulary")


def _encoded(text: str | bytes) -> bytes:
    return text.encode("utf-8") if isinstance(text, str) else text


def _plain_spm(index: int, raw: bytes, kind: int) -> bytes:
    if index == _UNK:
        return " ⁇ ".encode()
    if index in (_BOS, _EOS):
        return b""
    if kind == BYTE and re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", raw):
        return bytes([int(raw[3:5], 16)])
    return raw.replace(_SPACE, b" ")


def _plain_bpe(raw: bytes, back: dict[str, int]) -> bytes:
    text = raw.decode("utf-8", "surrogateescape")
    if any(char not in back for char in text):
        return raw
    return bytes(back[char] for char in text)
