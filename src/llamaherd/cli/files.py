"""Commands that look at model files and turn them into others: inspect, convert."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llamaherd import files
from llamaherd.cli.progress import byte_progress
from llamaherd.cli.sizes import format_size, parse_size
from llamaherd.errors import InvalidParameterError
from llamaherd.files.convert import FLOAT_TYPES, FORMATS, Conversion, convert
from llamaherd.files.model_file import ModelFile
from llamaherd.files.picture import picture
from llamaherd.files.strings import StringArray
from llamaherd.files.summary import Summary, summarize

__all__ = ["register"]

_out = Console(highlight=False, soft_wrap=True)

Source = Annotated[Path, typer.Argument(metavar="FILE", help="A model file; of a split one, any part.")]
Architecture = Annotated[
    str | None, typer.Option(help="What a file before GGUF holds, where its tensors do not tell.")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands to ``app``."""
    app.command("inspect")(inspect_command)
    app.command("convert")(convert_command)
    app.command("dump", hidden=True)(convert_command)


# -------------------------------------------------------------------------------------- inspect


def inspect_command(
    path: Source,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors.")] = False,
    metadata: Annotated[
        str | None, typer.Option("--metadata", metavar="KEY", help="Print one value; 'all' lists the keys.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="List every fault; exit with 1 if one is an error.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Draw where each tensor lies, by type.")
    ] = None,
    n_ctx: Annotated[
        int | None,
        typer.Option("--ctx", min=1, help="Context for the memory estimate; default at most 4096."),
    ] = None,
    architecture: Architecture = None,
) -> None:
    """What is in a model file: container, architecture, sizes, types, tokenizer, memory it needs."""
    if check:
        _check(path, architecture, as_json)
        return
    with files.open(path, architecture=architecture) as model:
        if svg is not None:
            svg.write_text(picture(model), "utf-8")
        if metadata is not None:
            _print_metadata(model, metadata, as_json)
        elif as_json:
            _print_json(model, n_ctx, tensors)
        else:
            _print_summary(summarize(model, n_ctx=n_ctx))
            if tensors:
                _print_tensors(model)


def _check(path: Path, architecture: str | None, as_json: bool) -> None:
    with byte_progress("reading weights") as progress:
        faults = files.check(path, architecture=architecture, progress=progress)
    if as_json:
        typer.echo(json.dumps([asdict(fault) for fault in faults], indent=2))
    else:
        for fault in faults:
            typer.echo(str(fault))
        errors = sum(fault.severity == "error" for fault in faults)
        typer.echo(f"{path}: {errors} errors, {len(faults) - errors} warnings")
    if any(fault.severity == "error" for fault in faults):
        raise typer.Exit(1)


def _plain(value: Any) -> Any:
    """A metadata value as JSON can hold it; bytes that are no text as hexadecimal."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (StringArray, list)):
        return [_plain(getattr(item, "value", item)) for item in value]
    return f"0x{value.hex()}" if isinstance(value, bytes) else value


def _print_metadata(model: ModelFile, key: str, as_json: bool) -> None:
    if key == "all":
        for name in model.metadata:
            typer.echo(f"{name} = {_short(model, name)}")
        return
    if key not in model.metadata:
        raise InvalidParameterError("metadata", key, f"one of {', '.join(model.metadata)}")
    value = _plain(model.metadata[key])
    typer.echo(json.dumps(value, ensure_ascii=False) if as_json or not isinstance(value, str) else value)


def _short(model: ModelFile, key: str) -> str:
    kind, element = model.metadata.type_of(key)
    value: Any = model.metadata[key]
    if element is not None:
        return f"{len(value)} x {element.name.lower()}"
    text = json.dumps(_plain(value), ensure_ascii=False)
    return f"{text if len(text) <= 80 else text[:77] + '...'}  ({kind.name.lower()})"


def _print_json(model: ModelFile, n_ctx: int | None, tensors: bool) -> None:
    out = asdict(summarize(model, n_ctx=n_ctx))
    arrays = {k: len(v) for k, v in model.metadata.items() if model.metadata.type_of(k)[1] is not None}  # type: ignore[arg-type]
    out["metadata"] = {
        k: {"length": arrays[k]} if k in arrays else _plain(v) for k, v in model.metadata.items()
    }
    if tensors:
        out["tensor_list"] = [
            {
                "name": t.name,
                "type": str(t.type),
                "shape": list(t.shape),
                "offset": t.offset,
                "nbytes": t.nbytes,
                "part": t.part,
            }
            for t in model.tensors.values()
        ]
    typer.echo(json.dumps(out, ensure_ascii=False, indent=2))


def _print_summary(summary: Summary) -> None:
    rows: list[tuple[str, str]] = [
        ("file", summary.path + (f" and {summary.files - 1} more" if summary.files > 1 else "")),
        ("container", f"{summary.container}, {format_size(summary.nbytes)}"),
        ("architecture", summary.architecture or "not said"),
    ]
    if summary.name:
        rows.append(("name", summary.name))
    rows.append(("weights", f"{summary.parameters:,} in {summary.tensors} tensors"))
    for key, value in summary.hyperparameters.items():
        rows.append((key.replace("_", " ").replace(".", " "), str(value)))
    if summary.tokenizer:
        rows.append(("tokenizer", f"{summary.tokenizer}, {summary.vocabulary:,} entries"))
    if summary.chat_template is not None:
        first = summary.chat_template.strip().splitlines()[:1]
        text = f"{len(summary.chat_template)} characters: {''.join(first)[:60]}..."
        rows.append(("chat template", text))
    if summary.memory is not None:
        need = summary.memory
        rows.append(
            (
                f"memory at {need.n_ctx}",
                f"{format_size(need.total)} = weights {format_size(need.weights)}"
                f" + KV cache {format_size(need.kv_cache)}, and compute buffers",
            )
        )
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        _out.print(f"[bold]{label:<{width}}[/bold]  {escape(text)}")
    for note in summary.notes:
        _out.print(f"[yellow]note[/yellow]: {escape(note)}")
    _print_bars(summary)


def _print_bars(summary: Summary) -> None:
    """A bar for each tensor type, as long as its share of the bytes."""
    total = sum(share.nbytes for share in summary.types) or 1
    for share in summary.types:
        length = 40 * share.nbytes / total
        bar = "█" * int(length) + ("▌" if length % 1 >= 0.5 else "" if length >= 1 else "▏")
        bits = f"{share.bits:.2f} bits a weight" if share.bits is not None else "unknown layout"
        _out.print(
            f"{share.type:>8}  [cyan]{bar:<40}[/cyan] {100 * share.nbytes / total:5.1f} %  "
            f"{format_size(share.nbytes)}, {share.tensors} tensors, {bits}"
        )


def _print_tensors(model: ModelFile) -> None:
    table = Table("tensor", "type", "shape (row length first)", "bytes", "offset", box=None)
    for tensor in model.tensors.values():
        offset = (
            "-"
            if tensor.offset is None
            else f"{tensor.part}:{tensor.offset}"
            if tensor.part
            else str(tensor.offset)
        )
        shape = " x ".join(map(str, tensor.shape))
        table.add_row(escape(tensor.name), str(tensor.type), shape, str(tensor.nbytes), offset)
    _out.print(table)


# -------------------------------------------------------------------------------------- convert


def convert_command(
    source: Source,
    target: Annotated[Path, typer.Argument(metavar="DST", help="The file to write.")],
    to: Annotated[str, typer.Option(help=f"The container: {', '.join(FORMATS)}.")] = "gguf",
    type: Annotated[
        str | None, typer.Option(help="f32, f16, bf16, or a type of libllama's quantiser: q8_0, q4_k_m, ...")
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(help="Importances for quantising, from llama.cpp's imatrix tool.")
    ] = None,
    split_size: Annotated[
        str | None, typer.Option(help="Spread a GGUF over files of at most this size, e.g. 2G.")
    ] = None,
    n_parts: Annotated[
        int, typer.Option("--parts", min=1, help="Spread GGML or GGMF over so many files.")
    ] = 1,
    architecture: Architecture = None,
    n_ctx: Annotated[int, typer.Option("--ctx", min=1, help="Context length, where SRC has none.")] = 2048,
    rms_epsilon: Annotated[
        float | None, typer.Option(help="Of llama's norms, where SRC has none; default by its age.")
    ] = None,
    rope_base: Annotated[float, typer.Option(help="Of rotary positions, where SRC has none.")] = 10000.0,
    threads: Annotated[int, typer.Option(help="For quantising; 0 means all.")] = 0,
) -> None:
    """Write a model in another container, or with weights of another type.

    Blocks are copied, or repacked without loss where an older layout allows; what is rounded is said. The
    file appears whole or not at all.
    """
    assume = files.Assumptions(n_ctx=n_ctx, rms_epsilon=rms_epsilon, rope_base=rope_base)
    with files.open(source, architecture=architecture) as model:
        size = parse_size(split_size, "split_size") if split_size else None
        if imatrix is not None and (type is None or type.lower() in FLOAT_TYPES):
            raise InvalidParameterError("imatrix", str(imatrix), "only of use with a quantised --type")
        with byte_progress(
            "quantising" if type and type.lower() not in FLOAT_TYPES else "writing"
        ) as progress:
            done = convert(
                model,
                target,
                to=to,
                type=type,
                assume=assume,
                n_parts=n_parts,
                split_size=size,
                quantize=_quantizer(imatrix, threads, progress),
                progress=progress,
            )
        _report(done)


def _quantizer(imatrix: Path | None, threads: int, progress: Any) -> Any:
    from llamaherd.engine.quantize import quantize  # starts a process; loads nothing here

    return partial(quantize, imatrix=imatrix, n_threads=threads, progress=progress)


def _report(done: Conversion) -> None:
    for path in done.paths:
        _out.print(f"{escape(str(path))}  {format_size(path.stat().st_size)}")
    _out.print(done.summary())
    for note in done.notes:
        _out.print(f"[yellow]note[/yellow]: {escape(note)}")
