"""Beside the flow: sees every stage, and no stage ever waits for it.

Waits for: nothing. Unblocked by: nothing; a fault in here is reported and training goes on.
"""

from slipstream.observe.accounts import IDLE, Account, AccountWriter
from slipstream.observe.metrics import StepRecord, process_memory_bytes, step_metrics
from slipstream.observe.sinks import SINKS, MetricLog, RunFacts, Sink, open_metric_log

__all__ = [
    "IDLE",
    "SINKS",
    "Account",
    "AccountWriter",
    "MetricLog",
    "RunFacts",
    "Sink",
    "StepRecord",
    "open_metric_log",
    "process_memory_bytes",
    "step_metrics",
]
