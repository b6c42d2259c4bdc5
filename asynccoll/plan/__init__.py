"""Describes a call by values, and derives the plan for it from them by a pure function.

Touches no process group, device or lane: a backend's capabilities are a frozen row of values, too.
"""

from asynccoll.plan.dispatch import plan
from asynccoll.plan.spec import Capabilities, Op, Plan, Policy, ReduceOp, TensorSpec, Topology

__all__ = ["Capabilities", "Op", "Plan", "Policy", "ReduceOp", "TensorSpec", "Topology", "plan"]
