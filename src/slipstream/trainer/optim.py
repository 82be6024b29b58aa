"""AdamW on flat fp32 buffers: masters, moments and gradient sums, whatever type the drafter computes in.

A step that is not finite changes nothing (weights, moments, count of good steps) and no CPU waits to find out: the
update looks at a flag on the device. Waits for: the backward passes of all columns, summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from slipstream.config.recipe import OptimizerSection
from slipstream.errors import CheckpointError

ALIGN_ELEMENTS = 64
"""Every parameter starts at a multiple of this in the flat buffers: 128 bytes in bf16, so that kernels see aligned views."""

CHUNK_ELEMENTS = 1 << 22
"""Elements updated at once: bounds the temporaries of an update to a few times 16 MiB."""


@dataclass(frozen=True, slots=True)
class Region:
    """Where a parameter lies in the flat buffers, in elements."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's own part of a flat buffer, in its shape."""
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What a checkpoint holds of the optimizer: fp32 tensors by parameter name, and the count of good steps (int64 scalar)."""

    master: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    good_steps: Tensor


class Update(Protocol):
    """One AdamW update of flat fp32 buffers, in place, and of the compute weights if they are another buffer than `master`.

    `scalars` fp32 `[5]` on the device: the factor that clips gradients, the bias-corrected rate, the root of the second
    moment's correction, whether the step is good (1) or changes nothing (0), and what the first `num_decayed` elements are
    multiplied by before all else.
    """

    def __call__(
        self,
        *,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gradient: Tensor,
        compute: Tensor,
        scalars: Tensor,
        num_decayed: int,
        betas: tuple[float, float],
        eps: float,
    ) -> None: ...


class Accumulate(Protocol):
    """Adds a gradient to its fp32 sum of the same shape, or puts it in its place (`overwrite`)."""

    def __call__(self, total: Tensor, gradient: Tensor, *, overwrite: bool) -> None: ...


class FlatAdamW:
    """AdamW (decoupled decay, on matrices only) over all trainable parameters of a module, as one vector.

    Takes the parameters over: they become views of one compute buffer (of the masters themselves in fp32), and a hook on
    each adds its gradient to the flat sum and drops it. `num_extra` fp32 elements at the end of the gradient buffer belong
    to the caller and are reduced with it. The rule is torch.optim.AdamW's (Loshchilov & Hutter, arXiv 1711.05101).
    """

    def __init__(self, module: nn.Module, *, section: OptimizerSection, num_extra: int = 0) -> None:
        self.section = section
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        assert named, "a drafter without trainable parameters"
        dtypes = {parameter.dtype for _, parameter in named}
        assert len(dtypes) == 1, f"parameters of several types: {dtypes}"
        device = named[0][1].device
        self.regions, self._num_decayed, size = _lay_out(named)
        self.num_parameters = sum(parameter.numel() for _, parameter in named)
        self.master = torch.zeros(size, dtype=torch.float32, device=device)
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.reduced = torch.zeros(size + num_extra, dtype=torch.float32, device=device)
        self.gradient = self.reduced[:size]
        self.extra = self.reduced[size:]
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._update, self._accumulate = UPDATES[device.type](), SUMS[device.type]()
        # on CUDA a step's first gradient is copied over the last step's, which saves clearing and reading the sum
        self._stale: set[str] | None = set() if device.type == "cuda" else None
        is_fp32 = dtypes == {torch.float32}
        self._compute = self.master if is_fp32 else torch.zeros(size, dtype=dtypes.pop(), device=device)
        for name, parameter in named:
            self._take_over(parameter, self._region(name))

    def zero_grad(self) -> None:
        """Start a step: clear the gradient sums and what the caller keeps behind them.

        On CUDA sums are only marked: the first gradient of each parameter overwrites them, the update clears the others.
        """
        if self._stale is None:
            self.reduced.zero_()
        else:
            self.extra.zero_()
            self._stale.update(region.name for region in self.regions)

    @torch.no_grad()
    def step(self, *, learning_rate: float | Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """One update from the summed gradient, unless it or `finite` (bool scalar on the device) says no.

        `learning_rate` is a number, or an fp64 scalar on the device: the results are the same. Returns the global norm
        before clipping (fp32 scalar) and whether the update was made (bool scalar); reads neither.
        """
        self.clear_stale()
        section = self.section
        norm = torch.linalg.vector_norm(self.gradient)
        good = torch.isfinite(norm) & finite
        clip = (section.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        count = self.good_steps + 1
        self.good_steps.copy_(torch.where(good, count, self.good_steps))
        count = count.to(torch.float64)
        correction1 = 1 - torch.pow(section.beta1, count)
        correction2_sqrt = (1 - torch.pow(section.beta2, count)).sqrt()
        decay: float | Tensor = 1 - learning_rate * section.weight_decay
        if not isinstance(decay, Tensor):
            decay = torch.full_like(correction1, decay)
        scalars = (clip, correction1.reciprocal() * learning_rate, correction2_sqrt, good, decay)
        self._update(
            master=self.master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            gradient=self.gradient,
            compute=self._compute,
            scalars=torch.stack([scalar.to(torch.float32) for scalar in scalars]),
            num_decayed=self._num_decayed,
            betas=(section.beta1, section.beta2),
            eps=section.eps,
        )
        return norm, good

    @property
    def overwrites(self) -> bool:
        """Whether the next gradients are the step's first, which take the place of the sums. Never on a CPU."""
        return self._stale is not None and len(self._stale) == len(self.regions)

    @property
    def stale(self) -> frozenset[str]:
        """Parameters whose sums the next gradient overwrites: no gradient of this step has reached them. None on a CPU."""
        return frozenset(self._stale or ())

    @stale.setter
    def stale(self, names: frozenset[str]) -> None:
        """For gradients that came to the sums past the parameters, by a recording of work that once went through them."""
        if self._stale is not None:
            self._stale = set(names)

    def clear_stale(self) -> None:
        """Clear the sums that no gradient of this step has reached; before they are reduced, if a rank may lack one."""
        for region in self.regions if self._stale else ():
            if self._stale is not None and region.name in self._stale:
                region.view(self.gradient).zero_()
        if self._stale is not None:
            self._stale.clear()

    def state(self) -> OptimizerState:
        """A copy of everything a checkpoint needs, on the CPU; training may go on while it is written."""
        copies = [_on_cpu(flat) for flat in (self.master, self.exp_avg, self.exp_avg_sq)]
        master, exp_avg, exp_avg_sq = ({region.name: region.view(copy) for region in self.regions} for copy in copies)
        return OptimizerState(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, good_steps=_on_cpu(self.good_steps))

    @torch.no_grad()
    def load_state(self, state: OptimizerState) -> None:
        """Take over a checkpoint's state, weights included. Raises `CheckpointError` when names or shapes differ."""
        self.load_weights(state.master)
        self._fill(self.exp_avg, state.exp_avg, what="exp_avg")
        self._fill(self.exp_avg_sq, state.exp_avg_sq, what="exp_avg_sq")
        self.good_steps.copy_(state.good_steps)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set masters and compute weights by name. Raises `CheckpointError` when names or shapes differ."""
        self._fill(self.master, weights, what="weights")
        self._compute.copy_(self.master)

    @torch.no_grad()
    def _take_over(self, parameter: nn.Parameter, region: Region) -> None:
        region.view(self.master).copy_(parameter)
        view = region.view(self._compute)
        view.copy_(parameter)
        parameter.data = view
        gradient = region.view(self.gradient)

        def add_to_sum(leaf: Tensor) -> None:
            assert leaf.grad is not None
            overwrite = False
            if self._stale and region.name in self._stale:
                self._stale.remove(region.name)
                overwrite = True
            self._accumulate(gradient, leaf.grad, overwrite=overwrite)
            leaf.grad = None

        parameter.register_post_accumulate_grad_hook(add_to_sum)

    def _region(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)

    def _fill(self, flat: Tensor, given: Mapping[str, Tensor], *, what: str) -> None:
        ours = {region.name: tuple(region.shape) for region in self.regions}
        theirs = {name: tuple(tensor.shape) for name, tensor in given.items()}
        if ours != theirs:
            wrong = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            shown = ", ".join(f"{name}: {theirs.get(name)} for {ours.get(name)}" for name in wrong[:3])
            raise CheckpointError(
                key="drafter", value=f"{len(wrong)} tensors of {what}", rule=f"names or shapes are not this drafter's ({shown})"
            )
        for region in self.regions:
            region.view(flat).copy_(given[region.name])


def torch_update(
    *,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    compute: Tensor,
    scalars: Tensor,
    num_decayed: int,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """The update in plain torch, a chunk at a time: what runs on a CPU, and the oracle of the kernel. See `Update`."""
    clip, step_size, root, flag, decay = scalars.unbind()
    good = flag != 0
    for start, stop, factor in _chunks(size=len(master), num_decayed=num_decayed, decay=decay):
        part = slice(start, stop)
        scaled = gradient[part] * clip
        new_avg = torch.lerp(exp_avg[part], scaled, 1 - betas[0])
        new_sq = (exp_avg_sq[part] * betas[1]).addcmul_(scaled, scaled, value=1 - betas[1])
        denominator = (new_sq.sqrt() / root).add_(eps)
        new_master = (master[part] * factor).sub_(new_avg / denominator * step_size)
        master[part] = torch.where(good, new_master, master[part])
        exp_avg[part] = torch.where(good, new_avg, exp_avg[part])
        exp_avg_sq[part] = torch.where(good, new_sq, exp_avg_sq[part])
        if compute is not master:
            compute[part] = master[part]


def torch_accumulate(total: Tensor, gradient: Tensor, *, overwrite: bool) -> None:
    """The sum in plain torch. See `Accumulate`."""
    if overwrite:
        total.copy_(gradient)
    else:
        total.add_(gradient)


def _triton_accumulate() -> Accumulate:
    from slipstream.trainer.optim_kernel import accumulate

    return accumulate


SUMS: Mapping[str, Callable[[], Accumulate]] = {"cpu": lambda: torch_accumulate, "cuda": _triton_accumulate}
"""Every implementation of `Accumulate`, by the kind of device that it is for."""


def _triton_update() -> Update:
    from slipstream.trainer.optim_kernel import update  # here, since only CUDA builds of torch bring Triton

    return update


UPDATES: Mapping[str, Callable[[], Update]] = {"cpu": lambda: torch_update, "cuda": _triton_update}
"""Every implementation, by the kind of device that it is for."""


def _chunks(*, size: int, num_decayed: int, decay: Tensor) -> list[tuple[int, int, Tensor | float]]:
    """Parts of the flat buffers with the factor that decay puts on each; matrices lie first."""
    return [
        (start, min(start + CHUNK_ELEMENTS, stop), factor)
        for first, stop, factor in ((0, num_decayed, decay), (num_decayed, size, 1.0))
        for start in range(first, stop, CHUNK_ELEMENTS)
    ]


def _lay_out(named: list[tuple[str, nn.Parameter]]) -> tuple[tuple[Region, ...], int, int]:
    """Regions with matrices first; the end of the matrices; the size of the whole."""
    matrices = [entry for entry in named if entry[1].ndim >= 2]
    vectors = [entry for entry in named if entry[1].ndim < 2]
    regions, start, num_decayed = [], 0, 0
    for name, parameter in matrices + vectors:
        region = Region(name=name, start=start, shape=parameter.shape)
        regions.append(region)
        start = -(-region.stop // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        num_decayed = start if parameter.ndim >= 2 else num_decayed
    return tuple(regions), num_decayed, start


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
