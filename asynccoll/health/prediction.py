"""What a lane calls next, as far as what it has called before tells: the same guess on every rank.

Training loops repeat themselves. After the two calls before it a call is expected to be the one that last
followed on the same two.
"""

from __future__ import annotations

__all__ = ["Prediction"]

#: Pairs that are remembered; a program that never repeats itself begins anew.
_MOST = 4096


class Prediction:
    """Calls are numbers. Ranks that have made the same calls since they began guess alike."""

    def __init__(self) -> None:
        self._followed: dict[tuple[int, int], int] = {}
        self._last = (0, 0)

    def restart(self) -> None:
        """Forget everything: ranks are in step again, whatever each has called before."""
        self._followed.clear()
        self._last = (0, 0)

    def expects(self, call: int) -> bool:
        """Whether ``call``, which is made now, is the one that was to be expected."""
        last = self._last
        self._last = (last[1], call)
        if self._followed.get(last) == call:
            return True
        if len(self._followed) >= _MOST:
            self._followed.clear()
        self._followed[last] = call
        return False
