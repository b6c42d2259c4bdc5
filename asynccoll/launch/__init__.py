"""How the processes of a job come to be: reading a launcher's environment, starting ranks.

``env`` and ``slurm`` are pure and tell who started this process; ``commands`` starts others.
Nothing here knows about collectives.
"""

from __future__ import annotations

from asynccoll.environment.detection import LaunchInfo, detect

__all__ = ["LaunchInfo", "detect"]
