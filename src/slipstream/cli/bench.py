"""`slipstream bench`: measurements on random weights, the machine's own ceilings first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import PreflightError

if TYPE_CHECKING:
    from slipstream.launch.bench import Ceilings, DrafterBench, DrafterWork
    from slipstream.launch.bench.float8 import Float8Figures
    from slipstream.launch.bench.pipeline import PipelineBench
    from slipstream.launch.bench.predicted import PredictedMemory
    from slipstream.launch.bench.standing_plan import PipelineWork
    from slipstream.launch.bench.target import TargetFigures
    from slipstream.launch.bench.transport import TransportBench


class Kind(StrEnum):
    """What can be measured."""

    CEILINGS = "ceilings"
    DRAFTER = "drafter"
    PIPELINE = "pipeline"
    TARGET = "target"
    TRANSPORT = "transport"


class Graphs(StrEnum):
    """Whether a step or a pack is replayed: `placement.cuda_graphs` of a recipe."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class TargetType(StrEnum):
    """What a target computes in."""

    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"


def bench(
    kind: Annotated[
        Kind,
        typer.Argument(
            help="ceilings: matrix product and copy alone; drafter: a training step; target: a pack; "
            "pipeline: both in one process against each alone; transport: slots of 839 MB between two processes."
        ),
    ],
    shape: Annotated[str, typer.Option(help="Of the target: qwen3.6-27b, qwen3-8b or smollm2.")] = "qwen3.6-27b",
    documents: Annotated[int, typer.Option(help="Documents of a pack.")] = 2,
    document_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a document.", show_default="2048, in the pipeline mixed")
    ] = None,
    anchors: Annotated[int | None, typer.Option(help="Anchors of a pack.", show_default="1024, of the pipeline 512")] = None,
    packs: Annotated[int, typer.Option(help="Packs of a step.")] = 1,
    chunk_rows: Annotated[int, typer.Option(help="Rows of logits held at once.")] = 3328,
    steps: Annotated[int, typer.Option(help="Timed steps, or forwards of the target.")] = 12,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of the target's pack.", show_default="16384, of the pipeline 8192")
    ] = None,
    replays: Annotated[
        list[int] | None, typer.Option(help="Uses of a pack in the pipeline; may be given several times.", show_default="1")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Only so many layers of the target; else up to its last tap.")] = None,
    dtype: Annotated[TargetType, typer.Option(help="Of the target; float8 runs after bfloat16.")] = TargetType.BFLOAT16,
    graphs: Annotated[Graphs, typer.Option(help="CUDA graphs of the drafter's step, or of the target's pack.")] = Graphs.AUTO,
    sweep: Annotated[bool, typer.Option(help="Time the loss's products at several chunk sizes first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure the machine and the engine on random weights at true shapes. Needs a CUDA device; nothing is downloaded.

    Exits with 1 when after warm-up memory grew or something was compiled (transport: in the drafter's process alone), the CPU
    waited for the GPU (not looked for in transport), or transport refused a seal. Ceilings check nothing. What replays cost a
    recipe in acceptance length is measured by training: `slipstream bench replays RECIPE` (see its --help).
    """
    _require_gpu()
    from slipstream.launch.bench import SHAPES, DrafterWork
    from slipstream.launch.bench.standing_plan import PipelineWork

    _check(shape=shape, known=SHAPES, replays=replays or [1])
    show = _Quiet() if as_json else _Tables()
    ceilings, found = _measure_machine(show)
    failed = False
    if kind is Kind.DRAFTER:
        work = DrafterWork(documents, document_tokens or 2048, anchors or 1024, packs, chunk_rows, steps, graphs.value)
        result = _measure_drafter(shape=shape, work=work, sweep=sweep, ceilings=ceilings, show=show, found=found)
        failed = any(result.growth.values()) or any(result.calls.values())
    if kind is Kind.PIPELINE:
        both_work = PipelineWork(tokens or 8192, document_tokens, anchors or 512, chunk_rows=chunk_rows)
        both = _measure_pipeline(shape=shape, work=both_work, replays=replays or [1], layers=layers, show=show, found=found)
        failed = any(any(each.growth.values()) or each.synchronised != "never" for each in both.figures)
    if kind is Kind.TARGET:
        how = {"shape": shape, "pack_tokens": tokens or 16384, "layers": layers, "repeats": steps, "graphs": graphs.value}
        failed = _measure_target(how, dtype=dtype, ceilings=ceilings, show=show, found=found)
    if kind is Kind.TRANSPORT:
        moved = _measure_transport(show, found=found)
        failed = any(moved.growth.values()) or moved.seals_rejected > 0
    if as_json:
        typer.echo(json.dumps(found))
    raise typer.Exit(1 if failed else 0)


def _require_gpu() -> None:
    """Refuse a machine without one.

    Torch comes before the driver is asked: at exit, libraries go in the reverse order of their first use, and CUPTI, which
    torch loads and the traces use, must not be gone when the driver closes the traced context.
    """
    from slipstream.device.kind import device_kind, torch_cuda_version

    if torch_cuda_version() is not None:
        import torch  # noqa: F401
    device_kind("cuda")


def _check(*, shape: str, known: Iterable[str], replays: Sequence[int]) -> None:
    if shape not in known:
        raise PreflightError(key="--shape", value=shape, rule=f"is none of {', '.join(known)}")
    if min(replays) < 1:
        raise PreflightError(key="--replays", value=min(replays), rule="must be at least 1: a pack is trained on once or more")


def _measure_machine(show: _Quiet) -> tuple[Ceilings, dict[str, Any]]:
    from slipstream.device.gpus import visible_gpus
    from slipstream.launch.kernel_cache import cache_settings

    os.environ.update(cache_settings(environ=os.environ, gpu_name=visible_gpus()[0].name))
    import torch

    from slipstream.launch.bench import measure_ceilings

    device = torch.device("cuda", 0)
    ceilings = measure_ceilings(device=device)
    show.ceilings(ceilings)
    name = torch.cuda.get_device_name(device)
    return ceilings, {"device": name, "torch": torch.__version__, "ceilings": asdict(ceilings)}


def _measure_drafter(
    *, shape: str, work: DrafterWork, sweep: bool, ceilings: Ceilings, show: _Quiet, found: dict[str, Any]
) -> DrafterBench:
    import torch

    from slipstream.launch.bench import SHAPES, bench_drafter, sweep_chunks
    from slipstream.launch.bench.predicted import predict_drafter

    device = torch.device("cuda", 0)
    if sweep:
        chunks = (1664, 2048, 3072, 3328, 3840, 4096)
        found["sweep"] = sweep_chunks(
            shape=SHAPES[shape], rows=work.anchors * 15, chunks=chunks, device=device, report=show.line
        )
    result = bench_drafter(shape=SHAPES[shape], work=work, device=device, report=show.line)
    found |= {"shape": shape, "work": asdict(work), "drafter": asdict(result)}
    found["ratio"] = result.tflops / ceilings.matmul_tflops
    show.drafter(result, ceilings=ceilings)
    memory = predict_drafter(shape=SHAPES[shape], work=work, replayed=result.graphs.used)
    _compare(memory, measured_gib=result.peak_gib, show=show, found=found)
    return result


def _measure_pipeline(
    *, shape: str, work: PipelineWork, replays: Sequence[int], layers: int | None, show: _Quiet, found: dict[str, Any]
) -> PipelineBench:
    from slipstream.launch.bench import SHAPES
    from slipstream.launch.bench.pipeline import bench_pipeline
    from slipstream.launch.bench.target import TARGETS

    both = bench_pipeline(
        shape=SHAPES[shape], config=TARGETS[shape](), work=work, replays=replays, layers=layers, say=show.line
    )
    found |= {"shape": shape, "pipeline": asdict(both)}
    show.pipeline(both)
    return both


def _measure_transport(show: _Quiet, *, found: dict[str, Any]) -> TransportBench:
    from slipstream.launch.bench.transport import TransportWork, bench_transport

    moved = bench_transport(TransportWork(), report=show.line)
    found |= {"transport": asdict(moved), "ratio": moved.ratio}
    show.transport(moved)
    return moved


def _measure_target(how: dict[str, Any], *, dtype: TargetType, ceilings: Ceilings, show: _Quiet, found: dict[str, Any]) -> bool:
    """Measure, show, and say whether something grew or waited after warm-up."""
    runs: list[TargetFigures] = []
    if dtype is TargetType.FLOAT8:
        from slipstream.launch.bench.float8 import measure_float8

        both = measure_float8(**how, ceilings=ceilings, say=show.line)
        found |= {"float8": asdict(both), "ratio": both.float8.ratio}
        show.float8(both, ceilings=ceilings)
        runs += [both.bfloat16, both.float8]
    else:
        from slipstream.launch.bench.predicted import predict_target
        from slipstream.launch.bench.target import TARGETS, measure_target, random_info

        runs.append(measure_target(**how, ceilings=ceilings, say=show.line))
        found |= {"target": asdict(runs[0]), "ratio": runs[0].ratio}
        show.target(runs[0], ceilings=ceilings)
        run, info = runs[0], random_info(TARGETS[runs[0].shape]())
        memory = predict_target(info=info, taps=run.taps, pack_tokens=run.pack_tokens, replayed=run.graphs.used)
        _compare(memory, measured_gib=run.peak_gib, show=show, found=found)
    return any(any(run.growth.values()) or any(run.waiting_calls.values()) or run.synchronised != "never" for run in runs)


def _compare(memory: PredictedMemory, *, measured_gib: float, show: _Quiet, found: dict[str, Any]) -> None:
    """The planned memory beside the measured, and what the driver takes besides, which the plan can only guess."""
    from slipstream.device.allocated import allocated_memory

    taken = allocated_memory()
    outside = None if taken is None else taken.outside_bytes
    found["memory"] = asdict(memory) | {"measured_gib": measured_gib, "outside_bytes": outside}
    show.line(f"memory: {memory.beside(measured_gib)}; {memory.told()}")
    show.line(f"beside torch's allocator: {(outside or 0) / 2**20:.0f} MiB")


class _Quiet:
    """Shows nothing until the end."""

    def line(self, text: str) -> None:
        """Progress."""

    def ceilings(self, found: Ceilings) -> None:
        """The machine's."""

    def drafter(self, found: DrafterBench, *, ceilings: Ceilings) -> None:
        """A step's."""

    def target(self, found: TargetFigures, *, ceilings: Ceilings) -> None:
        """A pack's."""

    def float8(self, found: Float8Figures, *, ceilings: Ceilings) -> None:
        """A pack's, in both types."""

    def pipeline(self, found: PipelineBench) -> None:
        """Both stages'."""

    def transport(self, found: TransportBench) -> None:
        """The slots'."""


class _Tables(_Quiet):
    """Shows each figure once it is known."""

    def line(self, text: str) -> None:
        """Progress."""
        typer.echo(text)

    def ceilings(self, found: Ceilings) -> None:
        """The machine's."""
        typer.echo(
            f"ceilings: bf16 8192^3 {found.matmul_tflops:.0f} TFLOP/s, {found.sustained_tflops:.0f} over two seconds; "
            f"device copy {found.copy_gb_per_second:.0f} GB/s"
        )

    def drafter(self, found: DrafterBench, *, ceilings: Ceilings) -> None:
        """A step's."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title="drafter step", title_justify="left", show_header=False)
        for label, text in _rows(found, ceilings=ceilings):
            table.add_row(label, text)
        Console(highlight=False, width=120).print(table)

    def target(self, found: TargetFigures, *, ceilings: Ceilings) -> None:
        """A pack's."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"target, {found.shape}", title_justify="left", show_header=False)
        for label, text in _target_rows(found, ceilings=ceilings):
            table.add_row(label, text)
        Console(highlight=False, width=120).print(table)

    def float8(self, found: Float8Figures, *, ceilings: Ceilings) -> None:
        """A pack's, in both types."""
        self.target(found.bfloat16, ceilings=ceilings)
        self.target(found.float8, ceilings=ceilings)
        rounding = ", ".join(f"{tap}: {error:.4f}" for tap, error in zip(found.float8.taps, found.tap_errors, strict=True))
        typer.echo(
            f"float8 over bfloat16: {found.speedup:.3f} times as fast, {found.float8.tokens_per_second:.0f} tokens/s; "
            f"e4m3 8192^3 {found.product_tflops:.0f} TFLOP/s\nerror of a token on taps, random weights: {rounding}"
        )

    def pipeline(self, found: PipelineBench) -> None:
        """Both stages'."""
        from rich.console import Console
        from rich.table import Table

        title = f"pipeline, {found.layers} layers, {found.pack_tokens} tokens, {found.anchors} anchors"
        table = Table("", *(f"{each.replays} uses of a pack" for each in found.figures), title=title, title_justify="left")
        for label, *texts in _pipeline_rows(found):
            table.add_row(label, *texts)
        Console(highlight=False, width=120).print(table)

    def transport(self, found: TransportBench) -> None:
        """The slots'."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title="transport", title_justify="left", show_header=False)
        for label, text in _transport_rows(found):
            table.add_row(label, text)
        Console(highlight=False, width=120).print(table)


def _rows(found: DrafterBench, *, ceilings: Ceilings) -> list[tuple[str, str]]:
    grown = ", ".join(f"{name} {value}" for name, value in found.growth.items())
    calls = ", ".join(f"{name} {value}" for name, value in found.calls.items()) or "none"
    return [
        (
            "ms a step",
            f"{found.milliseconds:.1f} (median); wall {found.wall_milliseconds:.1f}, launching {found.launch_milliseconds:.1f}",
        ),
        ("phases, ms", ", ".join(f"{name} {value:.1f}" for name, value in found.phases.items())),
        ("useful TFLOP", f"{found.useful_tflop:.1f}, {found.tflops:.0f} TFLOP/s"),
        (
            "of the ceiling",
            f"{found.tflops / ceilings.matmul_tflops:.3f}, {found.tflops / ceilings.sustained_tflops:.3f} of the sustained",
        ),
        ("memory, GiB", f"peak {found.peak_gib:.2f}, reserved {found.reserved_gib:.2f}"),
        ("CUDA graphs", found.graphs.told()),
        ("after warm-up", f"{grown}; synchronisations 0 (forbidden)"),
        ("waiting calls in a trace", calls),
        ("warm-up", f"{found.warmup_seconds:.1f} s; loss {found.loss:.4f}; {found.parameters} parameters"),
        *((f"  {name}", f"{spent:.2f} ms") for name, spent in found.kernels.items()),
    ]


def _target_rows(found: TargetFigures, *, ceilings: Ceilings) -> list[tuple[str, str]]:
    grown = ", ".join(f"{name} {value}" for name, value in found.growth.items())
    return [
        ("layers", f"{found.layers} ({found.layer_code}), taps {', '.join(map(str, found.taps))}"),
        (
            "ms a pack",
            f"{found.milliseconds:.1f} (median), {found.fastest_milliseconds:.1f} (fastest), "
            f"launching {found.launch_milliseconds:.1f}",
        ),
        ("CUDA graphs", found.graphs.told()),
        ("tokens", f"{found.real_tokens:.0f} of {found.pack_tokens}; {found.tokens_per_second:.0f} a second"),
        ("useful TFLOP/s", f"{found.useful_tflops:.0f}, {found.matrix_parameters / 1e9:.2f} B parameters"),
        (
            "of the ceiling",
            f"{found.ratio:.3f}, {found.useful_tflops / ceilings.sustained_tflops:.3f} of the sustained",
        ),
        ("memory, GiB", f"peak {found.peak_gib:.2f}"),
        ("after warm-up", f"{grown}; waits {found.synchronised}"),
        ("warm-up", f"built {found.build_seconds:.1f} s, first forward {found.first_forward_seconds:.1f} s"),
        ("waiting calls in a trace", ", ".join(f"{name} {count}" for name, count in found.waiting_calls.items()) or "none"),
        *((f"  {name}", f"{spent:.2f} ms") for name, spent in found.kernels.items() if spent),
    ]


def _pipeline_rows(found: PipelineBench) -> Iterator[tuple[str, ...]]:
    each = found.figures
    yield "target alone, ms a pack", *(f"{one.target_milliseconds:.1f}" for one in each)
    yield "drafter alone, ms a use", *(f"{one.drafter_milliseconds:.1f}" for one in each)
    yield "together, ms a pack", *(f"{one.together_milliseconds:.1f}" for one in each)
    yield "of what both alone would take", *(f"{one.ratio:.3f}" for one in each)
    yield "trained tokens a second", *(f"{one.trained_tokens_per_second:.0f}" for one in each)
    yield "unique tokens a second", *(f"{one.unique_tokens_per_second:.0f}" for one in each)
    yield "gain over one use, at most", *(f"{one.gain:.3f}, {one.gain_bound:.3f}" for one in each)
    yield "memory, GiB", *(f"peak {one.peak_gib:.2f}" for one in each)
    yield "grown after warm-up", *(", ".join(f"{name} {value}" for name, value in one.growth.items()) for one in each)
    yield "waits; skipped steps", *(f"{one.synchronised}; {one.skipped_steps}" for one in each)


def _transport_rows(found: TransportBench) -> list[tuple[str, str]]:
    return [
        ("GB/s, ceilings", f"out {found.out:.1f}, in {found.into:.1f}, both at once {found.both:.1f}"),
        ("GB/s, travelled", f"{found.travelled:.1f}, slots of {found.slot_bytes / 1e6:.0f} MB, seals on, two processes"),
        ("of the ceiling", f"{found.ratio:.3f}"),
        ("a target beside it", f"{found.slowdown:+.2%} of its time"),
        ("seals refused", str(found.seals_rejected)),
        ("after warm-up", ", ".join(f"{name} {value}" for name, value in found.growth.items())),
        ("page-locking", f"{found.lock_seconds:.1f} s"),
    ]
