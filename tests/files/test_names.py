from __future__ import annotations

import gguf
import pytest

from llamaherd.files.legacy import HEADERS, fits_architecture
from llamaherd.files.names import _NAMES, gguf_name, layer_of, legacy_name

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "gptneox": gguf.MODEL_ARCH.GPTNEOX,
    "bloom": gguf.MODEL_ARCH.BLOOM,
    "mpt": gguf.MODEL_ARCH.MPT,
    "falcon": gguf.MODEL_ARCH.FALCON,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_agrees_with_the_gguf_packages_map(architecture: str) -> None:
    """That map is made of the names of original checkpoints, which the older files kept."""
    theirs = gguf.get_tensor_name_map(ARCHITECTURES[architecture], 12)
    known = 0
    for pattern in _NAMES[architecture]:
        name = pattern.replace("{i}", "11")
        expected = theirs.get_name(name, try_suffixes=(".weight", ".bias"))
        if expected is not None and not (architecture == "bloom" and "norm" in name):
            assert gguf_name(name, architecture) == expected
            known += 1
    assert known >= 5


@pytest.mark.parametrize("architecture", _NAMES)
def test_names_go_there_and_back(architecture: str) -> None:
    for pattern in _NAMES[architecture]:
        name = pattern.replace("{i}", "3")
        assert fits_architecture(name, architecture), name
        new = gguf_name(name, architecture)
        assert new is not None
        back = legacy_name(new, architecture)
        assert back is not None
        assert gguf_name(back, architecture) == new
        if architecture != "falcon":  # whose two sizes call one tensor differently
            assert back == name


def test_every_header_has_names() -> None:
    assert set(HEADERS) == set(_NAMES)


def test_unknown_names_have_no_translation() -> None:
    assert gguf_name("layers.0.attention.wx.weight", "llama") is None
    assert legacy_name("blk.0.attn_q_norm.weight", "llama") is None
    assert gguf_name("x", "nothing") is None
    assert (layer_of("blk.12.ffn_up.weight"), layer_of("output.weight")) == (12, None)
