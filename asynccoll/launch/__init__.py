"""How the processes of a job are started: ``asynccoll run``, ``spawn``, ``Parallel``, and their engines.

It knows environments, processes and how a backend wants its ranks started; it must not know collectives.
"""

from __future__ import annotations

from asynccoll.environment.detection import LaunchInfo, detect

__all__ = ["LaunchInfo", "detect"]
