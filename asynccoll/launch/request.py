"""What ``asynccoll run`` was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to start: a program, its arguments, and options under torchrun's names."""

    program: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    backend: str | None = None
    options: Mapping[str, str | bool] = field(default_factory=dict)
    #: how the ranks are started, as ``backends.table.starting`` says it, if not as the backend's
    engine: str | None = None
