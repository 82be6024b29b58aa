"""`slipstream regenerate`: the target's own answers to conversations, from this process or a server, resumable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import ServerFailed, UsageError

if TYPE_CHECKING:
    from slipstream.config import TargetInfo
    from slipstream.corpus.chat import ChatEncoder
    from slipstream.launch.regeneration import Counts
    from slipstream.target.answer_file import Prompt

CONCURRENCY, TIMEOUT, RETRIES, BATCH_SIZE, DTYPE, DEVICE = 64, 1200.0, 8, 32, "bfloat16", "auto"
"""Defaults of options that belong to one way of answering, which are refused with the other."""

Arguments = Annotated[
    list[str] | None,
    typer.Option("--template-arg", metavar="KEY=VALUE", help="Argument of the chat template, as enable_thinking=false."),
]


def regenerate(
    sources: Annotated[list[str], typer.Argument(metavar="SRC…", help="Conversations, as `slipstream prepare` reads them.")],
    target: Annotated[str, typer.Option("--target", help="Target model: local folder, or hub id in the local cache.")],
    out: Annotated[Path, typer.Option("--out", help="JSON lines of answers; what is there already is kept and continued.")],
    local: Annotated[bool, typer.Option("--local", help="Answer in this process, with transformers, greedily.")] = False,
    server: Annotated[str | None, typer.Option("--server", help="Let SGLang or vLLM answer: http://HOST:PORT.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")] = 1024,
    template_arg: Arguments = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many conversations, the first ones.")] = None,
    served_model: Annotated[str | None, typer.Option(help="Server: the target's name there; --target by default.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Server: environment variable that holds its key.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help=f"Server: requests at once; {CONCURRENCY}.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Server: 0 by default, the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Server, above temperature 0.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Server, above temperature 0.")] = None,
    seed: Annotated[int | None, typer.Option(help="Server, above temperature 0.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0.1, help=f"Server: seconds for an answer; {TIMEOUT:.0f}.")] = None,
    retries: Annotated[int | None, typer.Option(min=0, help=f"Server: tries after the first; {RETRIES}.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help=f"Local: prompts at once; {BATCH_SIZE}.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Local: bfloat16 or float32; {DTYPE}.")] = None,
    device: Annotated[str | None, typer.Option(help=f'Local: "cpu", "cuda", "cuda:1" …; {DEVICE}.')] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON, no bar.")] = False,
) -> None:
    """Let the target answer conversations itself: every assistant turn, in order, after the answers that it gave before.

    Drafters are trained on what the target would say. Each answer is a line. One that the limit cuts is kept, marked `"finish":
    "length"`, and is its conversation's last. An interrupted call continues when it is made again with the same options.
    """
    from slipstream.cli.prepare import template_argument

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    line = {"concurrency": concurrency, "timeout": timeout, "retries": retries}
    here = {"batch_size": batch_size, "dtype": dtype, "device": device}
    there = {**sampling, **line, "served_model": served_model, "api_key_env": api_key_env}
    _check(server=server, local=local, here=here, there=there)
    job = _Job(
        sources=sources,
        target=target,
        out=out,
        max_new_tokens=max_new_tokens,
        template_arguments=dict(template_argument(text) for text in template_arg or ()),
        limit=limit,
        quiet=as_json,
    )
    counts = _by_server(job, url=server, given=there) if server is not None else _here(job, given=here)
    _print(counts, job=job)
    if counts.unanswered:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is asked for, whoever answers."""

    sources: list[str]
    target: str
    out: Path
    max_new_tokens: int
    template_arguments: Mapping[str, Any]
    limit: int | None
    quiet: bool


def _check(*, server: str | None, local: bool, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    if local == (server is not None):
        rule = "cannot both answer" if local else "is needed: who is to answer?"
        raise UsageError(key="--local or --server", value=server, rule=rule, hint="--local, or --server http://HOST:PORT")
    others, mode = (there, "--server") if local else (here, "--local")
    for name, value in others.items():
        if value is not None:
            raise UsageError(key=_option(name), value=value, rule=f"belongs to {mode}", hint="leave it out")
    if here["dtype"] not in (None, "bfloat16", "float32"):
        raise UsageError(key="--dtype", value=here["dtype"], rule="must be bfloat16 or float32")
    for name in ("top_p", "top_k", "seed"):
        if there[name] is not None and not there["temperature"]:
            rule = "has no effect at temperature 0, where the likeliest token is taken"
            raise UsageError(key=_option(name), value=there[name], rule=rule, hint="give --temperature")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _here(job: _Job, *, given: Mapping[str, Any]) -> Counts:
    from slipstream.cli.progress import Bars
    from slipstream.config import read_target_info
    from slipstream.launch.regeneration import Regeneration, answer_here, option_record
    from slipstream.target.answer_file import AnswerFile
    from slipstream.target.fingerprint import fingerprint_target

    info = read_target_info(job.target)
    encoder = _encoder(job, info)
    dtype = given["dtype"] or DTYPE
    options = {"dtype": dtype, "max_new_tokens": job.max_new_tokens, "stop_token_ids": encoder.stop_token_ids}
    file = AnswerFile(
        job.out,
        target_fingerprint=fingerprint_target(info),
        options=option_record(options, template_arguments=job.template_arguments),
    )
    run = Regeneration(encoder=encoder, file=file, room=info.max_position_embeddings - job.max_new_tokens)
    talks = run.open(job.sources, limit=job.limit)
    model: list[Any] = []

    def answer(prompts: Sequence[Prompt], report: Callable[[int, int], None]) -> None:
        from slipstream.target.answers import Greedy, answer_resumably
        from slipstream.target.huggingface import load_full

        if not model:
            model.append(load_full(info=info, dtype=dtype, device=_device(given["device"] or DEVICE)))
        greedy = Greedy(
            max_new_tokens=job.max_new_tokens,
            stop_token_ids=encoder.stop_token_ids,
            batch_size=given["batch_size"] or BATCH_SIZE,
        )
        answer_resumably(model=model[0], prompts=prompts, file=file, decode=_decoder(info), greedy=greedy, on_progress=report)

    with Bars(quiet=job.quiet) as bars:
        answer_here(run, talks, answer=answer, on_progress=lambda done, total: bars("answers", done, total))
    run.check_answers(job.sources, talks=talks)
    return run.finish(talks)


def _by_server(job: _Job, *, url: str, given: Mapping[str, Any]) -> Counts:
    from slipstream.config import read_target_info
    from slipstream.launch.served_answers import run_until_signal
    from slipstream.target.served import Server

    key = _api_key(given["api_key_env"])
    info = read_target_info(job.target)
    encoder = _encoder(job, info)

    async def run() -> Counts:
        async with Server(
            url,
            api_key=key,
            timeout_seconds=given["timeout"] or TIMEOUT,
            retries=RETRIES if given["retries"] is None else given["retries"],
            concurrency=given["concurrency"] or CONCURRENCY,
        ) as server:
            return await _ask(job, server, info=info, encoder=encoder, given=given)

    try:
        return run_until_signal(run())
    except ServerFailed as failed:
        raise ServerFailed(f"{failed}; what was answered is in {job.out}, and the same call goes on from there") from failed


async def _ask(job: _Job, server: Any, *, info: TargetInfo, encoder: ChatEncoder, given: Mapping[str, Any]) -> Counts:
    from slipstream.cli.progress import Bars
    from slipstream.launch.regeneration import Regeneration, option_record, served_fingerprint
    from slipstream.launch.served_answers import answer_by_server
    from slipstream.target.answer_file import AnswerFile
    from slipstream.target.served import Request

    named = given["served_model"]
    names = (named,) if named else (job.target, str(info.folder), str(info.folder.resolve()))
    model = await server.find_model(*names, key="--served-model" if named else "--target")
    drawing: dict[str, Any] = {
        "temperature": given["temperature"] or 0.0,
        "top_p": 1.0 if given["top_p"] is None else given["top_p"],
        "top_k": given["top_k"] or -1,
        "seed": given["seed"],
    }
    limits: dict[str, Any] = {"max_new_tokens": job.max_new_tokens, "stop_token_ids": encoder.stop_token_ids}
    options = option_record({"served_model": model.name, **limits, **drawing}, template_arguments=job.template_arguments)
    file = AnswerFile(job.out, target_fingerprint=served_fingerprint(info), options=options)
    longest = min(info.max_position_embeddings, model.longest or info.max_position_embeddings)
    run = Regeneration(encoder=encoder, file=file, room=longest - job.max_new_tokens)
    talks = run.open(job.sources, limit=job.limit)
    with Bars(quiet=job.quiet) as bars:
        await answer_by_server(
            run,
            talks,
            server=server,
            request=Request(model=model.name, template_arguments=job.template_arguments, **limits, **drawing),
            concurrency=given["concurrency"] or CONCURRENCY,
            decode=_decoder(info),
            on_progress=lambda done, total: bars("answers", done, total),
        )
    run.check_answers(job.sources, talks=talks)
    return run.finish(talks)


def _encoder(job: _Job, info: TargetInfo) -> ChatEncoder:
    from slipstream.corpus.chat import ChatEncoder

    return ChatEncoder(info.folder, template_arguments=job.template_arguments)


def _decoder(info: TargetInfo) -> Callable[[Sequence[int]], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(info.folder / "tokenizer.json"))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UsageError(key="--api-key-env", value=variable, rule="is not set in the environment", hint=f"export {variable}=…")
    return os.environ[variable]


def _device(asked: str) -> str:
    import torch

    available = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if available else "cpu"
    if asked.startswith("cuda") and not available:
        raise UsageError(key="--device", value=asked, rule="no CUDA device is available", hint="use cpu")
    return asked


def _print(counts: Counts, *, job: _Job) -> None:
    if job.quiet:
        typer.echo(json.dumps({**asdict(counts), "out": str(job.out)}))
        return
    said = f"{counts.answered} answered, {counts.already_answered} already there, {counts.cut} cut at the limit"
    typer.echo(f"{said}; in {job.out}")
    if counts.duplicates:
        typer.echo(f"{counts.duplicates} prompts came more than once and are answered once")
    if counts.from_text:
        typer.echo(
            f"{counts.from_text} answers came as text, without token ids: their tokens are what the tokenizer makes of it"
        )
    for reason, number in counts.refused.items():
        typer.echo(f"refused: {number} {reason}")
    if counts.unanswered:
        typer.echo(f"unanswered: {counts.unanswered} conversations that the server failed on; the same call asks again")
    arguments = "".join(f" --template-arg {key}={json.dumps(value)}" for key, value in job.template_arguments.items())
    typer.echo(f"next: slipstream prepare {job.out} --target {job.target}{arguments} --out DIR")
