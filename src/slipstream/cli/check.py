"""`slipstream check`: proofs about the target and the drafter's blocks, before anything is trained on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.config import DrafterShape, Recipe, TargetInfo
    from slipstream.drafter import DFlashDrafter
    from slipstream.records import BlockBatch, Document, Pack, Use
    from slipstream.target.parity import CheckResult

NUM_DOCUMENTS = 4
MAX_USES = 3
BLOCK_TOLERANCE = 1e-5
TILE = 128


def check(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (TOML).")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]…", help="Keys of the recipe to change.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Conversations (JSON lines) to check on, instead of the recipe's corpus.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Prove that what is captured is what the target computes, and that blocks train as they are served.

    Captured states against the whole model's, documents that do not see each other (by perturbation, exactly 0), packed against
    alone, and the drafter's train-mode block against its decode-mode block. A float8 target's error on each tap is measured
    against bfloat16. Exit code 1 if a proof fails.
    """
    from slipstream.cli.progress import Bars
    from slipstream.config import load_recipe, read_target_info, resolve_drafter
    from slipstream.target.parity import check_target

    resolved = load_recipe(recipe, overrides=overrides or [])
    info = read_target_info(resolved.target.model, weights=resolved.target.weights)
    shape = resolve_drafter(recipe=resolved, info=info)
    documents = _from_prompts(prompts, info=info) if prompts else _from_corpus(resolved)
    device = _device(resolved)
    pack, uses = _pack(_some(documents, recipe=resolved), shape=shape)
    with Bars(quiet=as_json) as bars:
        results = check_target(
            info=info,
            dtype=resolved.target.dtype,
            tap_layers=shape.tap_layers,
            pack=pack,
            device=device,
            packing=resolved.target.packing,
            block_parity=_block_parity(recipe=resolved, info=info, shape=shape, pack=pack, uses=uses, device=device),
            on_progress=partial(bars, "check"),
        )
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in results], indent=1))
    else:
        _print(results, target=str(info.folder), pack=pack)
    if not all(result.passed for result in results):
        raise typer.Exit(1)


def _from_corpus(recipe: Recipe) -> list[Document]:
    from slipstream.corpus.store import CorpusStore

    store = CorpusStore.open(recipe.corpus.path)
    return [store.document(index) for index in range(min(store.num_documents, 16 * NUM_DOCUMENTS))]


def _from_prompts(path: Path, *, info: TargetInfo) -> list[Document]:
    from itertools import islice

    from slipstream.corpus.chat import ChatEncoder
    from slipstream.corpus.sources import read_conversations
    from slipstream.records import Document

    encoder = ChatEncoder(info.folder)
    rows = islice(read_conversations([path]), 16 * NUM_DOCUMENTS)
    return [Document(index, *encoder.encode(conversation)) for index, conversation in enumerate(rows)]


def _some(documents: list[Document], *, recipe: Recipe) -> list[Document]:
    """The first few documents that fit a pack of the recipe together. Raises `UsageError` when they are not two."""
    chosen: list[Document] = []
    room = recipe.plan.pack_tokens
    for document in documents:
        if len(document.token_ids) <= room and len(chosen) < NUM_DOCUMENTS:
            chosen.append(document)
            room -= len(document.token_ids)
    if len(chosen) < 2:
        raise UsageError(
            key="plan.pack_tokens",
            value=recipe.plan.pack_tokens,
            rule=f"of the first {len(documents)} documents, {len(chosen)} fit one pack; isolation needs two",
            hint="raise it, or give other documents with --prompts",
        )
    return chosen


def _pack(documents: list[Document], *, shape: DrafterShape) -> tuple[Pack, list[Use]]:
    """One pack of all documents, with some padding, and a few uses spread over its valid anchors."""
    from slipstream.plan.evaluation import plan_validation

    tokens = sum(len(document.token_ids) for document in documents)
    pack_tokens = (tokens // TILE + 1) * TILE
    anchors = TILE // math.gcd(TILE, shape.block_size)
    (pack, uses), *rest = plan_validation(
        documents=documents, pack_tokens=pack_tokens, pack_anchors=anchors, block_size=shape.block_size
    )
    assert not rest, "a pack as large as all documents holds them all"
    if len(uses) > MAX_USES:
        uses = [uses[0], uses[len(uses) // 2], uses[-1]]
    return pack, uses


def _device(recipe: Recipe) -> str:
    import torch

    asked = recipe.placement.device
    return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked


def _block_parity(
    *, recipe: Recipe, info: TargetInfo, shape: DrafterShape, pack: Pack, uses: list[Use], device: str
) -> Callable[[Tensor], CheckResult]:
    """The drafter's own proof, as a callable over captured states: a new drafter in fp32, each block trained and served."""

    def compare(hidden_TKD: Tensor) -> CheckResult:
        from slipstream.drafter import batch_to, build_drafter, make_block_batch
        from slipstream.target.ends import load_frozen_ends
        from slipstream.target.parity import CheckResult

        drafter = build_drafter(shape=shape, dtype="float32", device=device, seed=recipe.plan.seed, attention="sdpa")
        embedding_VD = load_frozen_ends(info=info, dtype="float32", device=device).embedding_VD
        worst, blocks = 0.0, 0
        for use in uses:
            batch = make_block_batch(
                pack=pack,
                use=use,
                block_size=shape.block_size,
                mask_token_id=shape.mask_token_id,
                chunk_rows=recipe.objective.chunk_rows,
            )
            blocks += int(batch.anchor_valid_N.sum())
            moved = batch_to(batch, device=device)
            worst = max(worst, _worst_block(drafter, hidden_TKD=hidden_TKD.float(), batch=moved, embedding_VD=embedding_VD))
        detail = f"{blocks} blocks as trained against as served, in fp32"
        return CheckResult("blocks", blocks > 0 and worst <= BLOCK_TOLERANCE, worst, BLOCK_TOLERANCE, detail)

    return compare


def _worst_block(drafter: DFlashDrafter, *, hidden_TKD: Tensor, batch: BlockBatch, embedding_VD: Tensor) -> float:
    """Largest difference between train mode and decode mode over the valid blocks of a batch, as a share of the maximum."""
    import torch

    with torch.no_grad():
        trained_NBD = drafter(hidden_TKD=hidden_TKD, batch=batch, embedding_VD=embedding_VD)
    scale, worst = float(trained_NBD.abs().max()), 0.0
    for number in batch.anchor_valid_N.nonzero().flatten().tolist():
        anchor, start = int(batch.anchors_N[number]), int(batch.anchor_start_N[number])
        context = drafter.new_context()
        drafter.extend_context(context, hidden_TKD[start:anchor], 0)
        served_BD = drafter.draft(context, batch.block_token_ids_NB[number], anchor - start, embedding_VD)
        worst = max(worst, float((served_BD - trained_NBD[number]).abs().max()) / scale)
    return worst


def _print(results: list[CheckResult], *, target: str, pack: Pack) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    title = f"{target}, on {pack.num_documents} documents of {pack.num_tokens} tokens; differences are relative to the maximum"
    table = Table(title=escape(title), title_justify="left")
    for column, justify in (("proof", "left"), ("", "left"), ("measured", "right"), ("allowed", "right"), ("what", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for result in results:
        verdict = "[green]holds[/]" if result.passed else "[red]FAILS[/]"
        table.add_row(escape(result.name), verdict, f"{result.measured:.3g}", f"{result.allowed:g}", escape(result.detail))
    Console().print(table)
