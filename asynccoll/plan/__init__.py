"""What a call is, as values, and what is to be done about it: a pure function of these.

Touches no process group, device or lane: what a backend can do comes as a frozen row of values.
"""

from asynccoll.plan.dispatch import plan
from asynccoll.plan.spec import Capabilities, Op, Plan, Policy, ReduceOp, TensorSpec, Topology

__all__ = ["Capabilities", "Op", "Plan", "Policy", "ReduceOp", "TensorSpec", "Topology", "plan"]
