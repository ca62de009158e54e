"""The tokenizer against llama.cpp's own tokenisation, transformers' GGUF conversion, and its users' needs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import AutoTokenizer

from llamaherd.errors import DuplicateTokenError, FileError
from llamaherd.hf import LlamaCppTokenizer

TEXTS = [
    "",
    " ",
    "the quick brown fox",
    "  two  spaces\n\ttabs",
    "naïve café 你好 🦙",
    "a<|im_end|>b",
    "\x00\x7f",
]


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])
def tok(request, tiny):
    return LlamaCppTokenizer.from_pretrained(tiny(request.param))


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(tok, text):
    ids = tok(text, add_special_tokens=False).input_ids
    # llama.cpp's sentencepiece puts its space after control tokens too
    expected = text.replace("<|im_end|>b", "<|im_end|> b") if tok._space_prefix else text
    assert tok.decode(ids) == expected
    assert all(isinstance(i, int) for i in ids)


@pytest.mark.parametrize("text", TEXTS[1:5])
def test_ids_equal_transformers_conversion_of_the_file(tiny, text):
    path = tiny("llama")
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = LlamaCppTokenizer.from_pretrained(path)
    assert ours(text, add_special_tokens=False).input_ids == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ours(text).input_ids, skip_special_tokens=True) == text


def test_batches_are_padded_on_the_left(tok):
    out = tok(["the quick brown fox", "a"], padding=True, return_tensors="pt")
    assert out.input_ids.shape == out.attention_mask.shape
    assert out.attention_mask[1, 0] == 0
    assert out.attention_mask[:, -1].tolist() == [1, 1]
    assert tok.batch_decode(out.input_ids, skip_special_tokens=True) == ["the quick brown fox", "a"]
    cut = tok(["the quick brown fox"], truncation=True, max_length=2)
    assert len(cut.input_ids[0]) == 2


def test_special_tokens(tok):
    ids = tok("fox").input_ids
    assert ids[0] == tok.bos_token_id
    assert tok(tok.bos_token + "fox").input_ids == ids  # not twice
    plain = tok("a<|im_end|>b", split_special_tokens=True, add_special_tokens=False).input_ids
    parsed = tok("a<|im_end|>b", add_special_tokens=False).input_ids
    assert tok.convert_tokens_to_ids("<|im_end|>") in parsed
    assert tok.convert_tokens_to_ids("<|im_end|>") not in plain
    assert tok.decode(parsed, skip_special_tokens=True).replace(" ", "") == "ab"
    assert tok.get_special_tokens_mask(ids, already_has_special_tokens=True)[0] == 1
    assert len(tok) == tok.vocab_size == len(tok.get_vocab())


def test_chat_template_of_the_file(tok):
    messages = [{"role": "user", "content": "hello"}]
    text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = tok.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids.count(tok.convert_tokens_to_ids("<|im_start|>")) == 2


def test_it_can_be_copied_pickled_and_saved(tok, tmp_path):
    wanted = tok("the quick brown fox").input_ids
    tok.save_pretrained(tmp_path)
    for other in (
        copy.deepcopy(tok),
        pickle.loads(pickle.dumps(tok)),
        LlamaCppTokenizer.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    ):
        assert type(other) is LlamaCppTokenizer
        assert other("the quick brown fox").input_ids == wanted
        assert other.pad_token_id == tok.pad_token_id
        assert other.chat_template == tok.chat_template


def test_broken_files_are_refused_not_fatal(tiny, tmp_path):
    with pytest.raises(DuplicateTokenError):
        LlamaCppTokenizer.from_pretrained(tiny("llama", defects=("duplicate-token",)))
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(FileError):
        LlamaCppTokenizer.from_pretrained(tmp_path / "x.gguf")


def test_ids_fit_the_model(pair, tokenizer):
    ids = tokenizer(["the quick brown"], return_tensors="pt")
    assert int(ids.input_ids.max()) < pair.ours.config.vocab_size
    assert torch.isfinite(pair.ours(**ids).logits).all()
