"""Products of every level against float64, on shapes that do not fit the tiles; bitwise the same in any batch."""

import ctypes

import numpy as np
import pytest

pytest.importorskip("llamaherd_kernels", reason="pip install ./kernels")
from gguf import GGMLQuantizationType, dequantize
from llamaherd_kernels import ggml as graphs
from llamaherd_kernels.library import TYPES, available_levels, levels, load

BLOCK = {name: 256 if name.endswith("_K") or name == "IQ4_XS" else 32 for name in TYPES}
HERE = [*available_levels(), *(name for name in levels() if name.startswith("emulated"))]
PLAIN = ("F16", "BF16")
BF16_PAIRS = ("avx512bf16", "emulated16")  # levels that round activations to BF16 where the weights are


@pytest.fixture(scope="module")
def ggml():
    return graphs.bind()


def quantised(ggml, name, values):
    """The bytes of a type, and what they mean in float64."""
    data = graphs.quantise(ggml, TYPES[name], np.ascontiguousarray(values, np.float32))
    rows = np.frombuffer(data, np.uint8).reshape(len(values), -1)
    return data, dequantize(rows, GGMLQuantizationType(TYPES[name])).reshape(values.shape).astype(np.float64)


def random_weights(ggml, name, n, k):
    """Random bytes as weights of a quantised type, and what they mean in float64."""
    rows = np.random.default_rng(5).integers(0, 256, (n, ggml.ggml_row_size(TYPES[name], k)), np.uint8)
    finite = {"Q6_K": [209], "Q3_K": [109], "Q2_K": [81, 83], "MXFP4": []}.get(
        name, [1, 3] if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [1]
    )
    for byte in finite:
        rows[:, byte] &= 0x3B  # a 16-bit float's sign and exponent
    if name == "MXFP4":
        rows[:, 0] = rows[:, 0] % 40 + 100
    return rows, dequantize(rows, GGMLQuantizationType(TYPES[name])).astype(np.float64)


def multiply(level, name, n, data, x, threads=1):
    m, k = x.shape
    size = load().llamaherd_kernels_packed_bytes(level.encode(), TYPES[name], k, n)
    assert size > 0
    packed = ctypes.create_string_buffer(size)
    load().llamaherd_kernels_pack(level.encode(), TYPES[name], k, n, data, packed)
    x = np.ascontiguousarray(x, np.float32)
    out = np.full((m, n), 7, np.float32)
    load().llamaherd_kernels_multiply(
        level.encode(), TYPES[name], k, n, m, packed, x.ctypes.data, out.ctypes.data, threads, 1
    )
    return out


def rounded_to_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def rounded(name, x, level=""):
    """Activations as a kernel sees them: int8 under one scale a block; 16-bit weights meet them unrounded, or as BF16."""
    if name == "BF16" and level in BF16_PAIRS:
        return rounded_to_bf16(x).astype(np.float64)
    if name in PLAIN:
        return x.astype(np.float64)
    blocks = x.reshape(len(x), -1, BLOCK[name]).astype(np.float64)
    largest = np.abs(blocks).max(-1, keepdims=True)
    scale = np.where(largest > 0, largest / 127, 1)
    return (np.rint(blocks / scale) * scale).reshape(x.shape)


def activations(kind, m, k):
    random = np.random.default_rng(m)
    x = random.standard_normal((m, k)).astype(np.float32)
    if kind == "largest":  # every activation at the end of the scale: the sums that could overflow
        x = np.where(x < 0, -1, 1).astype(np.float32)
    elif kind == "all one":
        x = np.ones_like(x)
    elif kind == "zero":
        x = np.zeros_like(x)
    elif kind == "spikes":
        x[:, ::37] *= 1e4
    elif kind == "tiny":
        x *= np.float32(1e-30)
    return x


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_float64(ggml, level, name):
    blocks, n, m = (2, 37, 9) if level.startswith("emulated") else (3, 83, 33)
    k = blocks * BLOCK[name]
    weights = np.random.default_rng(k).standard_normal((n, k))
    for kind in ("normal", "largest", "all one", "zero", "spikes", "tiny"):
        x = activations(kind, m, k)
        # weights at both ends of their scale meet activations at both ends of theirs
        data, exact = quantised(ggml, name, np.sign(weights) if kind == "largest" else weights)
        expected = rounded(name, x, level) @ exact.T
        # rounding half-way cases otherwise than numpy costs a step of one activation
        scale = np.abs(rounded(name, x, level)) @ np.abs(exact).T
        error = np.abs(multiply(level, name, n, data, x) - expected)
        assert (error <= 2e-5 * scale + 1e-38).all(), (kind, (error / (scale + 1e-38)).max())


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("name", PLAIN)
def test_rows_of_sixteen_bit_weights_may_be_of_any_length(ggml, level, name):
    for k in (1, 7, 33, 47):
        data, exact = quantised(ggml, name, np.random.default_rng(k).standard_normal((19, k)))
        x = activations("normal", 5, k)
        scale = np.abs(rounded(name, x, level)) @ np.abs(exact).T
        error = np.abs(multiply(level, name, 19, data, x) - rounded(name, x, level) @ exact.T)
        assert (error <= 2e-5 * scale + 1e-38).all(), k


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("name", TYPES)
def test_all_bits_of_the_weights_are_used(ggml, level, name):
    """Random bytes as weights: every code, scale and minimum, also those that no quantiser writes."""
    if name in PLAIN:
        pytest.skip("any 16 bits may be an infinity")
    k, n = BLOCK[name], 19
    rows, exact = random_weights(ggml, name, n, k)
    for kind in ("normal", "largest", "all one"):
        x = activations(kind, 5, k)
        expected, scale = rounded(name, x, level) @ exact.T, np.abs(rounded(name, x, level)) @ np.abs(exact).T
        # minimums cancel: what counts is the size of what is summed
        error = np.abs(multiply(level, name, n, rows.tobytes(), x) - expected)
        assert (error <= 1e-3 * scale.max()).all(), kind


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("name", TYPES)
def test_a_row_is_bitwise_the_same_in_any_batch_and_on_any_threads(ggml, level, name):
    n, k = 70, 2 * BLOCK[name]
    top = 9 if level.startswith("emulated") else 33
    data, _ = quantised(ggml, name, np.random.default_rng(1).standard_normal((n, k)))
    x = np.random.default_rng(2).standard_normal((top, k)).astype(np.float32)
    whole = multiply(level, name, n, data, x)
    for m in range(1, top, 1 if top < 10 else 3):
        for start in {0, (top - m) // 2, top - m}:
            part = multiply(level, name, n, data, x[start : start + m], threads=1 + m % 3)
            assert np.array_equal(part, whole[start : start + m]), (m, start)


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible_and_in_its_row(ggml, level, value):
    for name in TYPES:
        n, k = 24, 2 * BLOCK[name]
        data, _ = quantised(ggml, name, np.random.default_rng(1).standard_normal((n, k)))
        x = np.random.default_rng(2).standard_normal((3, k)).astype(np.float32)
        clean = multiply(level, name, n, data, x)
        x[1, 5] = value
        out = multiply(level, name, n, data, x)
        assert not np.isfinite(out[1]).any(), name
        assert np.array_equal(out[[0, 2]], clean[[0, 2]]), name


@pytest.mark.parametrize("level", HERE)
def test_shapes_that_do_not_fit_are_refused(level):
    for name in TYPES:
        if name not in PLAIN:
            assert (
                load().llamaherd_kernels_packed_bytes(level.encode(), TYPES[name], BLOCK[name] + 16, 8) == 0
            )
    assert load().llamaherd_kernels_packed_bytes(level.encode(), 0, 32, 8) == 0  # f32 has no kernel
