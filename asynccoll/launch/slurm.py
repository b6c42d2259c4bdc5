"""SLURM's short form for lists of hosts, where users find it; its variables are read in ``environment``."""

from asynccoll.environment.slurm import expand_hostlist

__all__ = ["expand_hostlist"]
