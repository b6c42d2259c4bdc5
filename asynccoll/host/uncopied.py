"""The base class of objects tied to certain tensors in one process, which cannot be copied or pickled."""

from __future__ import annotations

from typing import NoReturn

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import named_type


class Uncopied:
    """An object that cannot be copied or pickled: a copy would send the same memory, or hold a lock."""

    __slots__ = ()

    #: for errors: what the object belongs to, and what to do instead
    _belongs = "to its model and process"
    _instead = "make another one for the copy of the model"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidArgumentError(
            f"{named_type(self)} belongs {self._belongs}, and cannot be copied or pickled: {self._instead}"
        )
