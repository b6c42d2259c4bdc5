"""Predict a lane's next call from its previous calls, so that every rank makes the same prediction.

Training loops repeat themselves: the expected call is the one that last followed the same two calls.
"""

from __future__ import annotations

#: How many pairs of calls are remembered before all are forgotten; reached if a program never repeats itself.
_MOST = 4096


class Prediction:
    """The prediction for one lane; calls are numbers. Ranks with the same calls since ``restart`` agree."""

    def __init__(self) -> None:
        self._followed: dict[tuple[int, int], int] = {}
        self._last = (0, 0)

    def restart(self) -> None:
        """Forget everything: all ranks are in step again, whatever they called before."""
        self._followed.clear()
        self._last = (0, 0)

    def expects(self, call: int) -> bool:
        """Record that ``call`` is made now; return whether it is the expected one."""
        last = self._last
        self._last = (last[1], call)
        if self._followed.get(last) == call:
            return True
        if len(self._followed) >= _MOST:
            self._followed.clear()
        self._followed[last] = call
        return False
