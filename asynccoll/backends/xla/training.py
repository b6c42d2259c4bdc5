"""Training on XLA: batches are loaded onto the device in advance, and a step executes what was recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from asynccoll.backends.api import Training


class XlaTraining(Training):
    """No DDP, which does not support XLA; torch_xla's own ``optimizer_step`` reduces outside of our order."""

    ddp = False
    pins_memory = False
    wraps_loader = True

    def loader(self, loader: DataLoader[object], device: torch.device, log: logging.Logger) -> object:
        from torch_xla.distributed import parallel_loader

        class MpDeviceLoader(parallel_loader.MpDeviceLoader):  # type: ignore[misc]  # torch_xla is not typed
            def __iter__(self) -> Any:
                counting = getattr(loader.sampler, "counting", None)  # if it is a sampler of ours
                return counting(self._begin, loader) if counting else self._begin()

            def _begin(self) -> _Batches:
                self._loader = source = _Source(loader)
                return _Batches(source, super().__iter__())

        log.info("DataLoader is wrapped by `MpDeviceLoader` on XLA")
        wrapped = MpDeviceLoader(loader, device)
        wrapped.sampler = loader.sampler
        return wrapped

    def adopt(self, optimizer: Optimizer) -> None:
        optimizer.register_step_post_hook(_execute)


class _Source:
    """``loader`` for one iteration in torch_xla's thread: it runs as the rank that began the iteration.

    If it raises there, torch_xla would end the epoch as if there were no more batches.
    """

    def __init__(self, loader: DataLoader[object]) -> None:
        self._loader = loader
        self._run = copy_context().run
        self.failed: list[Exception] = []

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[object]:
        try:
            batches = self._run(iter, self._loader)
            while (batch := self._run(next, batches, self)) is not self:
                yield batch
        except Exception as error:  # for the training loop to raise
            self.failed.append(error)


class _Batches(Iterator[Any]):
    """The batches of one iteration on the device, and the error of ``source`` after the last one."""

    def __init__(self, source: _Source, batches: Any) -> None:
        self._source, self._batches = source, batches

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            if self._source.failed:
                raise self._source.failed.pop() from None
            raise

    def __len__(self) -> int:
        return len(self._batches)


def _execute(*_: object) -> None:
    """Have XLA run what the step has recorded, as its own ``optimizer_step`` does."""
    import torch_xla

    torch_xla.sync()
