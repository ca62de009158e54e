"""A GGUF file's tokenizer as transformers' ``tokenizer.json``, and back.

Byte-level BPE (``tokenizer.ggml.model`` = "gpt2") and SentencePiece BPE ("llama"); with the regular
expressions by which llama.cpp splits text before merging (``llama-vocab.cpp``), for the common names of
``tokenizer.ggml.pre``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamaherd.errors import UnsupportedFileError
from llamaherd.files.metadata import Metadata, TypedValue, Value, ValueType
from llamaherd.files.tiny_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

__all__ = ["export_tokenizer", "tokenizer_metadata"]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# name in GGUF: expressions that isolate pieces, one after another
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "mpt": (_GPT2,),
    "phi-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "command-r": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "stablelm2": (_QWEN2,),
}

# llama.cpp looks whole pieces up before it merges, for these
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3")

_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def export_tokenizer(metadata: Metadata, folder: str | Path, source: str | Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``.

    Needs transformers (the extra ``llamaherd[transformers]``). Raises UnsupportedFileError where the
    tokenizer's kind, or its way of splitting text, has no counterpart here.
    """
    import transformers

    tokens, types = _vocabulary(metadata, source)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, tokens, source)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types)
    else:
        raise UnsupportedFileError(
            source, f"a tokenizer of kind {model!r} cannot be exported, only gpt2 and llama"
        )
    _add_special(tokenizer, tokens, types)
    special: dict[str, Any] = {}
    for key, theirs in _SPECIAL.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            special[theirs] = tokens[token]
    _add_bos(tokenizer, metadata, special.get("bos_token"))
    fast_class: Any = transformers.PreTrainedTokenizerFast
    fast = fast_class(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        fast.chat_template = template
    fast.save_pretrained(str(folder))


def _vocabulary(metadata: Metadata, source: str | Path) -> tuple[list[str], list[int]]:
    texts = metadata.get("tokenizer.ggml.tokens")
    if texts is None:
        raise UnsupportedFileError(source, "has no vocabulary to export")
    tokens = [t if isinstance(t, str) else t.decode("utf-8", "replace") for t in texts]  # type: ignore[union-attr]
    types = metadata.get("tokenizer.ggml.token_type")
    return tokens, [NORMAL] * len(tokens) if types is None else [int(t) for t in types]  # type: ignore[union-attr]


def _byte_level(metadata: Metadata, tokens: list[str], source: str | Path) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _SPLITS:
        raise UnsupportedFileError(
            source,
            f"text is split as {pre!r} before merging, which is not among {', '.join(sorted(_SPLITS))}",
        )
    merges: Any = [tuple(str(merge).split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]  # type: ignore[union-attr]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre in _WHOLE_FIRST,
        )
    )
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in _SPLITS[str(pre)]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = [float(score) for score in metadata["tokenizer.ggml.scores"]]  # type: ignore[union-attr]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges_of_scores(tokens, types, scores),
            unk_token=tokens[int(unknown)],  # type: ignore[arg-type]
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefixed else [spaces])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges, best first, that make each piece out of two others: SentencePiece keeps only scores."""
    ids = {token: index for index, token in enumerate(tokens) if types[index] in (NORMAL, USER_DEFINED)}
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((-scores[index], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_special(tokenizer: Any, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _add_bos(tokenizer: Any, metadata: Metadata, bos: str | None) -> None:
    from tokenizers import processors

    usual = (
        metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_FIRST
    )
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", usual):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )


# ---------------------------------------------------------------------------------------- import


def tokenizer_metadata(folder: str | Path, n_vocab: int) -> dict[str, Value | TypedValue]:
    """The ``tokenizer.*`` keys of the checkpoint in ``folder``, whose embedding has ``n_vocab`` rows.

    Reads ``tokenizer.json`` and ``tokenizer_config.json`` only. Raises UnsupportedFileError for kinds of
    tokenizer that it cannot tell apart safely.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedFileError(folder, "has no tokenizer.json; give a GGUF whose tokenizer fits instead")
    described = json.loads(file.read_text("utf-8"))
    model = described.get("model", {})
    if model.get("type") != "BPE":
        raise UnsupportedFileError(
            file, f"a tokenizer of type {model.get('type')!r} is not supported, only BPE"
        )
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    tokens, types = _tokens_of(described, model, n_vocab)
    keys: dict[str, Value | TypedValue]
    if model.get("byte_fallback"):
        keys = {"model": "llama", "pre": "default", "scores": _scores(tokens, merges)}
        types = [
            BYTE if kind == NORMAL and _is_byte(token) else kind
            for token, kind in zip(tokens, types, strict=True)
        ]
        keys["add_space_prefix"] = '"Prepend"' in json.dumps(described.get("normalizer"))
    else:
        keys = {"model": "gpt2", "pre": _pre_of(described.get("pre_tokenizer"), file)}
        keys["merges"] = TypedValue(ValueType.ARRAY, merges, ValueType.STRING)
    keys["tokens"] = TypedValue(ValueType.ARRAY, tokens, ValueType.STRING)
    keys["token_type"] = np.array(types, np.int32)
    keys |= _special_ids(Path(folder), described, tokens)
    result: dict[str, Value | TypedValue] = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    template = _chat_template(Path(folder))
    if template is not None:
        result["tokenizer.chat_template"] = template
    return result


def _tokens_of(
    described: Mapping[str, Any], model: Mapping[str, Any], n_vocab: int
) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{index}]" for index in range(n_vocab)]
    types = [UNUSED] * n_vocab
    for token, index in model.get("vocab", {}).items():
        if index < n_vocab:
            tokens[index], types[index] = token, NORMAL
    for added in described.get("added_tokens", []):
        if added["id"] < n_vocab:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    unknown = model.get("unk_token")
    if unknown in tokens and model.get("byte_fallback"):
        types[tokens.index(unknown)] = UNKNOWN
    return tokens, types


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _scores(tokens: list[str], merges: list[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Scores that make llama.cpp merge in the order of ``merges``; pieces that no merge makes come last."""
    rank: dict[str, int] = {}
    for index, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), index)
    return np.array([-float(rank.get(token, len(merges))) for token in tokens], np.float32)


def _pre_of(described: Any, file: Path) -> str:
    """The GGUF name of a way of splitting text."""
    steps = (described or {}).get("pretokenizers", [described] if described else [])
    regexes: list[str] = []
    for step in steps:
        if step["type"] == "Split":
            pattern = step["pattern"]
            regexes.append(pattern.get("Regex", pattern.get("String")))
        elif step["type"] == "Digits" and step.get("individual_digits"):
            regexes.append(r"\p{N}")
        elif step["type"] == "ByteLevel" and step.get("use_regex", True):
            regexes.append(_GPT2)
    for name, known in _SPLITS.items():
        if tuple(regexes) == known:
            return name
    raise UnsupportedFileError(
        file, f"splits text by {regexes}, whose name in GGUF is not known; give a GGUF whose tokenizer fits"
    )


def _special_ids(
    folder: Path, described: Mapping[str, Any], tokens: list[str]
) -> dict[str, Value | TypedValue]:
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    ids: dict[str, Value | TypedValue] = {}
    for key, theirs in _SPECIAL.items():
        token = settings.get(theirs)
        text = token.get("content") if isinstance(token, dict) else token
        if text in tokens:
            ids[f"{key}_token_id"] = tokens.index(text)
    template = (described.get("post_processor") or {}).get("single", [])
    first = template[0].get("SpecialToken", {}).get("id") if template else None
    bos = ids.get("bos_token_id")
    ids["add_bos_token"] = isinstance(bos, int) and first == tokens[bos]
    return ids


def _chat_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    settings = folder / "tokenizer_config.json"
    template = json.loads(settings.read_text("utf-8")).get("chat_template") if settings.is_file() else None
    return template if isinstance(template, str) else None
