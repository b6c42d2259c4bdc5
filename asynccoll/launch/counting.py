"""How many ranks ``-n`` asks for, for every engine that starts some."""

from __future__ import annotations

from asynccoll.errors import InvalidArgumentError

__all__ = ["number_of_ranks"]


def number_of_ranks(text: object) -> int:
    """The number of ranks on this host: a number, ``auto``, ``cpu`` or ``gpu``, as torchrun understands them.

    Raises:
        InvalidArgumentError: it is no number, or none that a job can have.
    """
    from torch.distributed.run import determine_local_world_size

    try:
        count: int = determine_local_world_size(str(text))
    except ValueError as error:
        raise InvalidArgumentError(f"-n {text}: {error}") from error
    if count < 1:
        raise InvalidArgumentError(f"-n {text}: expected at least one rank")
    return count
