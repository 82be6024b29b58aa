"""The exceptions a user can meet. A mistake of the user carries the value, the rule and the key to change.

A mistake of ours is an `assert`. Nothing here imports anything.
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Root of every error that Slipstream raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(SlipstreamError):
    """Something the user gave is wrong.

    `value` is what was found, `rule` what it breaks, `key` where to change it (a recipe key `a.b`, an option, a file).
    """

    exit_code = 2

    def __init__(self, *, key: str, value: object, rule: str, hint: str = "") -> None:
        self.key, self.value, self.rule, self.hint = key, value, rule, hint
        shown = repr(value) if isinstance(value, str) else str(value)
        super().__init__(f"{key} = {shown}: {rule}" + (f" ({hint})" if hint else ""))


class RecipeError(UsageError):
    """A recipe or an override cannot be used."""


class PreflightError(UsageError):
    """The recipe is well formed, but this machine, target or corpus cannot run it."""


class CorpusError(UsageError):
    """A source, a conversation or a corpus store is unusable."""


class PlanError(UsageError):
    """The plan cannot be made, or a schedule on disk is not the one that belongs to the run."""


class TargetError(UsageError):
    """The target model cannot be used as asked."""


class CheckpointError(UsageError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class ExportError(UsageError):
    """An export folder would not be what servers read."""


class TransportError(SlipstreamError):
    """Hidden states could not be handed over."""


class PeerDied(TransportError):
    """The process at the other end is gone. The message names it."""


class TransportClosed(TransportError):
    """The transport was closed while somebody waited on it."""


class SealBroken(TransportError):
    """A slot's bytes are not those that were sealed: damaged, or stale. The message names pack, slot and generation."""


class WorkerFailed(SlipstreamError):
    """A child process ended on its own. The message names it, how it ended, and its log."""


class ServerFailed(SlipstreamError):
    """A server that answered for the target does so no longer. The message names it and what it said last."""


class TrainingDiverged(SlipstreamError):
    """Too many steps in a row were not finite. The message says what was not finite, and when."""


class Interrupted(SlipstreamError):
    """The run was asked to stop and did so in order."""

    exit_code = 130
