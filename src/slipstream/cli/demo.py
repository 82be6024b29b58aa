"""`slipstream demo`: the whole story on a CPU, with a bar for each stage and a short table at the end."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.demo.run import DemoSummary


def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]…", help="Keys of the demo's recipe to change, as plan.seed=1.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, no bars and no table.")] = False,
) -> None:
    """Train a real drafter for a real small model on this CPU, in minutes: prepare, plan, train, export, evaluate.

    The run lies in runs/demo, its figures in runs/demo/summary.json; an earlier demo is replaced.
    """
    from slipstream.cli.progress import Bars
    from slipstream.demo.run import run_demo

    with Bars(quiet=as_json) as bars:
        summary = run_demo(overrides=overrides or (), show=lambda event: bars(event.stage, event.done, event.total, event.text))
    if as_json:
        typer.echo(json.dumps(asdict(summary), indent=1))
    else:
        _print(summary)
    if not summary.lossless:
        raise SlipstreamError("answers with the drafter differ from the target's own, and not by a near tie")


def _print(summary: DemoSummary) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="slipstream demo", title_justify="left", show_header=False)
    for name, value in _rows(summary):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _rows(summary: DemoSummary) -> list[tuple[str, str]]:
    curve = "  ".join(f"{step}: {length:.2f}" for step, length in summary.curve)
    lossless = "yes" if summary.lossless else "NO"
    ties = f", {summary.near_ties} near ties" if summary.near_ties else ""
    same = "equal" if summary.simulated_equal else "NOT equal"
    rows = [
        ("acceptance length", f"{summary.acceptance_length_before:.2f} before, {summary.acceptance_length:.2f} after training"),
        ("by step", curve),
        ("held-out prompts", f"{summary.held_out_prompts}; simulated and decoded paths {same}"),
        ("lossless", f"{lossless}{ties}"),
        ("training", f"{summary.steps} steps, {summary.train_seconds:.0f} s, {summary.tokens_per_second:.0f} tokens/s"),
        ("fill", f"tokens {summary.token_fill:.3f}, anchors {summary.anchor_fill:.3f}"),
    ]
    if summary.plain_tokens_per_second and summary.drafted_tokens_per_second:
        gain = summary.drafted_tokens_per_second / summary.plain_tokens_per_second
        speed = f"{summary.plain_tokens_per_second:.1f} → {summary.drafted_tokens_per_second:.1f} tokens/s ({gain:.2f} x), fp32"
        rows.append(("decoding", speed))
    reloaded = f"read back by the dflash package, logits within {summary.reload_difference:.0e} of the largest"
    return [*rows, ("exported", summary.exported_to), ("reloaded", reloaded)]
