"""Small working vocabularies of our own making: byte-level BPE, SentencePiece BPE, WordPiece, unigram.

Each tokenises any text and gives it back: the BPE has all 256 byte symbols, the SentencePiece one
falls back to ``<0xNN>`` bytes. Merges are learnt from a few sentences, so that English words become
fewer tokens than letters, as in a real model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from string import ascii_lowercase, printable

from llamaherd.errors import InvalidParameterError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types of ``tokenizer.ggml.token_type``, as llama.cpp's ``llama_token_type`` numbers them."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The ChatML template, which suits the control tokens of these vocabularies."""

_TEXT = """the quick brown fox jumps over the lazy dog and then the other animals of the wood stand
around there in the morning light while a small herd of llamas walks along the river to the green
fields on the hill where they will rest and eat until the evening comes and the stars are out again
every theorem that we prove here is true because the proof shows it and nothing else can be said of
what has not been shown for all numbers there is one that is larger than this and so on without end
when the model has seen the prompt it writes the next token one after another until it is finished"""


@dataclass(frozen=True)
class TinyVocabulary:
    """A vocabulary as GGUF's ``tokenizer.ggml.*`` keys describe it.

    ``merges`` is set for byte-level BPE only, ``scores`` for the others only. ``special`` maps the
    part of a metadata key before ``_token_id`` (``bos``, ``eos``, ...) to a token id.
    """

    model: str
    tokens: list[str]
    types: list[int]
    special: dict[str, int]
    pre: str | None = None
    merges: list[str] | None = None
    scores: list[float] | None = None
    flags: dict[str, bool] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


def tiny_vocabulary(kind: str, n_vocab: int | None = None, *, bos: bool = True) -> TinyVocabulary:
    """Make a vocabulary of ``kind`` "bpe", "spm", "wpm" or "ugm" with ``n_vocab`` entries.

    Without ``bos`` there is neither a BOS id nor automatic adding of one. Raises
    InvalidParameterError for an unknown kind or for fewer entries than its base alphabet needs.
    """
    makers = {"bpe": _byte_level_bpe, "spm": _sentencepiece, "wpm": _wordpiece, "ugm": _unigram}
    if kind not in makers:
        raise InvalidParameterError("tokenizer", kind, f"one of {', '.join(sorted(makers))}")
    return makers[kind](n_vocab, bos)


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte value 0-255 (``bytes_to_unicode`` in its encoder.py)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in symbols)
    symbols.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [symbols[byte] for byte in range(256)]


@lru_cache(maxsize=1)
def _learnt_merges() -> tuple[tuple[str, str], ...]:
    """Byte-pair merges learnt from ``_TEXT``, most frequent first; words start with "Ġ" (a space)."""
    words = {word: ["Ġ", *word] for word in _TEXT.split()}
    counts = Counter(_TEXT.split())
    merges: list[tuple[str, str]] = []
    while len(merges) < 160:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in words.items():
            for pair in pairwise(parts):
                pairs[pair] += counts[word]
        (left, right), count = max(pairs.items(), key=lambda item: (item[1], item[0]))
        if count < 2:
            break
        merges.append((left, right))
        for word, parts in words.items():
            words[word] = _merge(parts, left, right)
    return tuple(merges)


def _merge(parts: list[str], left: str, right: str) -> list[str]:
    merged: list[str] = []
    for part in parts:
        if merged and merged[-1] == left and part == right:
            merged[-1] = left + right
        else:
            merged.append(part)
    return merged


def _endless_merges() -> Iterator[tuple[str, str]]:
    """The learnt merges, then every pair, triple and quadruple of letters: about 475,000 in all."""
    seen: set[str] = set()
    pairs = [(a, b) for a, b in product(ascii_lowercase, repeat=2)]
    triples = ((a, b + c) for a, b, c in product(ascii_lowercase, repeat=3))
    quadruples = ((a + b, c + d) for a, b, c, d in product(ascii_lowercase, repeat=4))
    for source in (_learnt_merges(), pairs, triples, quadruples):
        for left, right in source:
            if left + right not in seen:
                seen.add(left + right)
                yield left, right


def _merges_for(room: int, n_vocab: int) -> list[tuple[str, str]]:
    if room < 0:
        raise InvalidParameterError("n_vocab", n_vocab, f"at least {n_vocab - room} for this tokenizer")
    merges = [pair for pair, _ in zip(_endless_merges(), range(room), strict=False)]
    if len(merges) < room:
        raise InvalidParameterError("n_vocab", n_vocab, f"at most {n_vocab - room + len(merges)}")
    return merges


def _byte_level_bpe(n_vocab: int | None, bos: bool) -> TinyVocabulary:
    control = ["<|begin_of_text|>"] if bos else []
    control += ["<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    base = byte_symbols()
    n_vocab = n_vocab or 320
    merges = _merges_for(n_vocab - len(base) - len(control), n_vocab)
    tokens = [*base, *(left + right for left, right in merges), *control]
    special = {"eos": tokens.index("<|end_of_text|>"), "padding": tokens.index("<|pad|>")}
    special["eot"] = tokens.index("<|im_end|>")
    if bos:
        special["bos"] = tokens.index("<|begin_of_text|>")
    return TinyVocabulary(
        model="gpt2",
        pre="gpt-2",
        tokens=tokens,
        types=[NORMAL] * (n_vocab - len(control)) + [CONTROL] * len(control),
        special=special,
        merges=[f"{left} {right}" for left, right in merges],
        flags={"add_bos_token": bos},
    )


def _sentencepiece(n_vocab: int | None, bos: bool) -> TinyVocabulary:
    head = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # the first: llama.cpp wants it of a phi-3
    letters = ["▁", *(c for c in printable if not c.isspace())]
    n_vocab = n_vocab or 448
    merges = _merges_for(n_vocab - len(head) - 256 - len(letters) - len(control), n_vocab)
    pieces = [(left + right).replace("Ġ", "▁") for left, right in merges] + letters
    plain = len(head) + 256
    special = {"unknown": 0, "eos": 2, "eot": n_vocab - 1}
    if bos:
        special["bos"] = 1
    return TinyVocabulary(
        model="llama",
        pre="default",
        tokens=[*head, *byte_tokens, *pieces, *control],
        types=[UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [CONTROL] * 3,
        special=special,
        scores=[0.0] * plain + [-float(rank) for rank in range(len(pieces))] + [0.0] * len(control),
        flags={"add_bos_token": bos, "add_eos_token": False, "add_space_prefix": True},
    )


def _words() -> list[str]:
    return [word for word, _ in Counter(_TEXT.split()).most_common() if len(word) > 1]


def _wordpiece(n_vocab: int | None, bos: bool) -> TinyVocabulary:
    del bos  # WordPiece models mark both ends with [CLS] and [SEP] whatever is asked
    head = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [c for c in printable if not c.isspace() and not c.isupper()]
    # llama.cpp marks the start of a word with ▁ where the original marks continuations with ##
    base = [*head, *(f"▁{c}" for c in letters), *(c for c in letters if c.isalnum())]
    n_vocab = n_vocab or 256
    if n_vocab < len(base):
        raise InvalidParameterError("n_vocab", n_vocab, f"at least {len(base)} for this tokenizer")
    words = [f"▁{word}" for word in _words()][: n_vocab - len(base)]
    unused = [f"[unused{i}]" for i in range(n_vocab - len(base) - len(words))]
    tokens = [*base, *words, *unused]
    n_normal = len(base) - len(head) + len(words)
    kinds = [CONTROL] * len(head) + [NORMAL] * n_normal + [UNUSED] * len(unused)
    ids = {"padding": 0, "unknown": 1, "cls": 2, "bos": 2, "seperator": 3, "eos": 3, "mask": 4}
    return TinyVocabulary("bert", tokens, kinds, ids, pre="default", scores=[-1000.0] * n_vocab)


def _unigram(n_vocab: int | None, bos: bool) -> TinyVocabulary:
    del bos  # T5 has no BOS
    n_vocab = n_vocab or 256
    letters = ["▁", *(c for c in printable if not c.isspace())]
    base = ["<pad>", "</s>", "<unk>", *letters]
    if n_vocab < len(base):
        raise InvalidParameterError("n_vocab", n_vocab, f"at least {len(base)} for this tokenizer")
    words = [f"▁{word}" for word in _words()][: n_vocab - len(base)]
    unused = [f"<extra_id_{i}>" for i in range(n_vocab - len(base) - len(words))]
    scores = [0.0] * 3 + [-9.0] * len(letters) + [-4.0] * len(words) + [0.0] * len(unused)
    kinds = [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * (len(letters) + len(words)) + [CONTROL] * len(unused)
    flags = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": True}
    special = {"padding": 0, "eos": 1, "unknown": 2}
    return TinyVocabulary("t5", [*base, *words, *unused], kinds, special, "default", None, scores, flags)
