"""`slipstream prepare`: conversations → corpus, with a progress bar and a table of what became of every row."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.corpus.meta import CorpusMeta
    from slipstream.corpus.prepare import PrepareOptions


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC…", help="JSON lines, Parquet files, folders that `datasets` saved, hub:NAME[:CONFIG][:SPLIT]."
        ),
    ],
    target: Annotated[str, typer.Option("--target", help="Target model: local folder, or hub id in the local cache.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the corpus; made whole or not at all.")],
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Cut longer documents; 4096 or the target's longest by default.")
    ] = None,
    mask_token_id: Annotated[
        int | None, typer.Option("--mask-token-id", help="Refuse conversations that hold the drafter's mask token.")
    ] = None,
    template_arg: Annotated[
        list[str] | None,
        typer.Option("--template-arg", metavar="KEY=VALUE", help="Argument of the chat template, as enable_thinking=false."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first row that cannot be used.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a corpus that is already there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the corpus' meta as JSON, no bar and no table.")] = False,
) -> None:
    """Turn conversations into a token corpus with loss mask, by the target's own chat template.

    Rows may be OpenAI `messages`, ShareGPT `conversations`, prompt/response, instruction/input/output or question/answer.
    """
    from slipstream.corpus.prepare import PrepareOptions

    options = PrepareOptions(
        max_tokens=max_tokens,
        mask_token_id=mask_token_id,
        template_arguments=dict(template_argument(text) for text in template_arg or ()),
        strict=strict,
        overwrite=overwrite,
    )
    meta = _prepare(sources=sources, target=target, out=out, options=options, quiet=as_json)
    if as_json:
        from slipstream.cli.inspect import meta_as_dict

        typer.echo(json.dumps(meta_as_dict(meta), indent=1))
    else:
        _print_outcome(meta, out=out)


def template_argument(text: str) -> tuple[str, Any]:
    """`key=value`; the value is read as JSON, or taken as text where it is none. Raises `UsageError` for anything else."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(
            key="--template-arg", value=text, rule="is written KEY=VALUE", hint="for example enable_thinking=false"
        )
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _prepare(*, sources: list[str], target: str, out: Path, options: PrepareOptions, quiet: bool) -> CorpusMeta:
    from slipstream.cli.progress import Bars
    from slipstream.corpus.prepare import PrepareProgress, prepare

    with Bars(quiet=quiet) as bars:

        def show(now: PrepareProgress) -> None:
            bars("prepare", now.bytes_read, now.bytes_total, f"{now.num_documents:,} kept, {now.num_rejects:,} refused")

        return prepare(sources, target, out, options, show)


def _print_outcome(meta: CorpusMeta, *, out: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"corpus {out}"), title_justify="left", show_header=False)
    share = meta.num_supervised / max(1, meta.num_tokens)
    rows: Iterable[tuple[str, str]] = (
        ("documents", f"{meta.num_documents:,} of {meta.num_rows:,} rows"),
        *((("turns joined", f"{meta.num_joined:,} rows, each to the next of its conversation"),) if meta.num_joined else ()),
        ("tokens", f"{meta.num_tokens:,}, the longest document {meta.max_tokens:,}"),
        ("supervised", f"{meta.num_supervised:,} ({share:.1%})"),
        ("anchors", f"{meta.num_anchors:,}"),
        *((f"refused: {reason}", f"{count:,}") for reason, count in meta.rejects.items()),
        *((f"kept, but {reason}", f"{count:,}") for reason, count in meta.warnings.items()),
        ("fingerprint", meta.fingerprint[:16]),
    )
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
