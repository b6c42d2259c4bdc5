"""A call as values, and the plan for it, which is a pure function of these values.

Touches no process group, device or lane: the abilities of a backend are a frozen row of values, too.
"""

from asynccoll.plan.dispatch import plan
from asynccoll.plan.spec import Capabilities, Op, Plan, Policy, ReduceOp, TensorSpec, Topology

__all__ = ["Capabilities", "Op", "Plan", "Policy", "ReduceOp", "TensorSpec", "Topology", "plan"]
