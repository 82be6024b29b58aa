"""Where processes come from: preflight, the supervisor, the roles that children play, and validation during training.

Flows in: a recipe. Flows out: a run folder with a trained drafter. Waits for: its children, each held by its own handle.
"""

from slipstream.launch.local import RunResult, train_run
from slipstream.launch.preflight import Preflight, preflight

__all__ = ["Preflight", "RunResult", "preflight", "train_run"]
