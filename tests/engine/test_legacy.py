"""Files from before GGUF run as the same weights in GGUF do."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from llamaherd import files
from llamaherd.config import LoraConfig
from llamaherd.engine.context import Context
from llamaherd.engine.model import Model
from llamaherd.engine.protocol import Batch
from llamaherd.errors import InvalidParameterError, MalformedFileError, ModelLoadError, UnsupportedFileError
from llamaherd.files.synthesize import synthesize
from llamaherd.files.writer import write_gguf

TOKENS = np.array([1, 40, 41, 99, 7, 200, 12, 77, 8, 50], np.int32)


def logits(path, **load):
    with (
        Model.load(path, **load) as model,
        Context(model, n_ctx=256, n_threads=1, n_threads_batch=1) as context,
    ):
        n = len(TOKENS)
        sequence = context.memory.allocate()
        batch = Batch(
            TOKENS, np.arange(n, dtype=np.int32), np.full(n, sequence, np.int32), np.ones(n, np.bool_)
        )
        return context.decode(batch).copy()


def make(folder, to, type="f16", **options):
    gguf = synthesize(
        folder / "model.gguf", "llama", type=type, tokenizer="spm", n_kv_heads=4, n_ff=192, **options
    )
    old = folder / "model.bin"
    with files.open(gguf) as model:
        files.convert(model, old, to=to)
    # what the old container cannot say comes back from defaults: compare with that, told in GGUF
    back = folder / "back.gguf"
    with files.open(old) as model:
        files.convert(model, back, to="gguf")
    return old, back


def cosine(a, b):
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("mode", ["fast-open", "fast-run", None])
@pytest.mark.parametrize("to", ["ggml", "ggmf", "ggjt1", "ggjt2", "ggjt"])
@pytest.mark.parametrize("type", ["f32", "f16", "q4_0", "q8_0"])
def test_logits_equal_those_of_gguf(tmp_path, to, type, mode):
    old, back = make(tmp_path, to, type)
    ours = logits(old, load_mode=mode)
    # plain layouts against plain layouts, repacked against repacked: bit for bit
    expected = logits(back, use_extra_bufts=mode != "fast-open") if mode else None
    if expected is not None:
        assert np.array_equal(ours, expected)
    # another layout may have other kernels, which round activations elsewhere: on this small random model either
    # is as near to unrounded activations as the other (tests/kernels measures that)
    assert cosine(ours, logits(back)) > 0.9995
    assert np.isfinite(ours).all()


def test_todays_blocks_are_not_copied(tmp_path):
    old, _ = make(tmp_path, "ggjt", "f16", layers=4, n_embd=512, n_vocab=2000)

    def mapped():
        with open("/proc/self/smaps") as smaps:
            blocks = smaps.read().split("VmFlags")
        return sum("model.bin" in block for block in blocks)

    with Model.load(old, load_mode="fast-open") as model:
        assert mapped() >= 1
        private = anonymous()
        with Context(model, n_ctx=256, n_threads=1):
            pass
        assert anonymous() - private < model.size
    before = anonymous()
    with Model.load(old, load_mode="fast-open") as model:
        assert anonymous() - before < model.size // 2


def anonymous():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_models_in_parts(tmp_path):
    gguf = synthesize(tmp_path / "model.gguf", "llama", type="f16", tokenizer="spm", n_kv_heads=4, n_ff=192)
    old, back = tmp_path / "model.bin", tmp_path / "back.gguf"
    with files.open(gguf) as model:
        files.convert(model, old, to="ggmf", n_parts=2)
    assert (tmp_path / "model.bin.1").exists()
    with files.open(old) as model:
        files.convert(model, back, to="gguf")
    assert np.array_equal(logits(old, load_mode="fast-open"), logits(back, use_extra_bufts=False))


def test_what_the_file_does_not_say_can_be_given(tmp_path):
    old, _ = make(tmp_path, "ggjt")
    with Model.load(old, assume=files.Assumptions(n_ctx=1234)) as model:
        assert model.n_ctx_train == 1234
        assert model.vocabulary.decode(model.vocabulary.encode("hello", add_special=False)).strip() == "hello"
    usual, other = logits(old), logits(old, assume=files.Assumptions(rope_base=500.0))
    assert not np.allclose(usual, other, atol=1e-2)


def test_save_writes_any_container(tmp_path):
    old, _ = make(tmp_path, "ggjt")
    with Model.load(old) as model:
        model.save(tmp_path / "again.ggml", format="ggml")
    # readers of GGML took another epsilon than those of GGJT 3
    again = logits(tmp_path / "again.ggml", load_mode="fast-open", assume=files.Assumptions(rms_epsilon=5e-6))
    assert np.array_equal(again, logits(old, load_mode="fast-open"))


def test_broken_old_files(tmp_path):
    old, _ = make(tmp_path, "ggjt")
    data = old.read_bytes()
    (tmp_path / "cut.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(MalformedFileError):
        Model.load(tmp_path / "cut.bin")
    with pytest.raises(InvalidParameterError):
        Model.load(old, load_mode="fast")


def write_ggla(path, base, rank=4, alpha=8.0, seed=0):
    """A ggla adapter on layer 0's wq, as llama.cpp's convert-lora-to-ggml.py of 2023 wrote it."""
    rng = np.random.default_rng(seed)
    with files.open(base) as model:
        columns, rows = model.tensors["layers.0.attention.wq.weight"].shape
    a = rng.standard_normal((rank, columns)).astype(np.float32)
    b = rng.standard_normal((rows, rank)).astype(np.float32)
    out = bytearray(struct.pack("<4sIii", b"ggla"[::-1], 1, rank, int(alpha)))
    for name, matrix in (("loraA", a.T), ("loraB", b)):
        text = f"layers.0.attention.wq.weight.{name}".encode()
        out += struct.pack("<iiI", 2, len(text), 0) + struct.pack("<ii", *matrix.shape[::-1]) + text
        out += bytes(-len(out) % 32) + np.ascontiguousarray(matrix).tobytes()
    path.write_bytes(out)
    return a, b, alpha / rank


def test_ggla_adapters_do_what_their_formula_says(tmp_path):
    old, back = make(tmp_path, "ggjt", "f32")
    a, b, scale = write_ggla(tmp_path / "lora.bin", old)
    merged = tmp_path / "merged.gguf"
    with files.open(back) as model:
        contents = files.contents_of(model)
        tensors = dict(contents.tensors)
        name = "blk.0.attn_q.weight"
        weight = tensors[name].dequantize() + np.float32(0.5 * scale) * (b @ a)
        raw = np.ascontiguousarray(weight, np.float32).view(np.uint8).reshape(-1)
        tensors[name] = replace(tensors[name], load=lambda: raw)
        write_gguf(merged, dict(contents.metadata), list(tensors.values()))
    lora = LoraConfig(str(tmp_path / "lora.bin"), scale=0.5)
    with_adapter = logits(old, loras=[lora], load_mode="fast-open")
    assert np.allclose(with_adapter, logits(merged), atol=2e-2)
    assert not np.allclose(with_adapter, logits(old), atol=0.1)
    off = logits(old, loras=[LoraConfig(str(tmp_path / "lora.bin"), scale=0)], load_mode="fast-open")
    assert np.allclose(off, logits(old, load_mode="fast-open"), atol=1e-4)
    other = synthesize(tmp_path / "other.gguf", "llama", n_embd=128)
    with Model.load(other) as model, pytest.raises((ModelLoadError, UnsupportedFileError)):
        model.add_lora(lora)
