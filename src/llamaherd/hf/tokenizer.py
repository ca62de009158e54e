"""A transformers tokenizer over the vocabulary that a GGUF file carries, tokenised by llama.cpp itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from ..engine.model import Model
from ..engine.vocabulary import Vocabulary
from ..errors import DuplicateTokenError, ModelNotFoundError, RequestError, UnsupportedFileError
from ..files import open as open_file
from ..files.vocabulary import find_duplicate_token
from ..files.writer import write_gguf
from .resolve import HUB_OPTIONS, TOKENIZER_FILE, resolve_gguf

__all__ = ["LlamaCppTokenizer"]

_MOST_SPECIAL = 256  # names among special_tokens; llama.cpp knows the others all the same


class LlamaCppTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Tokens exactly as llama.cpp makes them, behind transformers' tokenizer interface.

    Everything comes from the GGUF file: vocabulary, special tokens, whether BOS is added, chat template.
    Padding is on the left; a model without a padding token pads with its EOS. As in transformers, texts of
    control tokens become those tokens unless ``split_special_tokens=True``.

    Make one with from_pretrained().
    """

    vocab_files_names = {"vocab_file": TOKENIZER_FILE}  # noqa: RUF012 - transformers reads it as it is
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"

    def __init__(self, vocab_file: str | PathLike[str], **kwargs: Any) -> None:
        self.vocab_file = str(vocab_file)
        self._load()
        vocabulary = self._vocabulary
        names = {name: self._text(getattr(vocabulary, name)) for name in ("bos", "eos", "pad")}
        for name, text in names.items():
            kwargs.setdefault(f"{name}_token", text)
        kwargs.setdefault("unk_token", self._text(self._unknown))
        if kwargs["pad_token"] is None:
            kwargs["pad_token"] = kwargs["eos_token"]
        control = list(vocabulary.control_texts())
        kwargs.setdefault("extra_special_tokens", control[:_MOST_SPECIAL])
        kwargs.setdefault("chat_template", self._template)
        kwargs.setdefault("padding_side", "left")
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(**kwargs)

    def _load(self) -> None:
        """Read the vocabulary; what pickling leaves out."""
        with open_file(self.vocab_file) as file:
            duplicate = find_duplicate_token(file.metadata)
            if duplicate is not None:
                first, second, token = duplicate
                raise DuplicateTokenError(self.vocab_file, str(token), first, second)
            metadata: Mapping[str, Any] = file.metadata
            if "tokenizer.ggml.tokens" not in metadata:
                raise UnsupportedFileError(
                    self.vocab_file, "it holds no vocabulary; take the model's own file"
                )
            self._texts = [_as_text(token) for token in metadata["tokenizer.ggml.tokens"]]
            unknown = metadata.get("tokenizer.ggml.unknown_token_id")
            self._unknown = None if unknown is None else int(unknown)
            sentencepiece = metadata.get("tokenizer.ggml.model") in ("llama", "t5")
            self._space_prefix = sentencepiece and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        self._ids = {text: i for i, text in enumerate(self._texts)}
        model = Model.load(self.vocab_file, vocab_only=True)
        self._model = model
        self._vocabulary: Vocabulary = model.vocabulary
        self._template = model.chat_template()

    def _text(self, token: int | None) -> str | None:
        return None if token is None else self._texts[token]

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str], *args: Any, **kwargs: Any
    ) -> LlamaCppTokenizer:
        """The tokenizer of a GGUF file, of a folder with one (also a saved one), or of a hub id.

        Args:
            pretrained_model_name_or_path: as for LlamaCppForCausalLM.from_pretrained.
            kwargs: ``filename`` (or ``gguf_file``), huggingface_hub's keywords, and a tokenizer's settings:
                ``padding_side``, ``pad_token``, ``chat_template``, ...

        Raises:
            ModelNotFoundError, FileError: the file is missing, broken or has no vocabulary.
        """
        filename = kwargs.pop("filename", None) or kwargs.pop("gguf_file", None)
        name = Path(pretrained_model_name_or_path)
        if (
            filename is None
            and (name / TOKENIZER_FILE).is_file()
            and (name / "tokenizer_config.json").is_file()
        ):
            loaded: LlamaCppTokenizer = super().from_pretrained(name, *args, **kwargs)
            return loaded
        hub = {key: kwargs.pop(key) for key in HUB_OPTIONS if key in kwargs}
        for key in [
            k for k in kwargs if k.startswith("_") or k in ("trust_remote_code", "use_fast", "config")
        ]:
            del kwargs[key]
        path = resolve_gguf(pretrained_model_name_or_path, filename, **hub)
        return cls(path, name_or_path=str(pretrained_model_name_or_path), **kwargs)

    # ---------------------------------------------------------------------------- vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._texts)

    def get_vocab(self) -> dict[str, int]:
        """The texts of all tokens, as the file spells them, and their ids."""
        return {**self._ids, **self._added_tokens_encoder}

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token, self._unknown)

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < len(self._texts):
            raise RequestError(f"token id {index} is outside [0, {len(self._texts)})")
        return self._texts[index]

    # ------------------------------------------------------------------------- text to tokens

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """The tokens of a text, as the file spells them, without BOS.

        Args:
            split_special_tokens: take texts of control tokens as plain text (default: the tokenizer's own
                setting, which is False as everywhere in transformers).
        """
        split = kwargs.pop("split_special_tokens", self.split_special_tokens)
        ids = self._vocabulary.encode(text, add_special=False, parse_special=not split)
        return [self._texts[i] for i in ids]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """BOS and EOS around the ids where the file says so; a text that begins with BOS gets no second."""
        ids = list(token_ids_0) + list(token_ids_1 or [])
        vocabulary = self._vocabulary
        if vocabulary.add_bos and vocabulary.bos is not None and ids[:1] != [vocabulary.bos]:
            ids.insert(0, vocabulary.bos)
        if vocabulary.add_eos and vocabulary.eos is not None:
            ids.append(vocabulary.eos)
        return ids

    def get_special_tokens_mask(
        self,
        token_ids_0: list[int],
        token_ids_1: list[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """1 at control tokens, 0 elsewhere."""
        ids = token_ids_0
        if not already_has_special_tokens:
            ids = self.build_inputs_with_special_tokens(token_ids_0, token_ids_1)
        return [int(self._vocabulary.is_control(i)) for i in ids]

    # ------------------------------------------------------------------------- tokens to text

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        """The text of tokens as the file spells them; bytes that are no UTF-8 show as U+FFFD."""
        parts = []
        for token in tokens:
            index = self._ids.get(token)
            parts.append(token.encode() if index is None else self._vocabulary.piece(index, special=True))
        return b"".join(parts).decode("utf-8", "replace")

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        text = self._vocabulary.decode(ids, special=not skip_special_tokens)
        if self._space_prefix and text.startswith(" "):
            text = text[1:]  # sentencepiece put it there
        return text

    # -------------------------------------------------------------------------------- on disk

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the file's metadata without its weights: a GGUF that holds the vocabulary."""
        folder = Path(save_directory)
        if not folder.is_dir():
            raise ModelNotFoundError(folder, "save_vocabulary needs a folder")
        name = TOKENIZER_FILE if not filename_prefix else f"{filename_prefix}-{TOKENIZER_FILE}"
        target = folder / name
        if target.exists() and target.resolve() == Path(self.vocab_file).resolve():
            return (str(target),)
        with open_file(self.vocab_file) as file:
            write_gguf(target, file.metadata, [])
        return (str(target),)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_model", "_vocabulary", "_texts", "_ids"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()

    def __deepcopy__(self, memo: dict[int, Any]) -> LlamaCppTokenizer:
        from copy import deepcopy

        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        shared = ("_model", "_vocabulary", "_texts", "_ids")
        for name, value in self.__dict__.items():
            copy.__dict__[name] = value if name in shared else deepcopy(value, memo)
        return copy


def _as_text(token: Any) -> str:
    return token.decode("utf-8", "replace") if isinstance(token, bytes) else str(token)
