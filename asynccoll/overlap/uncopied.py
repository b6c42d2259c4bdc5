"""The base of objects that belong to one model in one process, and are neither copied nor pickled."""

from __future__ import annotations

from typing import NoReturn

from asynccoll.errors import InvalidArgumentError

__all__ = ["Uncopied"]


class Uncopied:
    """Refuses ``copy``, ``deepcopy`` and ``pickle``: a copy would send the same buckets, or hold a lock."""

    #: for errors: what to do instead
    _instead = "make another one for the copy of the model"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidArgumentError(
            f"a {type(self).__name__} belongs to its model and process, and cannot be copied or pickled: "
            f"{self._instead}"
        )
