"""How the processes of a job come to be: ``asynccoll run``, ``spawn``, ``Parallel``, and what starts them.

Knows environments, processes and how a backend wants its ranks started; must not know collectives.
"""

from __future__ import annotations

from asynccoll.environment.detection import LaunchInfo, detect

__all__ = ["LaunchInfo", "detect"]
