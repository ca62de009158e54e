from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.hf.torch_models import torch_model  # noqa: E402

from llamaherd.files.synthesize import synthesize  # noqa: E402
from llamaherd.hf import LlamaCppForCausalLM, LlamaCppTokenizer  # noqa: E402

EXACT: dict[str, Any] = {
    "type_k": "f32",
    "type_v": "f32",
    "flash_attn_type": "disabled",
    "n_threads": 1,
    "n_threads_batch": 1,
}
"""With these, f32 weights compute what torch does, to rounding."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


class Pair:
    """One tiny model twice: ours and torch's."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.path = path
        self.ours = LlamaCppForCausalLM.from_pretrained(path, n_ctx=1024, **EXACT)
        self.theirs = torch_model(path, architecture)
        self.models = (self.ours, self.theirs)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Paths of tiny models, each made once."""
    folder = tmp_path_factory.mktemp("tiny")

    def make(architecture: str = "llama", **options: Any) -> Path:
        name = "-".join([architecture, *(f"{k}={v}" for k, v in sorted(options.items()))])
        path = folder / f"{name}.gguf"
        return path if path.exists() else synthesize(path, architecture, **options)

    return make


@pytest.fixture(scope="session")
def pairs(tiny: Callable[..., Path]) -> Iterator[Callable[[str], Pair]]:
    made: dict[str, Pair] = {}

    def get(architecture: str) -> Pair:
        if architecture not in made:
            made[architecture] = Pair(tiny(architecture), architecture)
        return made[architecture]

    yield get
    for pair in made.values():
        pair.ours.close()


@pytest.fixture(scope="session")
def pair(pairs: Callable[[str], Pair]) -> Pair:
    return pairs("llama")


@pytest.fixture(scope="session")
def tokenizer(pair: Pair) -> LlamaCppTokenizer:
    return LlamaCppTokenizer.from_pretrained(pair.path)


@pytest.fixture
def fresh(tiny: Callable[..., Path]) -> Iterator[Callable[..., LlamaCppForCausalLM]]:
    """Models of our own with other parameters, closed afterwards."""
    made = []

    def load(architecture: str = "llama", *, options: dict[str, Any] | None = None, **parameters: Any) -> Any:
        model = LlamaCppForCausalLM.from_pretrained(
            tiny(architecture, **(options or {})), **{"n_ctx": 512, **EXACT, **parameters}
        )
        made.append(model)
        return model

    yield load
    for model in made:
        model.close()


@pytest.fixture
def prompts() -> Any:
    """Ten prompts of different lengths: a list of token lists, without control tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 5, 8, 9, 12, 17, 20, 24, 31, 40]
    return [torch.randint(10, 250, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def batch(prompts: Any) -> Any:
    """The same prompts as one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}
