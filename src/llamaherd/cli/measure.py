"""``llamaherd perplexity`` and ``llamaherd compare``: how good a file is, and what quantisation cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import RequestError
from .options import open_pipeline

if TYPE_CHECKING:
    from ..engine.context import Context
    from ..perplexity import Comparison
    from ..shard.pipeline import Pipeline

__all__ = ["register"]

Window = Annotated[int, typer.Option(help="Tokens that the model sees at once.")]
Stride = Annotated[
    int | None, typer.Option(help="Tokens between windows; half a window if left out.", show_default=False)
]
Stages = Annotated[
    int | None,
    typer.Option(help="Cut the model by layers into so many processes.", show_default=False),
]
Cluster = Annotated[
    str | None,
    typer.Option(metavar="HOST[:PORT]", help="Cut it over the machines of a cluster.", show_default=False),
]
Threads = Annotated[int | None, typer.Option(help="Threads; all CPUs if left out.", show_default=False)]
KvType = Annotated[str, typer.Option(help="Type of the KV cache: f16, f32, q8_0, ...")]


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    app.command("perplexity")(show_perplexity)
    app.command("compare")(show_comparison)


def show_perplexity(
    model: Annotated[Path, typer.Argument(help="A GGUF file.")],
    file: Annotated[Path, typer.Argument(help="A text file (UTF-8).")],
    window: Window = 512,
    stride: Stride = None,
    threads: Threads = None,
    kv_type: KvType = "f16",
    stages: Stages = None,
    cluster: Cluster = None,
) -> None:
    """Measure how well MODEL predicts the text in FILE (lower is better)."""
    with _context(model, window, threads, kv_type, stages, cluster) as context:
        from ..perplexity import perplexity

        tokens = context.vocabulary.encode(_read(file))
        with _bar("perplexity") as progress:
            found = perplexity(context, tokens, window=window, stride=stride, progress=progress)
    low, high = (found.value * (1 - found.error), found.value * (1 + found.error))
    typer.echo(
        f"perplexity {found.value:.4f} ({low:.4f} to {high:.4f}), "
        f"{found.mean:.4f} nats a token, {found.n_tokens} tokens"
    )


def show_comparison(
    first: Annotated[Path, typer.Argument(help="The GGUF file to compare with.")],
    second: Annotated[Path, typer.Argument(help="The other one, such as a quantisation of it.")],
    file: Annotated[Path, typer.Argument(help="A text file (UTF-8).")],
    window: Window = 512,
    stride: Stride = None,
    threads: Threads = None,
    kv_type: KvType = "f16",
    svg: Annotated[
        Path | None, typer.Option(help="Write a picture of the divergences here.", show_default=False)
    ] = None,
) -> None:
    """Measure what SECOND predicts otherwise than FIRST on the text in FILE."""
    with (
        _context(first, window, threads, kv_type) as a,
        _context(second, window, threads, kv_type) as b,
    ):
        from ..perplexity import compare

        text = _read(file)
        tokens = a.vocabulary.encode(text)
        if tokens != b.vocabulary.encode(text):
            raise RequestError(
                f"{first} and {second} make other tokens of {file}; compare needs one vocabulary"
            )
        with _bar("compare") as progress:
            found = compare(a, b, tokens, window=window, stride=stride, progress=progress)
        sizes = (a.model.size, b.model.size)
        Console(width=100).print(_table(found, (first.name, second.name), sizes))
        if svg is not None:
            from .chart import divergence_chart

            svg.write_text(divergence_chart(found, first.name, second.name), encoding="utf-8")


def _table(found: Comparison, names: tuple[str, str], sizes: tuple[int, int]) -> Table:
    import numpy as np

    table = Table(title=f"{found.n_tokens} tokens")
    for column in ("", *names):
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    table.add_row("size", *(f"{size / 1e6:.1f} MB" for size in sizes))
    table.add_row("perplexity", f"{found.first.value:.4f}", f"{found.second.value:.4f}")
    table.add_row("ratio", "1", f"{found.ratio:.5f}")
    table.add_section()
    table.add_row("mean KL divergence", "", f"{found.divergence.mean():.3e}")
    for share in (50, 90, 99):
        table.add_row(f"{share} % are below", "", f"{np.percentile(found.divergence, share):.3e}")
    table.add_row("greatest", "", f"{found.divergence.max():.3e}")
    table.add_row("same top token", "", f"{100 * found.top_agreement:.2f} %")
    return table


@contextmanager
def _context(
    path: Path,
    window: int,
    threads: int | None,
    kv_type: str,
    stages: int | None = None,
    cluster: str | None = None,
) -> Iterator[Context | Pipeline]:
    from ..engine.context import Context
    from ..engine.model import Model

    params: dict[str, Any] = {"n_ctx": max(window, 256), "type_k": kv_type, "type_v": kv_type}
    if threads is not None:
        params |= {"n_threads": threads, "n_threads_batch": threads}
    if stages is not None or cluster is not None:
        with open_pipeline(path, stages, cluster, {}, params) as pipeline:
            yield pipeline
        return
    with Model.load(path) as model, Context(model, **params) as context:
        yield context


@contextmanager
def _bar(what: str) -> Iterator[Any]:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file} cannot be read as UTF-8 text: {error}") from error
