"""`slipstream evaluate`: acceptance length per prompt set, losslessness, and what a drafter gains at batch 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.drafter_source import CheckpointOption, read_drafter
from slipstream.errors import SlipstreamError, UsageError

if TYPE_CHECKING:
    from slipstream.cli.drafter_source import DrafterSource
    from slipstream.cli.progress import Bars
    from slipstream.config import TargetInfo
    from slipstream.corpus.chat import ChatEncoder
    from slipstream.drafter import DFlashDrafter
    from slipstream.evaluate.measure import AnswerLimits, DecodedSet, SetReport
    from slipstream.evaluate.prompts import PromptSet
    from slipstream.evaluate.sampling import Sampling
    from slipstream.evaluate.summary import AcceptancePath, AcceptanceSummary


def evaluate(
    source: Annotated[
        Path, typer.Argument(metavar="CKPT_OR_EXPORT", help="Exported drafter, checkpoint, or run folder (its best one).")
    ],
    prompts: Annotated[list[Path], typer.Option("--prompts", help="JSON lines of conversations; a set for each file.")],
    target: Annotated[str | None, typer.Option("--target", help="Target model; a run's own if left out.")] = None,
    checkpoint: CheckpointOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")] = 256,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many prompts a set, the first ones.")] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="Decode with rejection sampling too.")] = False,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Of --sampled; 1 if left out.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Of --sampled; 1 (all) if left out.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Of --sampled; 0 (all) if left out.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of --sampled; 0 if left out.")] = None,
    bf16_agreement: Annotated[
        bool, typer.Option("--bf16-agreement", help="Also count the answer tokens that the target in bfloat16 would choose.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help='"auto", "cpu", "cuda", "cuda:1" …')] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON, no bar.")] = False,
) -> None:
    """Measure a drafter: exact acceptance length (simulated and decoded), losslessness, tokens a second.

    Everything is computed in fp32 at batch 1, with the drafter's weights as they are exported. Exit code 1 if an answer with
    the drafter differs from the target's own where the target does not waver.
    """
    from slipstream.config import read_target_info
    from slipstream.corpus.chat import ChatEncoder
    from slipstream.evaluate.measure import AnswerLimits

    sampling = _sampling(sampled, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    found = read_drafter(source, checkpoint=checkpoint)
    model = target or found.target
    if model is None:
        raise UsageError(key="--target", value=None, rule="is required: an exported drafter does not hold its target")
    info = read_target_info(model)
    found.check_target(info)
    encoder = ChatEncoder(info.folder)
    room = info.max_position_embeddings - max_new_tokens
    sets = [_prompt_set(path, encoder=encoder, limit=limit, room=room) for path in prompts]
    limits = AnswerLimits(
        max_new_tokens=max_new_tokens, stop_token_ids=encoder.stop_token_ids, sampling=sampling, seed=seed or 0
    )
    reports = _measure(sets, source=found, info=info, limits=limits, bf16=bf16_agreement, device=_device(device), quiet=as_json)
    if as_json:
        result = {
            "drafter": found.described,
            "chosen": found.chosen,
            "target": model,
            "sets": [report.as_dict() for report in reports],
        }
        typer.echo(json.dumps(result, indent=1))
    else:
        described = found.described if found.chosen is None else f"{found.described} ({found.chosen})"
        _print(reports, described=described, model=model)
    different = sum(report.lossless.different for report in reports)
    if different:
        raise SlipstreamError(f"{different} answers with the drafter differ from the target's own, and not by a near tie")


def _sampling(
    sampled: bool, *, temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None
) -> Sampling | None:
    from slipstream.evaluate.sampling import Sampling

    given = {"--temperature": temperature, "--top-p": top_p, "--top-k": top_k, "--seed": seed}
    if sampled:
        return Sampling(
            temperature=1.0 if temperature is None else temperature, top_p=1.0 if top_p is None else top_p, top_k=top_k or 0
        )
    for key, value in given.items():
        if value is not None:
            raise UsageError(key=key, value=value, rule="does nothing without --sampled")
    return None


def _prompt_set(path: Path, *, encoder: ChatEncoder, limit: int | None, room: int) -> PromptSet:
    from slipstream.corpus.sources import read_conversations
    from slipstream.evaluate.prompts import make_prompt_set

    conversations = (conversation.messages for conversation in read_conversations([path]))
    return make_prompt_set(
        name=path.stem, conversations=conversations, encode=encoder.encode_prompt, limit=limit, max_prompt_tokens=room
    )


def _device(asked: str) -> str:
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(key="--device", value=asked, rule="no CUDA device is available", hint="use cpu")
    return asked


def _measure(
    sets: Sequence[PromptSet],
    *,
    source: DrafterSource,
    info: TargetInfo,
    limits: AnswerLimits,
    bf16: bool,
    device: str,
    quiet: bool,
) -> list[SetReport]:
    """One model of the target in memory at a time: whole in fp32, then cut after the last tap, then whole in bfloat16."""
    from slipstream.cli.progress import Bars
    from slipstream.evaluate.measure import agreement, report_set
    from slipstream.target.huggingface import load_full

    with Bars(quiet=quiet) as bars:
        drafter = _drafter(source, device=device)
        decoded = _decode(sets, info=info, drafter=drafter, limits=limits, device=device, bars=bars)
        answers = [[answer.token_ids for answer in item.plain] for item in decoded]
        simulated = _simulate(sets, answers=answers, info=info, drafter=drafter, limits=limits, device=device, bars=bars)
        agreements: list[float | None] = [None] * len(sets)
        if bf16:
            show = _counted(bars, "agreement", total=sum(len(item.prompts) for item in sets))
            model = load_full(info=info, dtype="bfloat16", device=device)
            agreements = [
                agreement(item, answers=given, target=model, on_answer=show) for item, given in zip(sets, answers, strict=True)
            ]
    return [
        report_set(item, decoded=run, simulated=paths, block_size=source.shape.block_size, bf16_agreement=share)
        for item, run, paths, share in zip(sets, decoded, simulated, agreements, strict=True)
    ]


def _drafter(source: DrafterSource, *, device: str) -> DFlashDrafter:
    """The drafter in fp32 with the weights that an export holds: a checkpoint's are rounded to bfloat16 first."""
    import torch

    from slipstream.drafter import build_drafter

    drafter = build_drafter(shape=source.shape, dtype="float32", device=device, seed=None, attention="sdpa")
    exported = source.target_fingerprint is None
    state = {key: (value if exported else value.to(torch.bfloat16)).float() for key, value in source.state.items()}
    drafter.load_state_dict(state)
    return drafter


def _decode(
    sets: Sequence[PromptSet], *, info: TargetInfo, drafter: DFlashDrafter, limits: AnswerLimits, device: str, bars: Bars
) -> list[DecodedSet]:
    from slipstream.evaluate.measure import decode_set
    from slipstream.evaluate.session import TargetSession
    from slipstream.target.huggingface import load_full

    show = _counted(bars, "decode", total=sum(len(item.prompts) for item in sets))
    session = TargetSession(load_full(info=info, dtype="float32", device=device), tap_layers=drafter.shape.tap_layers)
    return [decode_set(item, session=session, drafter=drafter, limits=limits, on_answer=show) for item in sets]


def _counted(bars: Bars, stage: str, *, total: int) -> Callable[[], None]:
    """Shows the stage at once, loading included, and one more done at each call."""
    done = count(1)
    bars(stage, 0, total)
    return lambda: bars(stage, next(done), total)


def _simulate(
    sets: Sequence[PromptSet],
    *,
    answers: Sequence[Sequence[Sequence[int]]],
    info: TargetInfo,
    drafter: DFlashDrafter,
    limits: AnswerLimits,
    device: str,
    bars: Bars,
) -> list[list[AcceptancePath]]:
    import torch

    from slipstream.evaluate.measure import simulate_set
    from slipstream.records import Pack
    from slipstream.target.ends import load_frozen_ends
    from slipstream.target.huggingface import load_target

    shape = drafter.shape
    show = _counted(bars, "simulate", total=sum(len(item.prompts) for item in sets))
    runner = load_target(info=info, dtype="float32", tap_layers=shape.tap_layers, device=device)
    ends = load_frozen_ends(info=info, dtype="float32", device=device)

    def capture(pack: Pack) -> torch.Tensor:
        hidden_TKD = torch.empty(pack.capacity_tokens, shape.num_taps, shape.hidden_size, device=device)
        runner.capture(pack, hidden_TKD=hidden_TKD)
        return hidden_TKD

    return [
        simulate_set(
            item,
            answers=given,
            max_new_tokens=limits.max_new_tokens,
            capture=capture,
            drafter=drafter,
            ends=ends,
            shape=shape,
            on_answer=show,
        )
        for item, given in zip(sets, answers, strict=True)
    ]


def _print(reports: Sequence[SetReport], *, described: str, model: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(escape(f"{described} for {model}: fp32, batch 1"))
    for report in reports:
        table = Table(title=escape(report.name), title_justify="left", show_header=False)
        for label, text in _rows(report):
            table.add_row(label, text)
        console.print(table)
    console.print(
        "τ is the mean number of tokens a step, the target's own included: over all steps; by request, over each one's mean"
    )


def _rows(report: SetReport) -> list[tuple[str, str]]:
    lossless = report.lossless
    slots = "  ".join(f"{slot}: {_share(value)}" for slot, value in enumerate(report.simulated.slot_acceptance, start=1))
    steps = "  ".join(f"{n}: {count}" for n, count in enumerate(report.simulated.histogram) if n)
    skipped = f", {report.skipped} skipped" if report.skipped else ""
    rows = [
        ("prompts", f"{report.prompts}{skipped}; {report.answer_tokens} answer tokens"),
        ("τ simulated", _taus(report.simulated)),
        ("τ decoded", _taus(report.decoded)),
        ("equal paths", f"{report.equal_paths} of {report.prompts} answers"),
        ("lossless", f"{lossless.equal} equal, {lossless.near_ties} near ties, {lossless.different} different"),
        ("drafts that stood, by slot", slots),
        ("steps by tokens produced", steps),
        ("tokens/s", _speed(report)),
    ]
    if report.sampled is not None:
        rows.insert(3, ("τ sampled", _taus(report.sampled)))
    if report.bf16_agreement is not None:
        rows.append(("bf16 agreement", f"{_share(report.bf16_agreement)} of the answer tokens"))
    return rows


def _taus(summary: AcceptanceSummary) -> str:
    if summary.tau_steps is None:
        return "no step"
    return f"{summary.tau_steps:.3f} over {summary.steps} steps, {summary.tau_requests:.3f} by request"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _speed(report: SetReport) -> str:
    plain, drafted = report.plain_tokens_per_second, report.drafted_tokens_per_second
    if plain is None or drafted is None:
        return "–"
    return f"{plain:.1f} alone, {drafted:.1f} with the drafter ({drafted / plain:.2f} x)"
