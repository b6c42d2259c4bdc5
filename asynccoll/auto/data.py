"""One rank's share of the data: ``auto_dataloader`` and ``DistributedProxySampler``, by ignite's rules."""

from __future__ import annotations

import math
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from types import FrameType
from typing import Any

import torch
from torch.utils import data as torch_data
from torch.utils.data import Dataset, IterableDataset, distributed
from torch.utils.data.sampler import Sampler

from asynccoll import host
from asynccoll.auto.place import Place, here
from asynccoll.errors import InvalidArgumentError, InvalidCallError
from asynccoll.host.forks import renew
from asynccoll.host.misfits import check_count, integer, misfit
from asynccoll.runtime.process import get_rank, get_world_size


@dataclass(slots=True)
class _Iteration:
    """The progress of one iteration of a sampler; that of an iteration that was left stops changing."""

    began: int = 0  # samples, of all ranks, that the iteration skips
    drawn: int = 0  # samples of this rank drawn since
    taken: int | None = None  # those that a loop has received; None: not counted, so all that are drawn
    ahead: bool = False  # whether workers draw them, ahead of the loop
    shuffled: bool = False  # whether the loop receives batches in another order than they are drawn in


class Resumable(distributed.DistributedSampler[Any]):
    """This rank's share of an order that is the same on all ranks; an epoch can be left and resumed.

    A subclass draws the order. Only the constructor and ``set_epoch`` are torch's.
    """

    _next = 0  # samples, of all ranks, that the next iteration skips
    _now = _Iteration()  # the latest iteration; a resumed one is set here before it begins

    @abstractmethod
    def _order(self, size: int) -> list[Any]:
        """Return the first ``size`` samples of the epoch, or more, from one draw after another."""

    @property
    @abstractmethod
    def _length(self) -> int:
        """The number of samples in an epoch."""

    def __iter__(self) -> Iterator[Any]:
        # Runs when the first sample is drawn, not before: torch makes two iterators if there are workers and
        # no batches.
        now = self._now = _Iteration(self._next, ahead=_is_drawn_for_workers())
        self._next = 0
        first, size = now.began, len(self) * self.num_replicas
        mine = self._order(first + size)[first + self.rank : first + size : self.num_replicas]
        if len(mine) != len(self):
            raise RuntimeError(f"{len(mine)} vs {len(self)}")
        for one in mine:
            now.drawn += 1
            yield one

    def __len__(self) -> int:
        """Return the number of this rank's samples in this iteration.

        It stays the same from ``load_state_dict`` until another iteration begins. It does not change while
        samples are drawn, since workers draw ahead of the loop, and the loop uses ``len(loader)`` to know its
        last batch.
        """
        return math.ceil((self._length - self._now.began) / self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. A different epoch begins at its start; the one being resumed, where it was left."""
        if epoch != self.epoch:
            self._next, self._now = 0, _Iteration()
        super().set_epoch(epoch)

    def state_dict(self, taken: int | None = None) -> dict[str, int]:
        """Return the epoch, and how many samples of it all ranks have taken: the same on ranks in step.

        ``taken`` is how many samples this rank has trained on since the iteration began. None counts those in
        the batches that the loop has received from a loader of ``auto_dataloader``, whose workers may be
        ahead of the loop. Other loaders do not count: then all samples drawn are considered taken, which is
        too many if there are workers, and a warning says so. There is also a warning for a loader with
        ``in_order=False`` in the middle of an epoch: no number says which batches it has yet to yield.

        Raises:
            InvalidArgumentError: more were taken than drawn.

        Source: ``torchdata.stateful_dataloader``, whose samplers have these methods.
        """
        now = self._now
        if now.shuffled and now.taken not in (0, now.drawn):
            warnings.warn(_OUT_OF_ORDER, stacklevel=2)
        if taken is None:
            if now.ahead and now.taken is None:
                _warn_of_workers(now.drawn)
            taken = now.drawn if now.taken is None else now.taken
        count = integer(taken)
        if count is None or not 0 <= count <= now.drawn:
            raise InvalidArgumentError(f"state_dict: taken={taken!r}, but {now.drawn} samples were drawn")
        seen = min(now.began + count * self.num_replicas, self._length)
        return {"epoch": self.epoch, "seen": seen, "length": self._length}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Have the next iteration continue where ``state_dict`` was called; later ones are whole again.

        Raises:
            InvalidArgumentError: the state is from a sampler of another length, or of no sampler.
        """
        if not isinstance(state, Mapping) or not {"epoch", "seen", "length"} <= state.keys():
            raise misfit("the state of a sampler", "a dict of 'epoch', 'seen' and 'length'", state, _SAVED)
        if state["length"] != self._length:
            raise InvalidArgumentError(
                f"load_state_dict: the state is for {state['length']} samples, but this sampler has "
                f"{self._length}"
            )
        if not 0 <= state["seen"] <= self._length:
            raise InvalidArgumentError(
                f"load_state_dict: seen={state['seen']!r} of {self._length} samples: {_SAVED}"
            )
        self.set_epoch(state["epoch"])
        self._next, self._now = state["seen"], _Iteration(state["seen"])

    def counting(
        self, begin: Callable[[], Iterator[Any]], loader: torch_data.DataLoader[Any]
    ) -> Iterator[Any]:
        """Iterate over what ``begin`` returns, batches of ``loader``, and count what the loop takes."""
        return _Taken(self, begin, loader)


_SAVED = "load what the state_dict() of such a sampler gave"
_OUT_OF_ORDER = (
    "state_dict in the middle of an epoch, of a loader with in_order=False: it yields batches as its "
    "workers finish them, and resuming skips the first ones that were drawn, not those that the loop got. "
    "Leave in_order= out, or save between epochs"
)


def _is_drawn_for_workers() -> bool:
    """Whether torch's loader is drawing now, for its workers: nothing but the call stack tells."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_try_put_index":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == torch_data.dataloader.__file__


def _warn_of_workers(drawn: int) -> None:
    warnings.warn(
        f"state_dict counts all {drawn} samples drawn, but the loader has workers, which draw ahead: "
        "samples that the loop has not received are skipped on resuming. "
        "ac.auto_dataloader(dataset, sampler=...) makes a loader that counts what the loop got; or pass "
        "state_dict(taken=...), samples of this rank",
        stacklevel=3,
    )


class _Taken(Iterator[Any]):
    """A loader's iterator that also notes how many samples it has yielded."""

    def __init__(
        self, sampler: Resumable, begin: Callable[[], Iterator[Any]], loader: torch_data.DataLoader[Any]
    ) -> None:
        before = sampler._now
        self._sampler, self._batches, self._batch_size = sampler, begin(), loader.batch_size or 1
        # With workers the sampler begins immediately; without them, at the first batch.
        self._iteration = None if sampler._now is before else sampler._now
        if self._iteration is not None:
            self._iteration.taken = 0
            in_order = getattr(loader, "in_order", True)  # torch has it since 2.6
            self._iteration.shuffled = loader.num_workers > 1 and not in_order

    def __next__(self) -> Any:
        batch = next(self._batches, self)
        now = self._iteration = self._iteration or self._sampler._now
        if batch is self:  # the end: samples that fill no whole batch are dropped, not left for later
            now.taken = now.drawn
            raise StopIteration
        now.taken = min((now.taken or 0) + self._batch_size, now.drawn)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # torch's and torch_xla's have one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batches, name)


#: Held while an order is drawn from torch's random numbers: ranks that are threads share these.
_seeded = host.RLock()
renew(_seeded)


class DistributedProxySampler(Resumable):
    """This rank's share of what another sampler draws; every rank draws the same.

    The order of an epoch is what ``sampler`` draws with the epoch's number as the seed (``set_epoch``); if
    it does not divide evenly, another draw fills it up. The seed is that of torch's random numbers, whose
    state is restored afterwards. A sampler with a ``generator``, which must have the same seed on every rank,
    draws with the sum of that seed and the epoch's number. Where ranks are threads (``xla-tpu``), one draws
    at a time, so a sampler must not communicate meanwhile.

    An epoch can be resumed in the middle, also on another number of ranks: ``state_dict`` says how far all
    ranks together have got, and after ``load_state_dict`` the next iteration yields what is left. Until that
    iteration ends, the length is that of what is left; ``set_epoch`` of the next epoch makes it whole again.

    Args:
        sampler: any sampler of a constant length.
        num_replicas, rank: the number of shares, and which of them this is. The defaults are
            ``ac.get_world_size()`` and ``ac.get_rank()``: without a launcher, the only share there is.
    """

    def __init__(
        self, sampler: Sampler[object], num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        if not isinstance(sampler, Sampler):
            raise InvalidCallError(
                f"Argument sampler should be instance of torch Sampler, but given: {type(sampler)}"
            )
        if isinstance(sampler, distributed.DistributedSampler):
            raise InvalidCallError("Argument sampler must not be a distributed sampler already")
        if not hasattr(sampler, "__len__"):
            raise InvalidCallError("Argument sampler should have length")
        num_replicas = get_world_size() if num_replicas is None else num_replicas
        rank = get_rank() if rank is None else rank
        check_count("num_replicas", num_replicas)
        check_count("rank", rank, 0)
        generator = getattr(sampler, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        seed = 0 if self._generator is None else self._generator.initial_seed()
        super().__init__(sampler, num_replicas=num_replicas, rank=rank, shuffle=False, seed=seed)  # type: ignore[arg-type]  # of a dataset it needs the length
        self.sampler = sampler

    @property
    def _length(self) -> int:
        return len(self.sampler)

    def _order(self, size: int) -> list[Any]:
        drawn: list[Any] = []
        # Restored afterwards: the loop's own random numbers (dropout, seeds of workers) may differ by rank.
        with _seeded, torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(self.epoch)
            if self._generator is not None:
                self._generator.manual_seed((self.seed + self.epoch) % (1 << 64))
            while len(drawn) < size:
                before = len(drawn)
                drawn += list(self.sampler)
                if len(drawn) == before:
                    raise RuntimeError(
                        f"{self.sampler!r} draws nothing, but has a length of {len(self.sampler)}"
                    )
        return drawn


class DistributedSampler(Resumable):
    """torch's ``DistributedSampler``, with the same order, but resumable like ``DistributedProxySampler``."""

    @property
    def _length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # as torch's does

    def _order(self, size: int) -> list[Any]:
        order = list(range(self._length))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._length, generator=generator).tolist()
        return list(islice(cycle(order), size))


class DataLoader(torch_data.DataLoader[Any]):
    """torch's ``DataLoader``, whose sampler also learns what the loop has received: workers draw ahead."""

    def __iter__(self) -> Any:
        if not isinstance(self.sampler, Resumable):  # a batch sampler was set later
            return super().__iter__()
        return self.sampler.counting(super().__iter__, self)


def auto_dataloader(dataset: Dataset[object], **kwargs: object) -> Any:
    """Return a ``DataLoader`` for this rank, with its share of batch, workers and data.

    The arguments are the usual ones.

    - ``batch_size`` is divided by the number of ranks (if it is at least that), ``num_workers`` by the
      number of ranks on the node. If the batch of all ranks together is then another size, a warning says so.
    - Without a sampler a ``DistributedSampler`` is made (``shuffle`` defaults to True), which also has
      ``state_dict`` and ``load_state_dict``. A ``DistributedSampler`` of torch is used as it is; any other
      sampler is wrapped in a ``DistributedProxySampler``.
    - ``loader.sampler.state_dict()`` says where the loop is: it counts the batches that the loop has
      received, not those that workers have prefetched.
    - In a world of one the same samplers are made, so that the program, and its checkpoint, are the same as
      for many ranks.
    - An iterable dataset is used as it is: it must itself produce different data on each rank. So must a
      ``batch_sampler``, and a warning says so.
    - ``pin_memory`` defaults to True if the device is a GPU. On xla-tpu the loader is wrapped in torch_xla's
      ``MpDeviceLoader``.
    """
    _check_loader(dataset, kwargs)
    place = here()
    if place.rank == 0:
        _tell_uneven(kwargs.get("batch_size"), place.world_size)
    return dataloader_for(place, dataset, kwargs, shares_alone=True)


def _check_loader(dataset: object, given: Mapping[str, object]) -> None:
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
        is_loader = isinstance(dataset, torch_data.DataLoader)
        instead = "it makes the DataLoader itself: pass loader.dataset" if is_loader else ""
        raise misfit("the dataset of auto_dataloader", "a torch.utils.data.Dataset", dataset, instead)
    if given.get("batch_size") is not None:  # with None the dataset makes the batches
        check_count("batch_size", given["batch_size"])
    check_count("num_workers", given.get("num_workers", 0), 0)


def _tell_uneven(batch_size: Any, ranks: int) -> None:
    """Warn of a batch that does not divide evenly: all ranks together train on one of another size."""
    if not isinstance(batch_size, int) or batch_size % ranks == 0:
        return
    each = batch_size // ranks or batch_size
    warnings.warn(
        f"auto_dataloader: batch_size={batch_size} is not a multiple of {ranks} ranks: each takes {each}, "
        f"{each * ranks} in total per step; pass a multiple of ac.get_world_size()",
        stacklevel=3,
    )


def dataloader_for(
    place: Place, dataset: Dataset[object], kwargs: dict[str, Any], *, shares_alone: bool = False
) -> Any:
    """Return the loader for a given place.

    ``shares_alone``: make samplers in a world of one, too (ignite makes none).
    """
    if place.world_size > 1 or shares_alone:
        _share(place, dataset, kwargs)
    pins = place.training.pins_memory
    if not pins and kwargs.get("pin_memory", False):
        warnings.warn(
            "Found incompatible options: xla support and pin_memory args equal True. "
            "Argument `pin_memory=False` will be used to construct data loader.",
            stacklevel=3,
        )
        kwargs["pin_memory"] = False
    else:
        kwargs["pin_memory"] = kwargs.get("pin_memory", place.device.type == "cuda")
    place.log.info("Use data loader kwargs for dataset '%s': \n\t%s", repr(dataset)[:20].strip(), kwargs)
    wraps = place.world_size > 1 and place.training.wraps_loader
    if wraps or not isinstance(kwargs.get("sampler"), Resumable):
        loader = torch_data.DataLoader(dataset, **kwargs)
    else:
        loader = DataLoader(dataset, **kwargs)
    return place.training.loader(loader, place.device, place.log) if wraps else loader


def _share(place: Place, dataset: Dataset[object], kwargs: dict[str, Any]) -> None:
    """Change ``kwargs`` to this rank's share."""
    if kwargs.get("batch_size") is not None and kwargs["batch_size"] >= place.world_size:
        kwargs["batch_size"] //= place.world_size
    nproc = place.nproc_per_node
    if "num_workers" in kwargs and kwargs["num_workers"] >= nproc:
        kwargs["num_workers"] = (kwargs["num_workers"] + nproc - 1) // nproc
    if kwargs.get("batch_sampler") is not None:
        if place.world_size > 1:
            warnings.warn(
                "Found batch_sampler in provided kwargs. Please, make sure that it is compatible "
                "with distributed configuration",
                stacklevel=4,
            )
    elif isinstance(dataset, IterableDataset):
        place.log.info(
            "Found iterable dataset, dataloader will be created without any distributed sampling. "
            "Please, make sure that the dataset itself produces different data on different ranks."
        )
    else:
        kwargs["sampler"] = _sampler(place, dataset, kwargs)


def _sampler(place: Place, dataset: Dataset[object], kwargs: dict[str, Any]) -> Sampler[object]:
    sampler = kwargs.get("sampler")
    if sampler is None:
        shuffle = kwargs.pop("shuffle", True)  # the loader refuses it together with a sampler
        return DistributedSampler(dataset, num_replicas=place.world_size, rank=place.rank, shuffle=shuffle)
    if not isinstance(sampler, distributed.DistributedSampler):
        return DistributedProxySampler(sampler, num_replicas=place.world_size, rank=place.rank)
    if sampler.rank != place.rank:
        warnings.warn(
            f"Found distributed sampler with rank={sampler.rank}, but process rank is {place.rank}",
            stacklevel=5,
        )
    if sampler.num_replicas != place.world_size:
        warnings.warn(
            f"Found distributed sampler with num_replicas={sampler.num_replicas}, "
            f"but world size is {place.world_size}",
            stacklevel=5,
        )
    return sampler
