"""A fake device that lags behind the host: kernels on its streams run when the test lets them.

It stands in for CUDA and nccl where the code under test uses them: ``torch.cuda``'s streams and events, and a
native process group whose works are ordered by streams (gloo carries the bytes once the device gets there).
Everything in between is real. Computations of torch under ``Deferring`` are launched as kernels, too: they
are computed immediately, from whatever the memory holds too early, and again when the kernel's turn comes.
Code that is not ordered after its inputs therefore gets wrong numbers: if several streams can proceed, the
device picks the user's before a communicator's.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asynccoll.backends.c10d.communicator import C10dCommunicator, Transport, _abort
from asynccoll.backends.c10d.completion import StreamCompletion
from asynccoll.runtime import process as runtime
from asynccoll.transport.communicator import Opening
from patience import patient

Kernel = Callable[[], bool]


class Device:
    """Streams, and a thread that runs their kernels while the test lets it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.streams: list[Stream] = []
        self.default = Stream(self)
        self.failure: Exception | None = None
        self.asked = 0  # how often the host has polled an event
        self.closed: list[int] = []  # for each group that was shut down, how many kernels it still had
        self.capturing = False
        self._going = self._over = False
        self._go_after: int | None = None
        self._here = threading.local()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def current(self) -> Stream:
        return getattr(self._here, "stream", self.default)

    def go(self) -> None:
        """Let the device run."""
        with self.changed:
            self._going = True
            self.changed.notify_all()

    def hold(self) -> None:
        """Let the device catch up, then stop it."""
        self.settle()
        with self.changed:
            self._going = False

    def go_once_asked(self, times: int) -> None:
        """Let the device run once the host has polled events this many times."""
        self.asked, self._go_after = 0, times

    def settle(self) -> None:
        """Let the device run until no kernel is left."""
        self.go()
        with self.changed:
            assert self.changed.wait_for(lambda: not self.behind, patient(10)), "the device hangs"

    @property
    def behind(self) -> int:
        return sum(len(stream.kernels) for stream in self.streams)

    def was_asked(self) -> None:
        self.asked += 1
        if self._go_after is not None and self.asked >= self._go_after:
            self.go()

    def end(self) -> None:
        with self.changed:
            self._over = True
            self.changed.notify_all()
        self._thread.join()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Like ``torch.cuda.stream``: launch computations in the block on this stream, on any thread."""
        before = self.current
        self._here.stream = stream
        try:
            with Deferring(self):
                yield
        finally:
            self._here.stream = before

    def _run(self) -> None:
        with torch.no_grad(), self.changed:
            while not self._over:
                if not (self._going and any(stream.step() for stream in self.streams)):
                    self.changed.wait(0.001 if self._going and self.behind else None)


class Stream:
    """Kernels that run one after the other."""

    def __init__(self, device: Device, *, late: bool = False) -> None:
        """``late``: the other streams that can proceed run first."""
        self._device = device
        self.kernels: deque[Kernel] = deque()
        device.streams.insert(len(device.streams) if late else 0, self)

    def launch(self, kernel: Kernel) -> None:
        """Queue ``kernel``, which returns whether it has completed; if not, it is called again."""
        with self._device.changed:
            self.kernels.append(kernel)
            self._device.changed.notify_all()

    def step(self) -> bool:
        """Run the next kernel as far as possible. Returns whether it completed."""
        if not self.kernels or not self.kernels[0]():
            return False
        self.kernels.popleft()
        self._device.changed.notify_all()
        return True

    def wait_event(self, event: Event) -> None:
        done = event.recorded
        self.launch(lambda: done[0])


class Event:
    """Like ``torch.cuda.Event``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.recorded = [True]

    def record(self, stream: Stream) -> None:
        self.recorded = done = [False]

        def come() -> bool:
            done[0] = True
            return True

        stream.launch(come)

    def query(self) -> bool:
        self._device.was_asked()
        return self.recorded[0]

    def synchronize(self) -> None:
        with self._device.changed:
            self._device.changed.wait_for(lambda: self.recorded[0] or self._device.failure)
        if self._device.failure is not None:
            raise self._device.failure


class Deferring(TorchDispatchMode):
    """Launches computations in the block on the device's current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:  # the host reads the value
            self._device.settle()
            return func(*args, **kwargs)
        schema = func._schema
        written = [i for i, arg in enumerate(schema.arguments) if arg.alias_info and arg.alias_info.is_write]
        if written:  # in place, or with out=
            name = schema.arguments[written[0]].name
            filled = kwargs[name] if name in kwargs else args[written[0]]
            self._device.current.launch(lambda: _uncounted(filled, lambda: func(*args, **kwargs)))
            return filled
        out = func(*args, **kwargs)
        if any(one.alias_info for one in schema.returns) or "empty" in schema.name:  # a view, or no value
            return out
        self._device.current.launch(lambda: _copied(out, func(*args, **kwargs)))
        return out


def _copied(to: Any, of: Any) -> bool:
    for mine, right in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (to, of)), strict=True):
        _uncounted(mine, partial(mine.copy_, right))
    return True


def _uncounted(filled: Any, write: Callable[[], object]) -> bool:
    """Write without counting it: torch counts a write at its launch, not when the device executes it."""
    with torch.autograd._unsafe_preserve_version_counter(filled):
        write()
    return True


class Group:
    """A native group whose works are ordered by its own stream; the bytes are sent over gloo."""

    def __init__(self, device: Device, gloo: Any) -> None:
        self._device = device
        self._gloo = gloo
        self._stream = Stream(device, late=True)
        self._aborted = False
        self.issued_on: list[Stream] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._gloo, name)

        def issue(*args: Any) -> GroupWork:
            works: list[Any] = []

            def kernel() -> bool:
                if self._aborted:
                    return True
                if not works:
                    works.append(method(*args))
                return bool(works[0].is_completed()) and _went_well(works[0])

            self.issued_on.append(self._device.current)
            before, after = Event(self._device), Event(self._device)
            before.record(self._device.current)
            self._stream.wait_event(before)
            self._stream.launch(kernel)
            after.record(self._stream)
            return GroupWork(self._device, after)

        return issue

    def name(self) -> str:
        return "nccl"

    def rank(self) -> int:
        return int(self._gloo.rank())

    def size(self) -> int:
        return int(self._gloo.size())

    def shutdown(self) -> None:
        self._device.closed.append(len(self._stream.kernels))

    def abort(self) -> None:
        self._aborted = True
        _abort(self._gloo)
        with self._device.changed:
            self._device.changed.notify_all()


def _went_well(work: Any) -> bool:
    """Whether the work succeeded. A kernel whose peer is lost keeps waiting until it is aborted."""
    try:
        return bool(work.wait())
    except RuntimeError:
        return False


class GroupWork:
    """Like nccl's work: the host never waits for it."""

    def __init__(self, device: Device, end: Event) -> None:
        self._device = device
        self._end = end

    def wait(self) -> bool:
        self._device.current.wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return self._end.query()


@contextlib.contextmanager
def device() -> Iterator[Device]:
    """Put the lanes that are opened in the block, and torch's computations, on such a device."""
    one = Device()
    backend: Any = runtime.current().backend
    open_real = backend.open
    lanes: list[Any] = []

    def open_here(opening: Opening) -> C10dCommunicator:
        communicator: Any = open_real(opening)
        lanes.append(runtime.current().groups[opening.ranks].known_by(opening.lane))
        native = communicator._transports["cpu"].native
        communicator._only = Transport(Group(one, native), StreamCompletion)
        communicator._transports = {"cpu": communicator._only}
        return communicator  # type: ignore[no-any-return]  # it is one

    stands_in = {
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: one.capturing,
        "current_stream": lambda _device=None: one.current,
        "stream": one.on,
        "Event": lambda **_options: Event(one),
    }
    with (
        mock.patch.multiple(torch.cuda, **stands_in),
        mock.patch.object(backend, "open", open_here),
    ):
        try:
            with Deferring(one):
                yield one
            one.settle()
        finally:
            one.end()
            for lane in lanes:  # their works can no longer be polled
                lane._out.clear()
