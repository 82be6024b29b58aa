"""`slipstream inspect`: what is in a corpus, drawn for a person or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.corpus.inspect import CorpusReport, Sample
    from slipstream.corpus.meta import CorpusMeta

BAR_CELLS = 40
_PERCENTILES = {0: "shortest", 10: "10%", 50: "median", 90: "90%", 99: "99%", 100: "longest"}


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `slipstream prepare` wrote.")],
    document: Annotated[
        list[int] | None, typer.Option("--document", help="Document to show with its mask, by id; may be repeated.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Where the target's tokenizer is, if it moved since `prepare`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what is in a corpus: loss mask of some documents, lengths, supervised share, anchors, and refused rows with reasons.

    Every file is verified first. Without --document, the first, the middle and the last document are shown.
    """
    from slipstream.corpus.inspect import inspect_corpus
    from slipstream.corpus.meta import read_meta

    shown = document if document is not None else _some(read_meta(folder).num_documents)
    report = inspect_corpus(folder, document_ids=shown, target=target)
    if as_json:
        typer.echo(json.dumps(report_as_dict(report), indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False)
    _print_counts(report, folder=folder, console=console)
    _print_histogram(report, console=console)
    for sample in report.samples:
        _print_sample(sample, console=console)
    if report.text_note:
        console.print(report.text_note, style="yellow", markup=False)
    _print_rejects(report, console=console)


def meta_as_dict(meta: CorpusMeta) -> dict[str, Any]:
    """A corpus' meta as plain values; the set of tokens that occur is given by its size."""
    plain = asdict(meta)
    plain["num_distinct_tokens"] = sum(byte.bit_count() for byte in plain.pop("token_present"))
    return plain


def report_as_dict(report: CorpusReport) -> dict[str, Any]:
    """A report as plain values."""
    return asdict(report) | {"meta": meta_as_dict(report.meta), "supervised_share": report.supervised_share}


def _some(num_documents: int) -> list[int]:
    return sorted({0, num_documents // 2, num_documents - 1}) if num_documents else []


def _print_counts(report: CorpusReport, *, folder: Path, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    meta = report.meta
    table = Table(title=escape(f"corpus {folder}"), title_justify="left", show_header=False)
    lengths = ", ".join(f"{_PERCENTILES[percent]} {length:,}" for percent, length in report.percentiles.items())
    options = ", ".join(f"{key} = {value}" for key, value in meta.options.items())
    rows = [
        ("target", meta.target),
        ("options", options or "none"),
        ("documents", f"{meta.num_documents:,} of {meta.num_rows:,} rows"),
        ("tokens", f"{meta.num_tokens:,}"),
        ("tokens a document", lengths),
        ("supervised", f"{meta.num_supervised:,} ({report.supervised_share:.1%})"),
        ("anchors", f"{meta.num_anchors:,} ({meta.num_anchors / max(1, meta.num_documents):,.0f} a document)"),
        *((f"kept, but {reason}", f"{count:,}") for reason, count in meta.warnings.items()),
        ("fingerprint", meta.fingerprint),
    ]
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _print_histogram(report: CorpusReport, *, console: Console) -> None:
    from rich.table import Table

    most = max((bar.num_documents for bar in report.histogram), default=1)
    table = Table(title="length of documents, in tokens", title_justify="left", box=None, show_header=False)
    for column in ("right", "left", "right"):
        table.add_column(justify=column)  # type: ignore[arg-type]
    for bar in report.histogram:
        cells = "█" * -(-bar.num_documents * BAR_CELLS // most)
        table.add_row(f"{bar.low:,} to {bar.high - 1:,}", cells, f"{bar.num_documents:,}")
    console.print(table)


def _print_sample(sample: Sample, *, console: Console) -> None:
    """The document's text: supervised on green, context dim. Newlines show as ↵, so that a template's tail can be seen.

    Where there is no colour, ⟦ ⟧ enclose what is supervised.
    """
    from rich.panel import Panel
    from rich.text import Text

    text = Text()
    for run in sample.runs:
        shown = run.text.replace("\n", "↵\n")
        marked = run.supervised and not console.color_system
        text.append(f"⟦{shown}⟧" if marked else shown, style="black on green" if run.supervised else "dim")
    remarks = f" · {', '.join(sample.remarks)}" if sample.remarks else ""
    title = f"document {sample.document_id} · {sample.source}:{sample.line}{remarks}"
    counts = f"{sample.num_tokens:,} tokens, {sample.num_supervised:,} supervised, {sample.num_anchors:,} anchors"
    console.print(Panel(text, title=Text(title), subtitle=counts, title_align="left", subtitle_align="left"))


def _print_rejects(report: CorpusReport, *, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not report.meta.rejects:
        console.print("no row was refused")
        return
    counts = ", ".join(f"{count:,} {reason}" for reason, count in report.meta.rejects.items())
    table = Table("row", "reason", "what was found", title=f"refused rows: {counts}", title_justify="left")
    for reject in report.rejects_shown:
        table.add_row(*map(escape, (f"{reject.source}:{reject.line}", str(reject.reason), reject.detail)))
    console.print(table)
    hidden = sum(report.meta.rejects.values()) - len(report.rejects_shown)
    if hidden:
        console.print(f"and {hidden:,} more in rejects.jsonl")
