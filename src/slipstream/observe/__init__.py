"""Beside the flow: sees every stage, and no stage ever waits for it.

Waits for: nothing. Unblocked by: nothing; a fault in here is reported and training goes on.
"""

from slipstream.observe.accounts import Account, AccountWriter
from slipstream.observe.facts import RunFacts
from slipstream.observe.metrics import StepRecord, process_memory_bytes, step_metrics
from slipstream.observe.recording import open_account
from slipstream.observe.sinks import SINKS, MetricLog, Sink, check_sinks, open_metric_log
from slipstream.observe.spans import SpanLog, WorkerFacts
from slipstream.observe.states import IDLE, STATES

__all__ = [
    "IDLE",
    "SINKS",
    "STATES",
    "Account",
    "AccountWriter",
    "MetricLog",
    "RunFacts",
    "Sink",
    "SpanLog",
    "StepRecord",
    "WorkerFacts",
    "check_sinks",
    "open_account",
    "open_metric_log",
    "process_memory_bytes",
    "step_metrics",
]
