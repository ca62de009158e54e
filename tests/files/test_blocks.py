from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llamaherd.errors import UnsupportedFileError
from llamaherd.files.block_types import block_type, named_type
from llamaherd.files.blocks import Rounding, can_repack, dequantize, encode_floats, repack, scales
from llamaherd.files.model_file import Tensor

OLD = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")


def quantised(name: str, rows: int = 5, columns: int = 512) -> tuple[Tensor, Any]:
    """A tensor quantised by the gguf package, and the weights that package reads from it."""
    kind = named_type(name)
    number = gguf.GGMLQuantizationType(kind.number)
    weights = np.random.default_rng(kind.number).standard_normal((rows, columns), np.float32)
    raw = gguf.quants.quantize(weights, number)
    return Tensor.from_bytes(name, kind, (columns, rows), raw), gguf.quants.dequantize(raw, number)


def test_sizes_agree_with_the_gguf_package() -> None:
    for number, (size, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if number.name == "Q8_1":
            continue  # the package has the f32 scales of 2023; ggml-common.h has two f16
        kind = block_type(int(number))
        assert (kind.name.upper(), kind.block_size, kind.block_bytes) == (number.name, size, nbytes)


def test_unknown_types_have_a_name_and_no_size() -> None:
    kind = block_type(200)
    assert (kind.name, kind.known, kind.removed) == ("type_200", False, True)
    with pytest.raises(ValueError, match="not known"):
        kind.nbytes((32,))


@pytest.mark.parametrize("name", [*OLD, "tq1_0", "tq2_0", "bf16", "f16", "f32", "mxfp4"])
def test_decoding_agrees_with_the_gguf_package(name: str) -> None:
    tensor, reference = quantised(name)
    np.testing.assert_array_equal(dequantize(tensor), reference)


@pytest.mark.parametrize(
    "name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "iq2_xxs", "iq3_s", "iq1_m"]
)
def test_types_without_a_reference_quantiser_are_decoded_too(name: str) -> None:
    kind = named_type(name)
    raw = np.random.default_rng(0).integers(0, 120, 3 * kind.nbytes((256,)), np.uint8)
    tensor = Tensor.from_bytes(name, kind, (256, 3), raw)
    expected = gguf.quants.dequantize(raw.reshape(3, -1), gguf.GGMLQuantizationType(kind.number))
    np.testing.assert_array_equal(dequantize(tensor), expected)


def test_an_unknown_type_is_refused_by_name() -> None:
    tensor = Tensor("w", block_type(200), (4,), 8, lambda: np.zeros(8, np.uint8))
    with pytest.raises(UnsupportedFileError, match="type_200"):
        tensor.dequantize()


@pytest.mark.parametrize("era", [1, 2])
@pytest.mark.parametrize("name", OLD)
def test_older_blocks_hold_the_same_weights_and_come_back(name: str, era: int) -> None:
    tensor, reference = quantised(name)
    old = block_type(tensor.type.number, era)
    raw, rounding = repack(tensor.raw, tensor.type, old)
    assert rounding.changed == 0
    np.testing.assert_array_equal(Tensor.from_bytes(name, old, tensor.shape, raw).dequantize(), reference)
    back, rounding = repack(raw, old, tensor.type)
    np.testing.assert_array_equal(back, tensor.raw)
    assert rounding.changed == 0


def test_pair_nibbles_by_hand() -> None:
    """Era 1, byte l holds weights 2l and 2l+1; d is f32."""
    raw = np.concatenate([np.array([0.5], "<f4").view(np.uint8), np.full(16, 0x9A, np.uint8)])
    weights = Tensor.from_bytes("w", block_type(2, 1), (32,), raw).dequantize()
    assert weights[:4].tolist() == [1.0, 0.5, 1.0, 0.5]
    half, _ = repack(raw, block_type(2, 1), block_type(2, 2))
    assert half[4:].tolist() == [0xAA if j % 2 == 0 else 0x99 for j in range(16)]


def test_q4_2_and_q4_3_have_blocks_of_16() -> None:
    nibbles = np.full(8, 0x8C, np.uint8)
    d, m = np.array([0.25], "<f2").view(np.uint8), np.array([3], "<f2").view(np.uint8)
    q4_2 = Tensor.from_bytes("w", block_type(4, 1), (16,), np.concatenate([d, nibbles])).dequantize()
    q4_3 = Tensor.from_bytes("w", block_type(5, 1), (16,), np.concatenate([d, m, nibbles])).dequantize()
    assert q4_2[:2].tolist() == [1.0, 0.0]
    assert q4_3[:2].tolist() == [6.0, 5.0]
    assert not can_repack(block_type(4, 1), block_type(1))


@settings(max_examples=100, deadline=None)
@given(arrays(np.uint8, st.integers(1, 9).map(lambda n: n * 20)))
def test_repacking_moves_every_bit_pattern(raw: Any) -> None:
    """Any block at all, not only those a quantiser makes; era 1 -> 2 changes the order of nibbles only."""
    there, _ = repack(raw, block_type(2, 1), block_type(2, 2))
    back, _ = repack(there, block_type(2, 2), block_type(2, 1))
    scale = raw.reshape(-1, 20)[:, :4].copy().view("<f4")
    kept = ~np.isnan(scale[:, 0])  # a NaN may change its payload
    np.testing.assert_array_equal(back.reshape(-1, 20)[kept], raw.reshape(-1, 20)[kept])


def test_rounding_of_scales_is_measured() -> None:
    d = np.array([0.1, 0.5], "<f4").view(np.uint8).reshape(2, 4)
    raw = np.concatenate([d, np.zeros((2, 16), np.uint8)], axis=1).reshape(-1)
    _, rounding = repack(raw, block_type(2, 1), block_type(2))
    assert (rounding.changed, rounding.count) == (1, 2)
    assert 0 < rounding.largest < 2**-11


def test_a_scale_too_large_for_f16_is_refused() -> None:
    raw = np.concatenate([np.array([1e6], "<f4").view(np.uint8), np.zeros(16, np.uint8)])
    with pytest.raises(ValueError, match="f32"):
        repack(raw, block_type(2, 1), block_type(2))


def test_bf16_rounds_as_the_gguf_package_does() -> None:
    weights = np.random.default_rng(0).standard_normal(4096, np.float32)
    weights[:4] = [np.nan, np.inf, -np.inf, 0]
    raw, rounding = encode_floats(weights, block_type(30))
    expected = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(raw, expected.reshape(-1).view(np.uint8))
    assert rounding.changed > 4000


def test_rounding_adds_up() -> None:
    assert Rounding(1, 2, 0.5) + Rounding(1, 3, 0.25) == Rounding(2, 5, 0.5)


@pytest.mark.parametrize("name", [*OLD, "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "f16", "bf16", "f32"])
def test_scales_find_nan_where_the_decoder_makes_it(name: str) -> None:
    """The bytes of a scale are those that make decoded weights NaN: found by trying every byte pair."""
    kind = named_type(name)
    nan = b"\x00\x7e" if name not in ("bf16", "f32") else b"\xc0\x7f"
    columns = kind.block_size
    for at in range(kind.block_bytes - 1):
        raw = np.zeros(kind.block_bytes, np.uint8)
        raw[at : at + 2] = np.frombuffer(nan, np.uint8)
        with np.errstate(all="ignore"):
            weights = Tensor.from_bytes("w", kind, (columns,), raw).dequantize()
        found = scales(raw, kind)
        assert found is not None
        if np.isnan(weights).any():
            assert np.isnan(found).any(), at
