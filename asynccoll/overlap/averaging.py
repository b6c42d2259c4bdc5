"""Local SGD: each rank trains by itself, and all ranks average their parameters every few steps.

    averaging = ac.overlap.average_parameters(model, every=16, delay=4)
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        await averaging                  # or averaging.wait()
    await averaging.finish()

Each averaging is a *round*. With ``delay`` it is hidden: training goes on while a copy of the parameters is
averaged, and the average corrects the parameters ``delay`` steps later.

Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; with a delay, Zhou et al.,
"DaSGD: Squeezing SGD Parallelization Performance", 2020. Built on the public operations alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch

from asynccoll.errors import CollectiveMismatchError, InvalidArgumentError, still_pending
from asynccoll.host.misfits import check_count, fitting
from asynccoll.host.timeouts import check_timeout
from asynccoll.ops.collectives import all_reduce
from asynccoll.ops.scopes import backward_lane
from asynccoll.overlap.accepted import (
    check_unaliased,
    check_whole,
    place_in,
    tensors_of,
    told_to_peers,
    unique,
)
from asynccoll.overlap.arrivals import wait_for
from asynccoll.overlap.companion import EachStep
from asynccoll.overlap.parameters import check_layouts, named_parameters
from asynccoll.overlap.pending import Methods, Pending
from asynccoll.overlap.steps import Steps
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike

__all__ = ["ParameterAverager", "average_parameters"]

#: The step number that ``finish`` sends; steps are numbered from 1.
_FINISH = 0
#: Checksums of names are below this, so that their squares are averaged without rounding.
_CHECKSUMS = 1 << 20


class ParameterAverager(EachStep):
    """Averages parameters every few steps; made by ``average_parameters``, and awaited once per step.

    A round copies the parameters and starts to average the copies. ``delay`` steps later, every parameter
    ``p`` becomes ``p + (average - copy)``, which keeps the updates of the steps in between. With a delay of 0
    the round waits immediately, and the parameters become the average.

    Each rank keeps its own optimizer state and buffers. After a cancelled or timed-out await the next one
    continues the same round.
    """

    _use = "`await averager` (or averager.wait()) after each step of the optimizer"

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.Tensor],
        *,
        every: int,
        delay: int = 0,
        group: GroupLike = None,
        lane: str = "averaging",
        timeout: float | None = None,
    ) -> None:
        self._tail: dict[str, Any] = {"group": group, "lane": backward_lane(lane), "timeout": timeout}
        place_in(group, "parameters to average")
        with told_to_peers("average_parameters", group, self._tail["lane"]):
            self._given = model if isinstance(model, torch.nn.Module) else unique(tensors_of(model))
            trained = self._trained()
            _check(every, delay)
            check_timeout(timeout)
            check_unaliased(trained.items())
        check_layouts(trained.items(), **self._tail)
        self._parameters = trained
        self._every, self._delay = every, delay
        self._methods = Methods("ParameterAverager", "averager", "this averager")
        self._steps = 0
        self._midway = False  # whether the await of this step was cut short
        self._begun = 0  # the step that the latest round began with
        self._due: int | None = None  # the step that applies the average in flight
        self._copies: list[torch.Tensor] = []
        #: the index and the new value of the parameter corrected last in the round that is being taken
        self._corrected: tuple[int, Any] = -1, None
        self._work: Work[list[torch.Tensor]] | None = None
        self._last: Work[list[torch.Tensor]] | None = None  # the average that ``finish`` waits for

    def _trained(self) -> dict[str, torch.Tensor]:
        """Return the parameters trained now, by name: some may be added or unfrozen between two rounds."""
        trained = {name: x for name, x in named_parameters(self._given) if x.requires_grad}
        check_whole(trained.values())
        wait_for(trained.values())
        if not trained:
            raise InvalidArgumentError("there is no parameter with requires_grad=True, so nothing to average")
        return trained

    def __repr__(self) -> str:
        state = f"an average is due at step {self._due}" if self._due is not None else "nothing in flight"
        return f"<ParameterAverager of {len(self._parameters)} parameters, step {self._steps}: {state}>"

    # Once per step

    def _step(self) -> Steps[None]:
        """Do this step's part of the rounds; yields the works to wait for."""
        if self._last is not None:
            raise InvalidArgumentError(
                "a step of the averager before finish() was complete: its wait was cut short (cancelled or "
                "timed out), and the other ranks complete it; await finish() again first"
            )
        if not self._midway:  # else its await was cut short: continue it
            self._steps += 1
            self._midway = True
        if self._due == self._steps:
            yield from self._take()
        if self._steps % self._every == 0 and self._begun != self._steps:
            self._begin()
        if self._due == self._steps:
            yield from self._take()
        self._midway = False

    def _begin(self) -> None:
        self._parameters = self._trained()
        self._copies = [parameter.detach().clone() for parameter in self._parameters.values()]
        self._work = self._averaged(self._copies, self._steps)
        self._begun, self._due = self._steps, self._steps + self._delay

    def _averaged(self, tensors: list[torch.Tensor], step: int) -> Work[list[torch.Tensor]]:
        """Start to average ``tensors``; check that all ranks are at this ``step`` and train the same ones.

        The number of the step and its square are averaged, too: the average of the squares is the square of
        the average only if all ranks have the same number. So is a checksum of the parameters' names.
        """
        names = zlib.crc32("\n".join(self._parameters).encode()) % _CHECKSUMS
        told = [step, step**2, names, names**2]
        numbers = torch.tensor(told, dtype=torch.float64, device=tensors[0].device)
        averages = all_reduce([numbers, *tensors], op="avg", **self._tail)
        return averages.map(lambda found: _checked(found, step, names))

    def _take(self) -> Steps[None]:
        """Wait for the average and correct each parameter by it: once, also if Ctrl-C interrupts this."""
        assert self._work is not None
        averages = yield from self._received(self._work)
        wait_for(self._parameters.values())
        tensors = zip(self._parameters.values(), averages, self._copies, strict=True)
        for index, (parameter, average, copy) in enumerate(tensors):
            last, value = self._corrected
            if index > last:
                value = parameter.detach() + (average - copy) if self._delay else average
                self._corrected = index, value
            if index >= last:
                parameter.detach().copy_(value)
        self._end_round()

    def _received(self, work: Work[list[torch.Tensor]]) -> Steps[list[torch.Tensor]]:
        """Wait for averages. If the wait is cut short, the next one continues it; an error ends the round."""
        try:
            return (yield work)  # type: ignore[no-any-return]  # what is sent to steps is not typed
        except Exception as error:
            if not still_pending(error):
                self._end_round()
                self._midway = False
            raise

    def _end_round(self) -> None:
        self._due, self._work, self._last, self._copies = None, None, None, []
        self._corrected = -1, None

    # At the end

    def finish(self) -> Pending[None]:
        """End the round in flight, and average once more: then the parameters are the same on every rank.

        After a cancelled or timed-out await the next one waits for the same average.
        """
        return self._methods.resumed(("finish",), self._finish)

    def _finish(self) -> Steps[None]:
        if self._midway:
            yield from self._step()
        if self._work is not None:
            yield from self._take()
        if self._last is None:
            self._parameters = self._trained()
            self._last = self._averaged([x.detach() for x in self._parameters.values()], _FINISH)
        average = yield from self._received(self._last)
        for parameter, value in zip(self._parameters.values(), average, strict=True):
            parameter.detach().copy_(value)
        self._end_round()


@fitting
def average_parameters(
    model: torch.nn.Module | Iterable[torch.Tensor],
    *,
    every: int,
    delay: int = 0,
    group: GroupLike = None,
    lane: str = "averaging",
    timeout: float | None = None,
) -> ParameterAverager:
    """Return a ``ParameterAverager`` for ``model``: local steps, averaged after every ``every`` of them.

    >>> averaging = ac.overlap.average_parameters(model, every=2)
    >>> optimizer.step(); await averaging   # r0 has p = 1.0, r1 has 3.0, and they stay
    >>> optimizer.step(); await averaging   # r0 had p = 2.0, r1 6.0: both have 4.0

    Args:
        model: a module, or its parameters; those with ``requires_grad`` take part. The same on every rank.
        every: steps from one round to the next.
        delay: steps after which a round's average is applied, from 0 (wait immediately) to ``every``; the
            round is hidden if it takes no longer than these.
        group: the ranks whose parameters are averaged; as in every operation.
        lane: rounds are sent on the lane ``<lane>/backward``.
        timeout: seconds for a round's reduction.

    It waits until every rank has made its averager, and compares their parameters; so ranks that make several
    make them in one order.

    Raises:
        InvalidArgumentError: there is nothing to average, ``every`` or ``delay`` is invalid, or this rank is
            not in ``group``.
        CollectiveMismatchError: on every rank, if the ranks' parameters differ in number, order, name or
            layout; it shows the first that differs.
    """
    return ParameterAverager(model, every=every, delay=delay, group=group, lane=lane, timeout=timeout)


def _checked(found: list[torch.Tensor], step: int, names: int) -> list[torch.Tensor]:
    """Return the averages; refuse them if ranks began them at different steps, or with other parameters."""
    numbers, *averages = found
    # Checked on the CPU only: reading a number from a device waits for the device.
    told = numbers.tolist() if numbers.device.type == "cpu" else [step, step**2, names, names**2]
    if _differ(told[:2], step):
        here = "finish()" if step == _FINISH else f"step {step}"
        raise CollectiveMismatchError(
            f"this rank averages at {here}, and others at another step: every rank has to await equally "
            "often before finish(), even one whose data has ended"
        )
    if _differ(told[2:], names):
        raise CollectiveMismatchError(
            "the ranks average different parameters, because some are frozen (requires_grad=False) or were "
            "added on some ranks only: train the same parameters on every rank"
        )
    return averages


def _differ(averages: list[float], step: int) -> bool:
    """Whether the averages of a number and of its square are those of different numbers, beyond rounding."""
    return abs(averages[0] - step) > 0.1 or abs(averages[1] - step**2) > 0.1


def _check(every: int, delay: int) -> None:
    check_count("every", every)
    check_count("delay", delay, least=0)
    if delay > every:
        raise InvalidArgumentError(f"delay must be at most every={every}, got {delay}")
