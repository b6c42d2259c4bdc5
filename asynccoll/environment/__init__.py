"""Who started this process, and where it is in its job: functions of a mapping of variables.

This package starts no rank, changes no variable, and knows no collectives.
"""

from asynccoll.environment.detection import detect
from asynccoll.environment.info import LaunchInfo, Variables
from asynccoll.environment.nodes import Nodes, node_name

__all__ = ["LaunchInfo", "Nodes", "Variables", "detect", "node_name"]
