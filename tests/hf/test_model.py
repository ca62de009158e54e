"""Loading, forward's arguments, loss, and refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

from llamaherd.errors import (
    InvalidParameterError,
    LogitsError,
    ModelNotFoundError,
    RequestError,
    TokenError,
    UnknownParameterError,
    UnsupportedError,
)
from llamaherd.hf import LlamaCppConfig, LlamaCppForCausalLM, LlamaCppModelConfig, LlamaCppTokenizer

IDS = torch.tensor([[20, 30, 40, 50, 60]])


def test_the_package_itself_stays_light():
    code = "import sys, llamaherd; assert not {'torch', 'transformers', 'llama_cpp'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -------------------------------------------------------------------------------------- loading


def test_any_parameter_by_name_and_the_nearest_of_a_wrong_one(tiny):
    config = LlamaCppConfig(
        n_ctx=300, n_gpu_layers=0, flash_attn_type=1, type_k="bf16", n_threads=1, n_seq_max=3
    )
    model = LlamaCppForCausalLM.from_pretrained(tiny(), quantization_config=config)
    context = model.runtime.context
    assert (context.n_ctx, context.n_seq_max, context.n_threads) == (512, 3, 1)
    model.close()
    with pytest.raises(UnknownParameterError, match="n_ctx"):
        LlamaCppConfig(n_ctxt=300)
    with pytest.raises(UnknownParameterError, match="n_gpu_layers"):
        LlamaCppForCausalLM.from_pretrained(tiny(), n_gpu_layer=3)
    with pytest.raises(InvalidParameterError, match="q8_0"):
        LlamaCppConfig(type_k="q9_9")
    assert LlamaCppConfig.from_dict(config.to_dict()) == config


def test_a_file_a_folder_and_a_hub_id(tiny, tmp_path):
    data = tiny().read_bytes()
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(data)
    LlamaCppForCausalLM.from_pretrained(folder).close()
    (folder / "b.gguf").write_bytes(data)
    with pytest.raises(ModelNotFoundError, match=r"a\.gguf, b\.gguf"):
        LlamaCppForCausalLM.from_pretrained(folder)
    LlamaCppForCausalLM.from_pretrained(folder, filename="b.gguf").close()

    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "c.gguf").write_bytes(data)
    (tmp_path / "hub" / "models--some--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--model" / "refs" / "main").write_text("0" * 40)
    hub = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    LlamaCppForCausalLM.from_pretrained("some/model", filename="c.gguf", **hub).close()
    LlamaCppTokenizer.from_pretrained("some/model", gguf_file="c.gguf", **hub)
    with pytest.raises(ModelNotFoundError, match="neither cached"):
        LlamaCppForCausalLM.from_pretrained("some/model", filename="d.gguf", **hub)
    with pytest.raises(ModelNotFoundError, match="filename="):
        LlamaCppForCausalLM.from_pretrained("some/model")
    with pytest.raises(ModelNotFoundError):
        LlamaCppForCausalLM.from_pretrained(tmp_path / "missing.gguf")


def test_a_saved_folder_loads_through_the_auto_classes(tiny, tmp_path):
    model = LlamaCppForCausalLM.from_pretrained(tiny(), n_ctx=256, n_threads=1)
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path)
    LlamaCppTokenizer.from_pretrained(tiny()).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is LlamaCppForCausalLM
    assert again.runtime.context.n_ctx == 256
    assert again.generation_config.max_new_tokens == 3
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is LlamaCppTokenizer
    assert AutoConfig.from_pretrained(tmp_path).architecture == "llama"
    assert torch.equal(again.generate(IDS), model.generate(IDS))
    again.close()
    config = LlamaCppModelConfig.from_pretrained(tiny())
    direct = AutoModelForCausalLM.from_pretrained(
        tiny(), config=config, quantization_config=LlamaCppConfig(n_ctx=512, n_threads=1)
    )
    assert direct.runtime.context.n_ctx == 512
    direct.close()
    model.close()


def test_config_describes_the_model(pair):
    config = pair.ours.config
    theirs = pair.theirs.config
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ):
        assert getattr(config, name) == getattr(theirs, name)
    assert pair.ours.num_parameters() == pair.theirs.num_parameters()
    assert pair.ours.device.type == "cpu"
    assert pair.ours.dtype == torch.float32


def test_pipeline_runs(pair, tokenizer):
    pipe = pipeline("text-generation", model=pair.ours, tokenizer=tokenizer)
    out = pipe(["the quick", "llama"], max_new_tokens=4, do_sample=False, batch_size=2)
    assert all(len(o[0]["generated_text"]) > 0 for o in out)
    chat = pipe([{"role": "user", "content": "hello"}], max_new_tokens=3, do_sample=False)
    assert chat[0]["generated_text"][-1]["role"] == "assistant"


# -------------------------------------------------------------------------------------- forward


def test_logits_to_keep(pair):
    whole = pair.ours(IDS).logits
    assert torch.equal(pair.ours(IDS, logits_to_keep=2).logits, whole[:, -2:])
    assert torch.equal(pair.ours(IDS, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])


def test_only_wanted_logits_are_computed(fresh):
    model = fresh(options={"n_vocab": 30000, "n_ctx": 2048}, n_ctx=2048)
    out = model(torch.randint(10, 250, (1, 2000)), logits_to_keep=1)
    assert out.logits.shape == (1, 1, 30000)
    assert out.logits.untyped_storage().nbytes() <= 2 * 30000 * 4


def test_labels_give_torchs_loss(pair, batch):
    for ids, mask in ((IDS, None), (batch["input_ids"], batch["attention_mask"])):
        labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
        ours = pair.ours(ids, attention_mask=mask, labels=labels)
        theirs = pair.theirs(ids, attention_mask=mask, labels=labels)
        if mask is None:
            assert abs(float(ours.loss - theirs.loss.detach())) < 1e-4
        else:
            # torch also predicts each first token from padding; without those labels they agree
            for i in range(len(ids)):
                labels[i, int((mask[i] == 0).sum())] = -100
            theirs = pair.theirs(ids, attention_mask=mask, labels=labels)
            assert abs(float(ours.loss - theirs.loss.detach())) < 1e-4
    partly = IDS.clone()
    partly[0, :3] = -100
    kept = pair.ours(IDS, labels=partly, logits_to_keep=1)
    assert abs(float(kept.loss - pair.theirs(IDS, labels=partly).loss.detach())) < 1e-4
    assert kept.logits.shape[1] == 1


def test_padded_batch_equals_torch_at_every_token(pair, batch):
    ours = pair.ours(**batch).logits
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    theirs = pair.theirs(**batch, position_ids=positions).logits
    real = batch["attention_mask"].bool()
    assert (ours - theirs)[real].abs().max() < 1e-3
    assert (ours[~real] == 0).all()


def test_tuple_output_and_no_cache(pair):
    logits, cache = pair.ours(IDS, return_dict=False)
    assert logits.shape == (1, 5, pair.ours.config.vocab_size)
    assert cache.get_seq_length() == 5
    assert pair.ours(IDS, use_cache=False).cache is None


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"input_ids": torch.tensor([[20, 99999]])}, TokenError, "99999"),
        ({"input_ids": torch.tensor([[20, -100]])}, TokenError, "-100"),
        ({}, RequestError, "input_ids"),
        ({"input_ids": IDS, "attention_mask": torch.ones(1, 1, 5, 5)}, UnsupportedError, "2-D"),
        ({"input_ids": IDS, "attention_mask": torch.ones(1, 4)}, RequestError, "shape"),
        ({"input_ids": IDS, "position_ids": torch.arange(3, 8)[None]}, RequestError, "position_ids"),
        ({"input_ids": IDS, "output_attentions": True}, UnsupportedError, "attention"),
        ({"input_ids": IDS, "decoder_ids": 3}, UnknownParameterError, "decoder_ids"),
    ],
)
def test_bad_input_is_refused_and_leaves_the_cache(arguments, kind, words, pair):
    cache = pair.ours(IDS).cache
    length = cache.get_seq_length()
    if kind is TokenError:
        arguments = {**arguments, "cache": cache}
    with pytest.raises(kind, match=words):
        pair.ours(**arguments)
    assert cache.get_seq_length() == cache.length(0) == length


def test_a_cached_column_cannot_be_masked_later(pair):
    cache = pair.ours(IDS).cache
    with pytest.raises(RequestError, match="crop"):
        pair.ours(IDS[:, :1], attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]), cache=cache)


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.to("cuda"), "n_gpu_layers"),
        (lambda m: m.cuda(), "n_gpu_layers"),
        (lambda m: m.to(torch.float16), "quantisation"),
        (lambda m: m.half(), "quantisation"),
        (lambda m: m.train(), "gradients"),
        (lambda m: m.state_dict(), "save_pretrained"),
        (lambda m: m.resize_token_embeddings(3), "vocabulary"),
        (lambda m: m.generate_batch([[1, 2]]), "padded"),
        (lambda m: m.add_adapter({}), "load_adapter"),
        (lambda m: LlamaCppForCausalLM(m.config), "from_pretrained"),
    ],
)
def test_what_cannot_be_says_what_to_do(call, words, pair):
    with pytest.raises(UnsupportedError, match=words):
        call(pair.ours)


def test_staying_put_is_fine(pair):
    assert pair.ours.to("cpu").eval().float().cpu() is pair.ours
    assert not pair.ours.training


def test_torch_options_that_llama_cpp_decides_are_refused(tiny):
    with pytest.raises(UnsupportedError, match="dtype"):
        LlamaCppForCausalLM.from_pretrained(tiny(), dtype=torch.bfloat16)
    LlamaCppForCausalLM.from_pretrained(tiny(), dtype="auto", device_map="auto", n_threads=1).close()


def test_nan_weights_do_not_pass_for_text(fresh):
    model = fresh(options={"defects": ("nan-weights",)})
    with pytest.raises(LogitsError, match="NaN"):
        model.generate(IDS, max_new_tokens=2)
    assert model.runtime.context.memory.used_cells == 0


def test_rows_that_were_not_decoded_are_not_taken_for_nan(pair, monkeypatch):
    full = torch.full
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: full(shape, float("nan")))  # as memory may be
    ids = torch.tensor([[20, 30, 40, 50]]).repeat(3, 1)  # equal rows are decoded once
    assert torch.isfinite(pair.ours(ids).logits).all()
