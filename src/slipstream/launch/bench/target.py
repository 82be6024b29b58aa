"""How fast a target runs here: packed rows of mixed lengths through its layers up to the last tap, hooks and slots included.

Weights are random, at the true shape, made on the device: nothing is downloaded. Useful work is counted by one formula,
`useful_flops`, and divided by a matrix product measured in the same run.

Shape letters: T tokens of a pack · K tapped layers · D hidden size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, LlamaConfig, Qwen3_5TextConfig, Qwen3Config

from slipstream.config import TargetInfo
from slipstream.config.target_info import GATED, delta_net_of, spread_taps
from slipstream.device.allocated import allocated_memory, forget_peaks
from slipstream.device.graph_choice import GraphReport, Wish, time_steps
from slipstream.device.recorder import CudaRecorder
from slipstream.errors import UsageError
from slipstream.launch.bench.ceilings import Ceilings, median_ms
from slipstream.launch.bench.counters import Growth, profile_kernels
from slipstream.launch.recording import frame_sizes
from slipstream.plan.flops import target_flops
from slipstream.records import Pack
from slipstream.target.graphs import consider_recording
from slipstream.target.huggingface import HuggingFaceTarget
from slipstream.target.isolation import pack_documents
from slipstream.target.kernels import cuda_kernels
from slipstream.target.layouts import Packing
from slipstream.target.loading import truncate_config

DEVICE = "cuda"
NUM_TAPS = 5
WARM_UPS, REPEATS = 3, 9

Say = Callable[[str], None]


def qwen36_27b() -> Any:
    """The language model of Qwen3.6-27B: 24.35 B parameters in 64 layers, three gated delta nets to one attention."""
    return Qwen3_5TextConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=248320,
        max_position_embeddings=262144,
    )


def qwen3_8b() -> Any:
    """Qwen3-8B: 6.95 B parameters in 36 layers."""
    return Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
    )


def smollm2() -> Any:
    """SmolLM2-135M: 30 layers so small that launching their kernels takes longer than running them."""
    return LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
    )


TARGETS: Mapping[str, Callable[[], Any]] = {"qwen3.6-27b": qwen36_27b, "qwen3-8b": qwen3_8b, "smollm2": smollm2}
"""By the name that `slipstream bench --shape` takes: transformers' config of the whole target."""


@dataclass(frozen=True, slots=True)
class TargetFigures:
    """What a run measured. `milliseconds` is a median; `ratio` is `useful_tflops` over the machine's single matrix product.

    `pack_tokens` T; `real_tokens` a pack without padding (their mean); `launch_milliseconds` to launch a pack, alone;
    `layer_code` whose decoder layers ran; `graphs` what was decided on replaying them; `synchronised` "never", or what made the
    CPU wait in a capture, `waiting_calls` the same counted in a trace; `growth` memory and compilations after warm-up;
    `kernels` milliseconds by kind, then of the longest.
    """

    shape: str
    layers: int
    taps: tuple[int, ...]
    matrix_parameters: int
    pack_tokens: int
    real_tokens: float
    milliseconds: float
    fastest_milliseconds: float
    launch_milliseconds: float
    tokens_per_second: float
    useful_tflops: float
    ratio: float
    peak_gib: float
    build_seconds: float
    first_forward_seconds: float
    layer_code: str
    graphs: GraphReport
    synchronised: str
    growth: Mapping[str, int]
    waiting_calls: Mapping[str, int]
    kernels: Mapping[str, float]


@dataclass(slots=True)
class Subject:
    """A target to be measured, the packs it runs on in turn, and the slot they are written to."""

    shape: str
    config: Any
    taps: tuple[int, ...]
    model: Any
    target: HuggingFaceTarget
    parameters: int
    packs: tuple[Pack, ...]
    slot_TKD: torch.Tensor
    build_seconds: float


def measure_target(
    *,
    shape: str,
    pack_tokens: int,
    ceilings: Ceilings,
    layers: int | None = None,
    repeats: int = REPEATS,
    graphs: Wish = "auto",
    say: Say,
) -> TargetFigures:
    """Measure one shape at one pack size on the current CUDA device. `layers`: only so many, the taps spread over them.

    `graphs` as `placement.cuda_graphs` of a recipe.
    """
    subject = build_subject(shape=shape, pack_tokens=pack_tokens, layers=layers, say=say)
    return measure_subject(subject, ceilings=ceilings, repeats=repeats, graphs=graphs, say=say)


def build_subject(*, shape: str, pack_tokens: int, layers: int | None, say: Say) -> Subject:
    """Make a target of random weights in bfloat16. Raises `UsageError` for a shape that is not known."""
    if shape not in TARGETS:
        raise UsageError(key="--shape", value=shape, rule=f"must be one of {', '.join(TARGETS)}")
    config = TARGETS[shape]()
    taps = spread_taps(num_layers=config.num_hidden_layers if layers is None else layers + 2, num_taps=NUM_TAPS)
    torch.cuda.empty_cache()
    with Clock() as build:
        model, parameters = _random_model(config, taps=taps)
        target = wrap_model(model, taps=taps)
    say(f"{taps[-1] + 1} layers, {parameters / 1e9:.2f} B matrix parameters, built in {build.seconds:.0f} s")
    return Subject(
        shape=shape,
        config=config,
        taps=taps,
        model=model,
        target=target,
        parameters=parameters,
        packs=tuple(mixed_pack(pack_tokens, vocab_size=config.vocab_size, seed=seed) for seed in (1, 2)),
        slot_TKD=torch.empty(pack_tokens, len(taps), config.hidden_size, dtype=torch.bfloat16, device=DEVICE),
        build_seconds=build.seconds,
    )


def measure_subject(subject: Subject, *, ceilings: Ceilings, repeats: int, graphs: Wish, say: Say) -> TargetFigures:
    """Time a target's captures, recorded or not, then trace one, then forbid one to wait."""
    config, packs, taps, target = subject.config, subject.packs, subject.taps, subject.target
    assert target.engine is not None
    works = [partial(target.capture, pack, hidden_TKD=subject.slot_TKD) for pack in packs]
    with Clock() as first:
        works[0]()
    say(f"first forward (kernels compiled and tuned): {first.seconds:.0f} s")
    decided = _consider_recording(subject, wish=graphs)
    say(f"CUDA graphs are {decided.told()}")
    timed = _time(works, repeats=repeats)
    assert bool(torch.isfinite(subject.slot_TKD).all())
    count = partial(useful_flops, config, parameters=subject.parameters, layers=taps[-1] + 1)
    flops = statistics.mean(count(pack=pack) for pack in packs)
    real = statistics.mean(pack.num_tokens for pack in packs)
    tflops, speed = flops / timed.median / 1e9, real / timed.median * 1e3
    ratio = tflops / ceilings.matmul_tflops
    say(f"{timed.median:.1f} ms a pack: {speed:.0f} tokens/s, {tflops:.0f} TFLOP/s, ratio {ratio:.3f} ({target.engine.layers})")
    kernels, calls = profile_kernels(works[0])
    return TargetFigures(
        shape=subject.shape,
        layers=taps[-1] + 1,
        taps=taps,
        matrix_parameters=subject.parameters,
        pack_tokens=packs[0].capacity_tokens,
        real_tokens=real,
        milliseconds=timed.median,
        fastest_milliseconds=timed.fastest,
        launch_milliseconds=timed.launch,
        tokens_per_second=speed,
        useful_tflops=tflops,
        ratio=ratio,
        peak_gib=timed.peak_gib,
        build_seconds=subject.build_seconds,
        first_forward_seconds=first.seconds,
        layer_code=target.engine.layers,
        graphs=decided,
        synchronised=synchronises(works[0]),
        growth=timed.growth,
        waiting_calls=calls,
        kernels=kernels,
    )


@dataclass(frozen=True, slots=True)
class _Timed:
    median: float
    fastest: float
    launch: float
    peak_gib: float
    growth: Mapping[str, int]


def _time(works: Sequence[Callable[[], object]], *, repeats: int) -> _Timed:
    """Time pieces of work in turn, after some have warmed up; then what one takes to be launched."""
    for turn in range(WARM_UPS):
        works[turn % len(works)]()
    torch.cuda.synchronize()
    forget_peaks()
    with Growth() as grown:
        times = [median_ms(works[turn % len(works)], repeats=1, warmup=0) for turn in range(repeats)]
        alone = time_steps(lambda work: work(), prepare=lambda: works[0], finish=torch.cuda.synchronize)
        growth = grown.so_far()
    taken = allocated_memory()
    assert taken is not None
    return _Timed(
        median=statistics.median(times),
        fastest=min(times),
        launch=alone.launch_seconds * 1e3,
        peak_gib=taken.peak_bytes / 2**30,
        growth=growth,
    )


def _consider_recording(subject: Subject, *, wish: Wish) -> GraphReport:
    """As a run whose plan has just these packs would."""
    packs = subject.packs
    sizes = frame_sizes(
        num_documents=np.array([pack.num_documents for pack in packs]),
        num_tokens=np.array([pack.num_tokens for pack in packs]),
        longest_document=max(int(np.diff(pack.starts).max()) for pack in packs),
        pack_tokens=packs[0].capacity_tokens,
    )
    subject.target.fill_frames(sizes)
    return consider_recording(
        subject.target,
        wish=wish,
        sizes=sizes,
        pack_tokens=packs[0].capacity_tokens,
        slot_dtype=subject.slot_TKD.dtype,
        recorder=CudaRecorder(subject.slot_TKD.device, stage="target"),
        finish=torch.cuda.synchronize,
    )


def build_target(config: Any, *, taps: Sequence[int]) -> tuple[HuggingFaceTarget, int]:
    """A target of random weights on the device, cut after the last tap, and its matrix parameters."""
    model, parameters = _random_model(config, taps=taps)
    return wrap_model(model, taps=taps), parameters


def _random_model(config: Any, *, taps: Sequence[int]) -> tuple[Any, int]:
    truncate_config(config, num_layers=taps[-1] + 1)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModel.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    model.norm = nn.Identity()
    return model, sum(weight.numel() for name, weight in model.layers.named_parameters() if weight.ndim == 2)


def wrap_model(model: Any, *, taps: Sequence[int], float8: bool = False) -> HuggingFaceTarget:
    """The runner of a model on the device; its layers are transformers' own or, in float8, those of `quantise_decoder`."""
    info = random_info(model.config)
    target = HuggingFaceTarget(
        model=model,
        info=info,
        tap_layers=taps,
        last_hidden=False,
        fingerprint="random",
        kernels=cuda_kernels(hybrid=info.is_hybrid, float8=float8),
    )
    target.packing = Packing.PACKED
    torch.cuda.empty_cache()
    return target


def random_info(config: Any) -> TargetInfo:
    """What a folder's config would have said of a target that lies in none."""
    return TargetInfo(
        folder=Path("random"),
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=False,
        layer_types=tuple(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers),
        sliding_window=None,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
        delta_net=delta_net_of(config.to_dict()),
        attention_gate=config.model_type.startswith(GATED),
    )


def mixed_pack(pack_tokens: int, *, vocab_size: int, seed: int) -> Pack:
    """Documents of lognormal lengths (median 900 tokens, 64 to a quarter of the pack), filled to about 0.99."""
    generator = np.random.default_rng(seed)
    left, documents = pack_tokens - pack_tokens // 128, []
    while left >= 64:
        length = int(np.clip(generator.lognormal(np.log(900), 0.8), 64, min(left, pack_tokens // 4)))
        documents.append(generator.integers(0, vocab_size, size=length).astype(np.int32))
        left -= length
    return pack_documents(documents, capacity_tokens=pack_tokens)


def useful_flops(config: Any, *, parameters: int, pack: Pack, layers: int) -> float:
    """`target_flops` of a pack through that many layers of a transformers config."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    head_size = int(config.head_dim or config.hidden_size // config.num_attention_heads)
    return target_flops(
        matrix_parameters=parameters,
        tokens=pack.num_tokens,
        attention_layers=sum(kind != "linear_attention" for kind in kinds[:layers]),
        attention_width=config.num_attention_heads * head_size,
        squared_tokens=float(np.square(np.diff(pack.starts).astype(np.float64)).sum()),
    )


def synchronises(work: Callable[[], object]) -> str:
    """What makes the CPU wait for the device in a piece of work, in words, or "never"."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "never"


class Clock:
    """Seconds between entering and leaving, the device's work included."""

    seconds: float

    def __enter__(self) -> Clock:
        torch.cuda.synchronize()
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()
        return self

    def __exit__(self, *_: object) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        self.seconds = self._event.elapsed_time(end) / 1e3
