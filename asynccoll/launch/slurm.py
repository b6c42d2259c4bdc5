"""SLURM's short form for host lists, where users look for it; its variables are read in ``environment``."""

from asynccoll.environment.slurm import expand_hostlist

__all__ = ["expand_hostlist"]
