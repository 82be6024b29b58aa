"""What a worker can be doing, by name: work, waiting with its cause, or nothing. Writers and readers share this table.

Colours are told apart by people who do not see all of them (after Paul Tol's schemes, SRON/EPS/TN/09-002): work is cool,
waiting warm, idle grey. Whoever reads a run folder may import this: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

IDLE = "idle"
"""The state of a worker that no other state claims."""

Kind = Literal["work", "wait", "idle"]


@dataclass(frozen=True, slots=True)
class State:
    """One state: what kind of time it is, a sentence, and its colours on a light and on a dark ground."""

    kind: Kind
    sentence: str
    light: str
    dark: str


STATES: Mapping[str, State] = {
    "load": State("work", "Reads weights and the plan, before anything is trained.", "#5b7083", "#8fa3b5"),
    "warm_up": State("work", "Compiles, tunes and allocates, before the first step.", "#7d92a8", "#b3c2d1"),
    "target": State("work", "A forward pass of the target over one pack.", "#332288", "#8f7fe0"),
    "publish": State("work", "Seals a pack and hands it over.", "#777711", "#bdbd4a"),
    "forward": State("work", "The drafter's forward pass and loss over one pack.", "#117733", "#3fae66"),
    "backward": State("work", "The drafter's backward pass over one pack.", "#2f9e8f", "#5cc9ba"),
    "forward_backward": State("work", "The drafter's forward and backward pass, launched as one.", "#1d8a5f", "#4bbd8f"),
    "optimizer": State("work", "The update of the drafter's weights.", "#3a8fc2", "#88ccee"),
    "hooks": State("work", "Side jobs between two steps: metrics, guards.", "#5588bb", "#7fb0dd"),
    "validate": State("work", "Measures the acceptance length over the validation prompts.", "#aa4499", "#d078c2"),
    "checkpoint": State("work", "Copies the training state for a checkpoint.", "#882255", "#c0608f"),
    "build": State("work", "Builds the arrays of a step to come, in the thread that prepares them.", "#44708f", "#76a3c2"),
    "write": State("work", "Writes a checkpoint, in the thread that does so.", "#774466", "#ab7a9c"),
    "wait_input": State("wait", "Waits for hidden states.", "#ee7733", "#f59a5f"),
    "wait_slot": State("wait", "Waits for a free slot to write hidden states to.", "#cc3311", "#ef6a4c"),
    "wait_peer": State("wait", "Waits for the other ranks.", "#ee3377", "#f56a9b"),
    "wait_gpu": State("wait", "Waits for the GPU to catch up with what it was given.", "#c9b458", "#ddcc77"),
    "wait_loader": State("wait", "Waits for the next step's arrays: their thread is behind.", "#e69f00", "#ffbf40"),
    "wait_disk": State("wait", "Waits for the disk, which is still busy with an earlier checkpoint.", "#cc6677", "#e08d9b"),
    IDLE: State("idle", "Nothing that has a name.", "#d9d9d9", "#4a4a4a"),
}  # fmt: skip
"""Every state, in the order in which a legend shows them."""

LANES: Mapping[str, str] = {
    "cpu": "The worker's own thread: all of its time, each moment in one state.",
    "gpu": "Stages of its work on the GPU, timed by events.",
    "loader": "The thread that builds the arrays of steps to come.",
    "writer": "The thread that writes checkpoints.",
}
"""The lanes of a worker's spans."""

GPU_STAGES = frozenset({"target", "forward", "backward", "forward_backward", "optimizer", "wait_peer"})
"""States whose work on the GPU is timed as well; in `wait_peer` the GPU reduces gradients and waits with the others."""


def is_wait(state: str) -> bool:
    """Whether a state is time that a worker loses to something else; false for names that are not known."""
    known = STATES.get(state)
    return known is not None and known.kind == "wait"
