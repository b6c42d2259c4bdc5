"""How many ranks ``-n`` asks for, for every engine that starts ranks."""

from __future__ import annotations

from asynccoll.errors import InvalidArgumentError

__all__ = ["number_of_ranks"]


def number_of_ranks(text: object) -> int:
    """Return the number of ranks on this host from a number, ``auto``, ``cpu`` or ``gpu``, as torchrun does.

    Raises:
        InvalidArgumentError: it is not a number, or less than one rank.
    """
    from torch.distributed.run import determine_local_world_size

    try:
        count: int = determine_local_world_size(str(text))
    except ValueError as error:
        raise InvalidArgumentError(f"-n {text}: {error}") from error
    if count < 1:
        raise InvalidArgumentError(f"-n {text}: expected at least one rank")
    return count
