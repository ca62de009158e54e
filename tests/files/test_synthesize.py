from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.files.stock_llama import StockLlamaDiedError

from llamaherd import files
from llamaherd.errors import InvalidParameterError
from llamaherd.files.architectures import ARCHITECTURES
from llamaherd.files.synthesize import make_tiny_model, synthesize
from llamaherd.files.tiny_vocabulary import tiny_vocabulary

ENCODERS = ["bert", "nomic-bert"]
DECODERS = [name for name in ARCHITECTURES if name not in (*ENCODERS, "t5")]


@pytest.mark.parametrize("architecture", DECODERS)
def test_stock_llama_runs_it_and_it_talks(architecture: str, tmp_path: Path, stock_llama: Any) -> None:
    path = synthesize(tmp_path / "m.gguf", architecture)
    answer = stock_llama.ask(path=path, text="The quick llama: é日本 🦙!", prompt="the quick brown", n=48)
    assert answer["loaded"], answer["log"]
    assert answer["n_layer"] == 2
    assert answer["text"] == "The quick llama: é日本 🦙!"
    assert answer["finite"]
    assert 1 < answer["std"] < 4
    assert len(set(answer["generated"])) >= 10


@pytest.mark.parametrize("architecture", ENCODERS)
def test_embedding_models_tell_texts_apart(architecture: str, tmp_path: Path, stock_llama: Any) -> None:
    path = synthesize(tmp_path / "m.gguf", architecture)
    one, other = (
        np.array(stock_llama.ask(path=path, prompt=text, embeddings=True)["embedding"])
        for text in ("the quick brown fox", "every theorem is true")
    )
    assert np.isfinite(one).all()
    assert np.abs(one - other).max() > 0.1


def test_an_encoder_decoder_loads(tmp_path: Path, stock_llama: Any) -> None:
    answer = stock_llama.ask(path=synthesize(tmp_path / "m.gguf", "t5"), text="the quick fox")
    assert (answer["has_encoder"], answer["has_decoder"]) == (True, True)
    assert answer["text"] == "the quick fox"


@pytest.mark.parametrize("type", ["f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4"])
def test_every_type_runs_close_to_f32(type: str, tmp_path: Path, stock_llama: Any) -> None:
    exact = stock_llama.ask(path=synthesize(tmp_path / "a.gguf"), prompt="the llama")
    path = synthesize(tmp_path / "b.gguf", type=type)
    coarse = stock_llama.ask(path=path, prompt="the llama")
    assert type in {t.type.name for t in files.open(path).tensors.values()}
    a, b = np.ravel(exact["logits"]), np.ravel(coarse["logits"])
    assert np.corrcoef(a, b)[0, 1] > {"q4": 0.75, "mx": 0.7, "q5": 0.9}.get(type[:2], 0.97)
    assert not np.array_equal(a, b)


def test_sizes_are_as_asked(tmp_path: Path, stock_llama: Any) -> None:
    path = synthesize(
        tmp_path / "m.gguf", layers=5, n_embd=96, n_heads=6, n_kv_heads=3, n_vocab=5000, n_ff=160, n_ctx=1024
    )
    answer = stock_llama.ask(path=path, prompt="the quick", n=4)
    assert (answer["n_layer"], answer["n_embd"], answer["n_vocab"]) == (5, 96, 5000)
    fields = gguf.GGUFReader(path).fields
    assert fields["llama.context_length"].contents() == 1024
    assert fields["llama.attention.head_count_kv"].contents() == 3


def test_the_vocabulary_merges_english_words(tmp_path: Path, stock_llama: Any) -> None:
    for tokenizer in ("bpe", "spm"):
        path = synthesize(tmp_path / "m.gguf", tokenizer=tokenizer, n_vocab=600)
        tokens = stock_llama.ask(path=path, text="the quick brown fox and the other")["tokens"]
        assert len(tokens) < 20  # 33 characters


def test_bos_can_be_left_out(tmp_path: Path, stock_llama: Any) -> None:
    with_bos = stock_llama.ask(path=synthesize(tmp_path / "a.gguf"))
    without = stock_llama.ask(path=synthesize(tmp_path / "b.gguf", bos=False))
    assert with_bos["add_bos"]
    assert with_bos["bos"] >= 0
    assert not without["add_bos"]
    assert "tokenizer.ggml.bos_token_id" not in gguf.GGUFReader(tmp_path / "b.gguf").fields


def test_seeds_give_the_same_file_or_another(tmp_path: Path) -> None:
    first = synthesize(tmp_path / "a.gguf", seed=1).read_bytes()
    assert synthesize(tmp_path / "b.gguf", seed=1).read_bytes() == first
    assert synthesize(tmp_path / "c.gguf", seed=2).read_bytes() != first


def test_nan_weights_give_nan_logits(tmp_path: Path, stock_llama: Any) -> None:
    path = synthesize(tmp_path / "m.gguf", defects=["nan-weights"])
    assert not stock_llama.ask(path=path, prompt="the")["finite"]


def test_a_duplicate_token_kills_stock_llama(tmp_path: Path, stock_llama: Any) -> None:
    path = synthesize(tmp_path / "m.gguf", defects=["duplicate-token"])
    with pytest.raises(StockLlamaDiedError):
        stock_llama.ask(path=path)


def test_tying_is_by_choice_where_there_is_one(tmp_path: Path, stock_llama: Any) -> None:
    path = synthesize(tmp_path / "m.gguf", "llama", tied=True)
    assert "output.weight" not in files.open(path).tensors
    assert len(set(stock_llama.ask(path=path, prompt="the", n=32)["generated"])) >= 10
    with pytest.raises(InvalidParameterError, match="tied"):
        make_tiny_model("gptneox", tied=True)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"architecture": "lama"}, "architecture"),
        ({"type": "q4_k"}, "type"),
        ({"n_embd": 65}, "n_embd"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads"),
        ({"architecture": "gpt2", "n_kv_heads": 2}, "n_kv_heads"),
        ({"layers": 0}, "layers"),
        ({"n_vocab": 100}, "n_vocab"),
        ({"n_vocab": 600_000}, "n_vocab"),
        ({"tokenizer": "words"}, "tokenizer"),
        ({"n_experts_used": 9}, "n_experts_used"),
        ({"defects": ["rust"]}, "defects"),
    ],
)
def test_wrong_parameters_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        make_tiny_model(**options)
    assert caught.value.name == name


@pytest.mark.parametrize("kind", ["bpe", "spm", "wpm", "ugm"])
@pytest.mark.parametrize("n_vocab", [None, 1000, 50_000])
def test_vocabularies_have_no_text_twice(kind: str, n_vocab: int | None) -> None:
    vocabulary = tiny_vocabulary(kind, n_vocab)
    assert len(set(vocabulary.tokens)) == len(vocabulary) == len(vocabulary.types)
    assert n_vocab in (None, len(vocabulary))
