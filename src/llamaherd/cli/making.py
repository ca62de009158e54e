"""Commands that make model files: slice, synthesize, export-torch, import-torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from llamaherd import files
from llamaherd.cli.progress import byte_progress
from llamaherd.cli.sizes import format_size, parse_size
from llamaherd.files.architectures import ARCHITECTURES
from llamaherd.files.convert import FLOAT_TYPES, FORMATS, convert
from llamaherd.files.cut_rules import CUT_RULES
from llamaherd.files.model_file import ModelFile
from llamaherd.files.slice import plan_slice, slice_model
from llamaherd.files.synthesize import TYPES
from llamaherd.files.synthesize import synthesize as make_model

__all__ = ["register"]

_out = Console()

Source = Annotated[Path, typer.Argument(metavar="SRC", help="A model file; of a split one, any part.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The file to write.")]
SplitSize = Annotated[str | None, typer.Option(help="Spread over files of at most this size, e.g. 2G.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to ``app``."""
    app.command("slice")(slice_command)
    app.command("synthesize")(synthesize_command)
    app.command("export-torch")(export_torch_command)
    app.command("import-torch")(import_torch_command)


def _report(paths: list[Path]) -> None:
    for path in paths:
        _out.print(f"{path}  {format_size(path.stat().st_size)}", soft_wrap=True, highlight=False)


def slice_command(
    source: Source,
    start: Annotated[int, typer.Argument(metavar="A", help="First layer, from 0.")],
    end: Annotated[int, typer.Argument(metavar="B", help="The layer after the last.")],
    target: Target,
    check: Annotated[
        bool, typer.Option("--check", help="Run the whole against its slices and compare every logit.")
    ] = False,
    split_size: SplitSize = None,
    unlisted: Annotated[
        bool, typer.Option("--unlisted", help="Cut an architecture that is not known to be cuttable.")
    ] = False,
) -> None:
    """Layers [A, B) of a GGUF model as a model of their own.

    Slices in a chain compute what the whole does, bit for bit; --check proves it for this model.
    """
    with files.open(source) as model:
        size = parse_size(split_size, "split_size") if split_size else None
        with byte_progress("slicing") as progress:
            paths = slice_model(
                model, start, end, target, unlisted=unlisted, split_size=size, progress=progress
            )
        _report(paths)
        if check and not _check_slice(model, start, end, paths[0], unlisted):
            raise typer.Exit(1)


def _check_slice(model: ModelFile, start: int, end: int, path: Path, unlisted: bool) -> bool:
    """Run the whole against the slice with its neighbours, made for the occasion; says how it went."""
    from llamaherd.cli.slice_check import compare_slices  # loads libllama

    layers = plan_slice(model, start, end, unlisted=unlisted).layers
    with tempfile.TemporaryDirectory(prefix=".llamaherd-", dir=path.absolute().parent) as folder:
        chain = [path]
        if start > 0:
            chain.insert(0, slice_model(model, 0, start, Path(folder) / "before.gguf", unlisted=unlisted)[0])
        if end < layers:
            chain += slice_model(model, end, layers, Path(folder) / "after.gguf", unlisted=unlisted)[:1]
        result = compare_slices(model.path, chain)
    verdict = "bit-exact" if result.exact else "NOT exact"
    _out.print(
        f"{verdict}: max |Δlogit| = {result.largest:g} over {result.n_logits} logits "
        f"(whole against {len(chain)} slices; the logits' spread is {result.spread:.2g})",
        soft_wrap=True,
    )
    return result.exact


def synthesize_command(
    target: Annotated[Path | None, typer.Argument(metavar="DST", help="The file to write.")] = None,
    arch: Annotated[str, typer.Option(help="The architecture; --list shows all.")] = "llama",
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 2,
    embd: Annotated[int, typer.Option(help="Length of a hidden state.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads; default half, where it can.")] = None,
    ff: Annotated[int | None, typer.Option(help="Feed-forward length; default twice --embd.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary entries; default 320 or 448.")] = None,
    ctx: Annotated[int, typer.Option(help="Context length it claims to be trained for.")] = 512,
    experts: Annotated[int, typer.Option(help="Experts, in a mixture of them.")] = 4,
    type: Annotated[str, typer.Option(help="Type of the matrices: f32, f16, q8_0, q4_k_m, ...")] = "f32",
    tokenizer: Annotated[
        str | None, typer.Option(help="bpe, spm, wpm or ugm; default the usual one.")
    ] = None,
    bos: Annotated[bool, typer.Option(help="Whether it has a BOS token.")] = True,
    tied: Annotated[bool | None, typer.Option(help="Whether the embedding is the head too.")] = None,
    format: Annotated[str, typer.Option(help=f"Container: {', '.join(FORMATS)}.")] = "gguf",
    split_size: SplitSize = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal files.")] = 0,
    list_all: Annotated[bool, typer.Option("--list", help="Show the architectures and stop.")] = False,
) -> None:
    """A tiny random model of any supported architecture: valid, quick, talks nonsense.

    It has a working vocabulary of its own; for tests, and for trying things.
    """
    if list_all:
        _list_architectures()
        return
    if target is None:
        raise typer.BadParameter("name the file to write", param_hint="DST")
    options: dict[str, Any] = {
        "layers": layers, "n_embd": embd, "n_heads": heads, "n_kv_heads": kv_heads, "n_ff": ff,
        "n_vocab": vocab, "n_ctx": ctx, "n_experts": experts, "n_experts_used": min(2, experts),
        "type": type, "tokenizer": tokenizer, "bos": bos, "tied": tied, "seed": seed,
    }  # fmt: skip
    size = parse_size(split_size, "split_size") if split_size else None
    if format == "gguf" and type in TYPES:
        paths = [make_model(target, arch, split_size=size, **options)]
    else:
        direct = type in TYPES
        options["type"] = type if direct else "f32"
        paths = _by_way_of(
            lambda path: make_model(path, arch, **options),
            target, to=format, type=None if direct else type, split_size=size,
        )  # fmt: skip
    _report(paths)


def _by_way_of(
    make: Callable[[Path], object], target: Path, *, to: str, type: str | None, split_size: int | None
) -> list[Path]:
    """Make a plain GGUF beside ``target`` and convert it; types that are not ours go through libllama."""
    from llamaherd.engine.quantize import quantize  # starts a process; loads nothing here

    with tempfile.TemporaryDirectory(prefix=".llamaherd-", dir=target.absolute().parent) as folder:
        plain = Path(folder) / "model.gguf"
        make(plain)
        with files.open(plain) as model:
            result = convert(model, target, to=to, type=type, split_size=split_size, quantize=quantize)
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    return result.paths


def _list_architectures() -> None:
    table = Table("name", "in GGUF", "tokenizer", "slices")
    for row in ARCHITECTURES.values():
        table.add_row(row.name, row.gguf, row.tokenizer, "bit-exact" if row.gguf in CUT_RULES else "refused")
    _out.print(table)


def export_torch_command(
    source: Source,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    model_type: Annotated[str | None, typer.Option(help="mistral, to have a llama file as one.")] = None,
) -> None:
    """A GGUF model as a Hugging Face checkpoint.

    In safetensors, with tokenizer files: to fine-tune it with transformers, for example.
    """
    with files.open(source) as model:
        from llamaherd.files.checkpoint import export_torch  # an optional part

        with byte_progress("exporting") as progress:
            folder = export_torch(model, target, dtype=dtype, model_type=model_type, progress=progress)
        _report(sorted(folder.iterdir()))


def import_torch_command(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A transformers checkpoint's folder.")],
    target: Target,
    type: Annotated[str, typer.Option(help="Type of the matrices: f32, f16, bf16, q8_0, ...")] = "f16",
    metadata_from: Annotated[
        Path | None, typer.Option(help="A GGUF to take the tokenizer and general metadata from.")
    ] = None,
    split_size: SplitSize = None,
) -> None:
    """A Hugging Face checkpoint as a GGUF model."""
    from llamaherd.files.checkpoint import import_torch  # an optional part

    size = parse_size(split_size, "split_size") if split_size else None
    with byte_progress("importing") as progress:
        if type in FLOAT_TYPES:
            paths = import_torch(
                source, target, type=type, metadata_from=metadata_from, split_size=size, progress=progress
            )
        else:
            paths = _by_way_of(
                lambda path: import_torch(
                    source, path, type="f32", metadata_from=metadata_from, progress=progress
                ),
                target, to="gguf", type=type, split_size=size,
            )  # fmt: skip
    _report(paths)
