"""`slipstream regenerate`: the target's own greedy answers to the prompts of conversations, resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.corpus.chat import ChatEncoder
    from slipstream.target.answers import AnswerCounts, AnswerFile, Prompt


def regenerate(
    sources: Annotated[list[Path], typer.Argument(metavar="SRC…", help="JSON lines of conversations.")],
    target: Annotated[str, typer.Option("--target", help="Target model: local folder, or hub id in the local cache.")],
    out: Annotated[Path, typer.Option("--out", help="JSON lines of answers; what is there already is kept and continued.")],
    local: Annotated[bool, typer.Option("--local", help="Answer in this process, with transformers.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")] = 1024,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts answered at once.")] = 32,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many conversations, the first ones.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option("--device", help='"auto", "cpu", "cuda", "cuda:1" …')] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON, no bar.")] = False,
) -> None:
    """Let the target answer each conversation's prompt itself: its messages through the last user turn.

    Drafters are trained on what the target would say. An answer that the limit cuts is kept and marked `"finish": "length"`. An
    interrupted run continues when it is called again with the same options.
    """
    if not local:
        raise UsageError(
            key="--local",
            value=False,
            rule="is required: answering through a serving engine does not exist yet, only this process can answer",
            hint="add --local",
        )
    if dtype not in ("bfloat16", "float32"):
        raise UsageError(key="--dtype", value=dtype, rule="must be bfloat16 or float32")
    from slipstream.config import read_target_info
    from slipstream.corpus.chat import ChatEncoder
    from slipstream.target.answers import AnswerFile, AnswerOptions
    from slipstream.target.fingerprint import fingerprint_target
    from slipstream.target.huggingface import load_full

    info = read_target_info(target)
    encoder = ChatEncoder(info.folder)
    options = AnswerOptions(
        target_fingerprint=fingerprint_target(info),
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        stop_token_ids=encoder.stop_token_ids,
    )
    file = AnswerFile(out, options=options)
    prompts, refused = _prompts(sources, encoder=encoder, limit=limit, room=info.max_position_embeddings - max_new_tokens)
    model = load_full(info=info, dtype=dtype, device=_device(device))
    counts = _answer(model, prompts=prompts, file=file, folder=info.folder, batch_size=batch_size, quiet=as_json)
    _print(counts, refused=refused, out=out, as_json=as_json)


def _prompts(sources: list[Path], *, encoder: ChatEncoder, limit: int | None, room: int) -> tuple[list[Prompt], dict[str, int]]:
    """Prompts of conversations in order, and how many rows were refused for which reason."""
    from itertools import islice

    from slipstream.corpus.sources import Reject, read_conversations
    from slipstream.errors import CorpusError
    from slipstream.target.answers import Prompt

    refused: dict[str, int] = {}

    def count(reason: str) -> None:
        refused[reason] = refused.get(reason, 0) + 1

    def reject(row: Reject) -> None:
        count(row.reason.value)

    prompts: list[Prompt] = []
    for conversation in islice(read_conversations(sources, on_reject=reject), limit):
        messages = list(conversation.messages)
        while messages and messages[-1].role != "user":
            messages.pop()
        if not messages:
            count("no_user_turn")
            continue
        if conversation.tools:
            count("tools_not_answered")
            continue
        try:
            token_ids = encoder.encode_prompt(messages)
        except CorpusError:
            count("template_refused")
            continue
        if len(token_ids) > room:
            count("prompt_too_long")
            continue
        prompts.append(Prompt(token_ids=tuple(token_ids), messages=tuple(message.as_dict() for message in messages)))
    if not prompts:
        raise UsageError(
            key="SRC", value=[str(path) for path in sources], rule=f"hold no prompt to answer (refused: {refused})"
        )
    return prompts, refused


def _device(asked: str) -> str:
    import torch

    available = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if available else "cpu"
    if asked.startswith("cuda") and not available:
        raise UsageError(key="--device", value=asked, rule="no CUDA device is available", hint="use cpu")
    return asked


def _answer(model: Any, *, prompts: list[Prompt], file: AnswerFile, folder: Path, batch_size: int, quiet: bool) -> AnswerCounts:
    from tokenizers import Tokenizer

    from slipstream.cli.progress import Bars
    from slipstream.target.answers import answer_resumably

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with Bars(quiet=quiet) as bars:
        return answer_resumably(
            model=model,
            prompts=prompts,
            file=file,
            decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
            batch_size=batch_size,
            on_progress=lambda done, total: bars("answers", done, total),
        )


def _print(counts: AnswerCounts, *, refused: dict[str, int], out: Path, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        typer.echo(json.dumps({**asdict(counts), "refused": refused, "out": str(out)}))
        return
    typer.echo(f"{counts.answered} answered, {counts.already_answered} already there, {counts.cut} cut at the limit; in {out}")
    if counts.duplicates:
        typer.echo(f"{counts.duplicates} prompts came more than once and are answered once")
    for reason, number in sorted(refused.items()):
        typer.echo(f"refused: {number} {reason}")
    typer.echo(f"next: slipstream prepare {out} --target … --out DIR")
