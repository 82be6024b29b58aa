"""The roles a child can play. Each opens what it needs from the run folder, says it is ready, works, returns a result.

The account that a role is given is in state "load" until the role lets it rest.

`answers`: the target answers the validation prompts · `target`: hidden states into shared slots · `drafter`: trains from them ·
`colocated`: both in one process, nothing crosses · `probe-target`, `probe-drafter`: a stage alone, to be measured. A role's
module is imported only by a process that plays it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.launch.child import Control
from slipstream.observe import Account

Job = Mapping[str, Any]

ROLES: Mapping[str, str] = {
    "answers": "slipstream.launch.roles.answers:play_answers",
    "target": "slipstream.launch.roles.target:play_target",
    "drafter": "slipstream.launch.roles.drafter:play_drafter",
    "colocated": "slipstream.launch.roles.colocated:play_colocated",
    "probe-target": "slipstream.launch.roles.probe:play_probe_target",
    "probe-drafter": "slipstream.launch.roles.probe:play_probe_drafter",
}


def role(name: str) -> Callable[[Job, Control, Account], dict[str, Any]]:
    """The function that plays a role."""
    module, _, function = ROLES[name].partition(":")
    found: Callable[[Job, Control, Account], dict[str, Any]] = getattr(importlib.import_module(module), function)
    return found
