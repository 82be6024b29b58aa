"""Stage 2 of 6: documents -> packs, uses and slots. Waits for: a prepared corpus. Unblocked by: nothing, it never waits.

What is trained in which step, by which column, from which slot, is fixed here before any forward pass, as a pure function
of corpus, recipe and seed. No torch.
"""

from slipstream.plan.evaluation import plan_validation
from slipstream.plan.figures import PlanSummary
from slipstream.plan.index import CorpusIndex
from slipstream.plan.make import make_schedule
from slipstream.plan.memory import MemoryPlan, plan_memory, slot_bytes
from slipstream.plan.placement import Placement, owned_columns, resolve_placement
from slipstream.plan.planner import IssueOrder, Planner
from slipstream.plan.schedule import Schedule

__all__ = [
    "CorpusIndex",
    "IssueOrder",
    "MemoryPlan",
    "Placement",
    "PlanSummary",
    "Planner",
    "Schedule",
    "make_schedule",
    "owned_columns",
    "plan_memory",
    "plan_validation",
    "resolve_placement",
    "slot_bytes",
]
