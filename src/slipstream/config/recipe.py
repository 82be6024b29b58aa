"""The recipe: every key of a run, its default and its sentence. Frozen; unknown keys are refused. No torch in here."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from slipstream.errors import RecipeError

LayerType = Literal["full", "sliding"]


class Section(BaseModel):
    """A part of the recipe: frozen, unknown keys refused, values never coerced from another type in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class TargetSection(Section):
    """The frozen language model whose hidden states are captured."""

    model: str = Field(min_length=1)
    """Local folder (config.json, tokenizer.json, *.safetensors) or hub id already in the local Hugging Face cache."""
    weights: Literal["saved", "random"] = "saved"
    """"random" makes weights up and needs no weight file: for rehearsing a placement; the drafter is worthless."""
    dtype: Literal["bfloat16", "float8", "float32"] = "bfloat16"
    """Compute and storage type of the target; "float8" rounds its large matrices and what they multiply (a GPU of compute
    capability 8.9 or more), its hidden states are bfloat16; float32 is for equality claims and tests."""
    tap_layers: Literal["spread"] | tuple[int, ...] = "spread"
    """Layers whose outputs are captured, 0-based, ascending, never the last; "spread" takes `num_taps` evenly, as DFlash."""
    num_taps: int = Field(default=5, ge=1)
    """How many layers "spread" takes."""
    packing: Literal["auto", "packed", "padded", "alone"] = "auto"
    """How documents share a forward pass; "auto" packs them in one row where they provably do not see each other, else pads."""

    @property
    def hidden_dtype(self) -> Literal["bfloat16", "float32"]:
        """Type of the hidden states that the target gives, and of its own answers to validation prompts."""
        return "float32" if self.dtype == "float32" else "bfloat16"


class CorpusSection(Section):
    """The prepared conversations to train on."""

    path: str = Field(min_length=1)
    """Folder that `slipstream prepare` wrote, for the same tokenizer and chat template as the target's."""


class PlanSection(Section):
    """Which document goes where, and when: fixed before any forward pass."""

    pack_tokens: int = Field(default=8192, ge=128)
    """Context tokens per pack (T), a multiple of 128."""
    pack_anchors: int = Field(default=2048, ge=1)
    """Anchor blocks per use of a pack (N), shared out among its documents; pack_anchors x block_size is a multiple of 128."""
    max_anchors_per_document: int = Field(default=512, ge=1)
    """No document gets more anchors than this in one use."""
    packs_per_step: int = Field(default=8, ge=1)
    """Packs per optimizer step over all drafter ranks (columns); a multiple of the number of drafter ranks."""
    epochs: int = Field(default=6, ge=1)
    """Times the corpus is packed anew and run through the target."""
    max_steps: int | None = Field(default=None, ge=1)
    """Cut the run to at most so many packs' worth of optimizer steps; none trains all epochs."""
    replays: int = Field(default=1, ge=1, le=16)
    """Times a pack's hidden states are trained on, with fresh anchors each time; the target runs once."""
    replay_distance: int = Field(default=50, ge=1)
    """Steps between two uses of a pack; more keeps more packs in memory. Rounded up to a distance at which uses do not collide
    (1 modulo `replays`, twice that for even ones); refused where acceptance length is known to suffer (`plan/replays.py`)."""
    allow_lossy_replays: bool = False
    """Accept a `replay_distance` that the plan would refuse, for measuring what it costs: `slipstream bench replays`."""
    window: int = Field(default=128, ge=1)
    """Documents that the packer looks at to fill a pack; larger fills better, smaller keeps more of the random order."""
    ahead_packs: int = Field(default=2, ge=1)
    """Packs per column that targets may have ready before their first use; each costs a slot per column."""
    seed: int = Field(default=0, ge=0)
    """Seed of document order, anchors, noise and drafter initialisation."""


class DFlashSection(Section):
    """The drafter. Dimensions left out are the target's."""

    type: Literal["dflash"] = "dflash"
    """Drafter family."""
    num_layers: int = Field(default=5, ge=1)
    """Decoder layers of the drafter."""
    block_size: int = Field(default=16, ge=2, le=64)
    """Slots of a block (B): the anchor and B - 1 drafted tokens."""
    mask_token_id: int | None = Field(default=None, ge=0)
    """Token fed to undecided slots, absent from the corpus; known for some target families, else required."""
    layer_types: LayerType | tuple[LayerType, ...] = "full"
    """"full" (bidirectional in the block, all earlier context), "sliding" (causal, windowed), or a list, one for each layer."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Window of sliding layers in tokens, the current one counted; required if any layer slides."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP; none takes the target's."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """Query heads; none takes the target's."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Key and value heads; none takes the target's."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of a head; none takes the target's."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute type; master weights, moments and gradient sums are fp32 whatever it is."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention kernel; "auto" takes flex on CUDA and SDPA with a dense mask on CPU."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    warm_start: str | None = None
    """Exported drafter folder to start the weights from; its shapes, taps and block layout must be this recipe's."""

    def layer_types_list(self) -> tuple[LayerType, ...]:
        """One type for each layer."""
        return (self.layer_types,) * self.num_layers if isinstance(self.layer_types, str) else self.layer_types


class ObjectiveSection(Section):
    """What the drafter is trained to do."""

    loss: Literal["ce"] = "ce"
    """Cross-entropy with the corpus' own next tokens, which are to be the target's own answers."""
    weight: Literal["decay", "dpace"] = "decay"
    """Weight of slot k: "decay" is exp(-(k - 1) / decay_gamma); "dpace" follows the drafter's confidence (arXiv 2605.18810)."""
    decay_gamma: float = Field(default=7.0, gt=0)
    """Decay constant in slots; the paper takes 7 for blocks of 16, 5 for 10, 4 for 8."""
    dpace_alpha: float = Field(default=0.5, gt=0, lt=1)
    """Floor of the confidence in D-PACE; 0.3 to 0.7 are stable."""
    chunk_rows: int = Field(default=2048, ge=16)
    """Rows of logits held at once."""
    noise_std: float = Field(default=0.0, ge=0)
    """Standard deviation of noise on hidden states at step 0, relative to each tap's root mean square; 0 adds none."""
    noise_end_std: float = Field(default=0.0, ge=0)
    """The same once `noise_ratio` of the steps is over; linear in between."""
    noise_ratio: float = Field(default=1.0, gt=0, le=1)
    """Share of all steps over which the noise goes from start to end."""


class OptimizerSection(Section):
    """AdamW with fp32 masters, clipping and a planned learning rate."""

    lr: float = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape of the learning rate after warm-up: cosine to the minimum, warm-up/stable/decay, or constant."""
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    """Share of all steps over which the rate rises linearly from 0."""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """wsd only: share of all steps over which the rate falls linearly at the end."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate as a share of the peak."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    max_bad_steps: int = Field(default=10, ge=1)
    """Stop with a diagnosis after so many steps in a row that were not finite; such steps never touch the weights."""


class ValidationSection(Section):
    """Exact greedy acceptance length on held-out prompts, measured during training."""

    prompts: str | None = None
    """JSONL of held-out conversations (their prompts are answered by the target before step 1); none measures nothing."""
    every_steps: int = Field(default=500, ge=1)
    """Steps between two measurements; step 0 and the last step are always measured."""
    max_prompts: int = Field(default=128, ge=1)
    """At most so many prompts, the first of the file."""
    max_new_tokens: int = Field(default=256, ge=2)
    """Longest answer, in tokens."""
    batch_size: int = Field(default=16, ge=1)
    """Prompts that the target answers at once."""


class CheckpointSection(Section):
    """What survives a plug that is pulled."""

    every_steps: int = Field(default=500, ge=1)
    """Steps between two checkpoints; the last step always writes one."""
    keep: int = Field(default=3, ge=1)
    """Newest checkpoints that are kept; the one with the best acceptance length is kept besides."""


class PlacementSection(Section):
    """Which process runs where."""

    mode: Literal["auto", "colocated", "split"] = "auto"
    """"split": target and drafter processes; "colocated": every process does both; "auto": what fits the GPUs and is fastest by
    known costs (of a probe, or the table of known GPUs); without costs colocated on all GPUs, or split if that is too large."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device; "auto" takes CUDA where a driver and a GPU are found."""
    target_workers: int = Field(default=1, ge=1)
    """Target processes (split)."""
    drafter_ranks: int = Field(default=1, ge=1)
    """Data-parallel drafter processes; in colocated mode, all processes."""
    target_gpus: tuple[int, ...] | None = None
    """GPU of each target process; none gives them the first GPUs in order."""
    drafter_gpus: tuple[int, ...] | None = None
    """GPU of each drafter process; none gives them the GPUs after the targets'."""
    target_threads: int | None = Field(default=None, ge=1)
    """CPU threads of a target process; none shares the cores out evenly."""
    drafter_threads: int | None = Field(default=None, ge=1)
    """CPU threads of a drafter process; none shares the cores out evenly."""
    slot_dtype: Literal["target", "float8_e4m3"] = "target"
    """Type of hidden states in slots: "target" rounds nothing; "float8_e4m3", with a scale for each token and tap, halves
    slots and copies, and is noise that a server does not have: +0.009 (-0.009 to +0.027) in acceptance length, SmolLM2."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Replay a drafter's steps and a target's packs from CUDA graphs: "auto" does, for each, where launching takes over half of
    the time. "on" does wherever it can: targets with delta nets, and those in fp32, stay launched. Same results."""
    host_memory_gb: float = Field(default=16.0, gt=0)
    """Host memory for slots, in GiB; a schedule that needs more is refused."""
    max_restarts: int = Field(default=3, ge=0)
    """Times a target worker that died is started again before the run gives up."""
    ready_seconds: float = Field(default=900.0, gt=0)
    """Longest wait for a process to load and report ready."""
    stall_seconds: float = Field(default=1800.0, gt=0)
    """Longest time without progress: for a target worker, to have packs in hand and hand none over, then it is killed and
    started again; for a process that trains, to be in one place of a step, then the run ends, to be resumed."""


class ObserveSection(Section):
    """Where numbers go."""

    sinks: tuple[Literal["console", "jsonl", "tensorboard", "wandb", "trackio"], ...] = ("console", "jsonl")
    """Sinks of metrics; a configured sink starts or the run stops. The last three need the extra `sinks`."""
    project: str = Field(default="slipstream", min_length=1)
    """Project that wandb and trackio put the run under."""
    wandb_mode: Literal["online", "offline"] = "online"
    """"offline" keeps a Weights & Biases run in the run folder, for `wandb sync`; "online" needs to be logged in."""
    every_steps: int = Field(default=10, ge=1)
    """Steps between two console lines; files get every step."""
    spans: bool = True
    """Keep every stretch of every worker's time, which reports and verdicts are made from; costs under 1 % of throughput."""


class Recipe(Section):
    """One run."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder."""
    runs: str = "runs"
    """Folder that run folders are made in."""
    target: TargetSection
    corpus: CorpusSection
    plan: PlanSection = PlanSection()
    drafter: DFlashSection = DFlashSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    placement: PlacementSection = PlacementSection()
    observe: ObserveSection = ObserveSection()

    @property
    def slot_dtype(self) -> Literal["bfloat16", "float32", "float8_e4m3"]:
        """Type of the hidden states that slots hold."""
        return self.target.hidden_dtype if self.placement.slot_dtype == "target" else self.placement.slot_dtype

    @field_validator("plan")
    @classmethod
    def _pack_shape(cls, plan: PlanSection) -> PlanSection:
        if plan.pack_tokens % 128:
            raise _refused("plan.pack_tokens", plan.pack_tokens, "must be a multiple of 128", _nearest(plan.pack_tokens, 128))
        return plan

    @model_validator(mode="after")
    def _cross_checks(self) -> Recipe:
        _check_drafter(self.drafter)
        _check_taps(self.target)
        queries = self.plan.pack_anchors * self.drafter.block_size
        if queries % 128:
            raise _refused(
                "plan.pack_anchors",
                self.plan.pack_anchors,
                f"pack_anchors x drafter.block_size ({self.drafter.block_size}) must be a multiple of 128, not {queries}",
                "with this block size: a multiple of " + str(_anchor_step(self.drafter.block_size)),
            )
        if self.target.dtype == "float32" and self.placement.slot_dtype == "float8_e4m3":
            raise _refused(
                "placement.slot_dtype",
                self.placement.slot_dtype,
                'rounds hidden states to eight bits, target.dtype = "float32" is for runs in which nothing may be rounded',
                'use "target", or target.dtype = "bfloat16"',
            )
        if self.plan.packs_per_step % self.placement.drafter_ranks:
            ranks, count = self.placement.drafter_ranks, self.plan.packs_per_step
            raise _refused(
                "plan.packs_per_step",
                count,
                f"must be a multiple of placement.drafter_ranks ({ranks})",
                _nearest(count, ranks),
            )
        if self.optimizer.schedule == "wsd" and self.optimizer.warmup_ratio + self.optimizer.decay_ratio > 1:
            raise _refused("optimizer.decay_ratio", self.optimizer.decay_ratio, "warmup_ratio + decay_ratio must be at most 1")
        return self


def _check_drafter(drafter: DFlashSection) -> None:
    types = drafter.layer_types_list()
    if len(types) != drafter.num_layers:
        raise _refused(
            "drafter.layer_types",
            list(types),
            f"has {len(types)} entries, drafter.num_layers is {drafter.num_layers}",
            "one for each layer, or a single word for all",
        )
    if "sliding" in types and drafter.sliding_window is None:
        raise _refused("drafter.sliding_window", None, "is required, since a layer is sliding", "for example 2048")
    if "sliding" not in types and drafter.sliding_window is not None:
        raise _refused(
            "drafter.sliding_window", drafter.sliding_window, "no layer is sliding", "set drafter.layer_types or leave it out"
        )


def _check_taps(target: TargetSection) -> None:
    taps = target.tap_layers
    if isinstance(taps, str):
        return
    if not taps:
        raise _refused("target.tap_layers", list(taps), "must name at least one layer")
    if list(taps) != sorted(set(taps)) or taps[0] < 0:
        raise _refused("target.tap_layers", list(taps), "must be ascending, without repeats, from 0", "0-based layer ids")


def _anchor_step(block_size: int) -> int:
    """Smallest number of anchors whose blocks fill whole tiles of 128 queries."""
    return next(n for n in range(1, 129) if n * block_size % 128 == 0)


def _nearest(value: int, step: int) -> str:
    below, above = value // step * step, -(-value // step) * step
    return f"nearest: {below} or {above}" if below else f"nearest: {above}"


def _refused(key: str, value: object, rule: str, hint: str = "") -> RecipeError:
    return RecipeError(key=key, value=value, rule=rule, hint=hint)
