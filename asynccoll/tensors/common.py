"""Shared by the collectives of one tensor: planning, issuing, and the memory of results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from asynccoll import host
from asynccoll.backends.choosing import lazy
from asynccoll.errors import CollectiveError, InvalidArgumentError, PayloadTypeError, UnsupportedOpError
from asynccoll.health.checks import checked
from asynccoll.host.call_site import Spot, site
from asynccoll.memory.aliasing import has_memory, may_overlap, same_memory
from asynccoll.memory.fresh import fresh
from asynccoll.memory.plain import ORDINARY
from asynccoll.modes.captured import as_called
from asynccoll.modes.unseen import unseen
from asynccoll.order.job import Program, Start, What
from asynccoll.order.lane import Lane
from asynccoll.order.operation import Operation
from asynccoll.plan import dispatch
from asynccoll.plan.spec import Op, Plan, ReduceOp, TensorSpec, Wire, dtype_name
from asynccoll.plan.texts import shown
from asynccoll.tensors.encoding import decode, encode
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Promise, Transfer
from asynccoll.transport.streams import carried
from asynccoll.transport.waiters import Waiters
from asynccoll.waiting.started import Started
from asynccoll.waiting.suspending import in_loop

#: Above this size the copy that a functional result needs would block the event loop for more than a
#: millisecond (64 MiB: about 50 ms of page faults), so a thread makes it, while the operation keeps its place
#: in the lane. An operation of 4 ms takes 0.7 ms longer this way: the thread has to wake, then the waiter.
OFFLOAD_BYTES = 4 << 20
_nbytes = attrgetter("nbytes")
_copiers = host.per_process(lambda: Waiters("asynccoll-copy"))


class Route:
    """A plan, and what is known about the tensors that it applies to. Each call looks it up once."""

    __slots__ = ("_plain", "in_order", "keeps_input", "near", "plan")

    def __init__(self, lane: Lane, op: Op, x: torch.Tensor, reduce: ReduceOp | None) -> None:
        spec = TensorSpec.of(x)
        topology = lane.group.topology(spec.device)
        self.plan: Plan = dispatch.plan(op, spec, topology, lane.world.policy, reduce)
        #: whether the native call leaves its input unchanged
        self.keeps_input: bool = op in topology.capabilities.keeps_input
        #: whether calls that go node by node use shared memory within a node
        self.near: bool = bool(topology.capabilities.near)
        #: whether the elements lie in memory in the order of their indices
        self.in_order: bool = spec.contiguous
        as_it_is = self.plan.wire is Wire.SAME and self.plan.stage is None
        self._plain = (
            as_it_is and spec.contiguous and not (spec.sparse or spec.dtype.is_complex) and has_memory(x)
        )

    def plain(self, x: torch.Tensor) -> bool:
        """Whether the memory of ``x`` can be sent as it is."""
        return self._plain and type(x) in ORDINARY and not x.is_neg()


def route_for(lane: Lane, op: Op, x: torch.Tensor, reduce: ReduceOp | None, numel: int) -> Route:
    """Return the route for ``x``, which has ``numel`` elements, from the lane's own small cache.

    A plan depends on the size only by its power of two (``spec.size_class``).
    """
    layout = x.layout
    dense = layout is torch.strided
    if not dense and layout is not torch.sparse_coo:
        raise UnsupportedOpError(
            f"{op.value} of a tensor of layout {str(layout).removeprefix('torch.')} is not supported; pass a "
            "dense one, such as x.to_dense(), or its parts"
        )
    key = (op, reduce, x.dtype, x.device, layout, dense and x.is_contiguous(), numel.bit_length())
    found: Route | None = lane.routes.get(key)
    if found is None:
        if x.device.type == "meta":
            raise PayloadTypeError(
                f"{op.value} of a meta tensor: it has no data to send; materialise it first, as in "
                "torch.empty_like(x, device='cpu')"
            )
        home = lane.world.device
        if x.device.type == home.type == "xla" and x.device != home:  # two ranks would launch there
            raise InvalidArgumentError(
                f"{op.value} of a tensor on {x.device}, another rank's device: this rank's is {home} "
                "(ac.device())"
            )
        found = lane.routes[key] = Route(lane, op, x, reduce)
    return found


def plan_for(lane: Lane, op: Op, x: torch.Tensor, reduce: ReduceOp | None = None) -> Plan:
    """Return the plan for ``x``."""
    return route_for(lane, op, x, reduce, x.numel()).plan


#: Makes the calls that precede a call at this place of the lane's order, made at this line.
Ahead = Callable[[int, Spot, Communicator], Generator[Completion, None, None]]


@dataclass(eq=False, repr=False, slots=True)
class Call:
    """A call that has been planned and has its memory, and what remains to be done once it completes.

    ``start`` makes the native call, unless ``program`` makes several. ``fill`` puts the data to be sent where
    these calls read it before the first start, ``refill`` before any later start (None: it is already there).
    The result is what ``finish`` returns, or ``value`` without it. ``ahead``, given the place of a start in
    the lane's order and its line, makes calls that precede it, and may raise. ``done`` is where
    ``finish`` keeps what it must not compute again, should the next waiter run it again after Ctrl-C.
    """

    plan: Plan
    start: Start | None
    wire: torch.Tensor
    finish: Callable[[], object] | None
    value: object = None
    _: KW_ONLY
    shape: tuple[Any, ...] | None = None
    detail: object = ""
    fill: Callable[[], object] | None = None
    refill: Callable[[], object] | None = None
    program: Program | None = None
    ahead: Ahead | None = None
    done: list[torch.Tensor] | None = None

    def begin(self, lane: Lane, timeout: float | None) -> Started[Any]:
        """Start the call for the first time."""
        return self._begin(lane, timeout, self.fill)

    def begin_again(
        self, lane: Lane, timeout: float | None, after: Sequence[Operation] = ()
    ) -> Started[object]:
        """Start the call again, with its input's content once the operations ``after`` are over."""
        if self.done:
            self.done.clear()
        if after:
            return self._run(lane, timeout, _after(after, self.refill, self.steps), host.monotonic())
        return self._begin(lane, timeout, self.refill)

    def _begin(self, lane: Lane, timeout: float | None, fill: Callable[[], object] | None) -> Started[object]:
        called = host.monotonic()  # before the copy below, which counts as communication
        size_bytes = self.wire.nbytes
        if fill is not None and (size_bytes <= OFFLOAD_BYTES or not (has_memory(self.wire) and in_loop())):
            if self.value is not self.wire and self.value is not None:  # the user's ``out``, which this fills
                lane.admit()
            fill()
            fill = None
        if fill is not None or self.program is not None or self.ahead is not None or lane.compares_calls:
            steps = self.steps if fill is None else _after((), fill, self.steps)
            return self._run(lane, timeout, steps, called)
        assert self.start is not None
        estimate = lane.estimate(self.plan.name, size_bytes)
        operation = lane.issue(
            estimate, self.start, size_bytes, timeout, of=self, what=self._what(), called=called
        )
        return Started((operation,), self.finish, self.value)

    def _run(self, lane: Lane, timeout: float | None, program: Program, called: float) -> Started[object]:
        name, wire, what = self.plan.name, self.wire, self._what()
        if self.ahead is not None:
            program = _preceded(partial(self.ahead, lane.upcoming(what)[1], site()), program)
        if lane.compares_calls:
            program = checked(lane, what, program=program)
        operation = lane.run(name, program, wire.nbytes, timeout, what=what, of=self, called=called)
        return Started((operation,), self.finish, self.value)

    def _what(self) -> What:
        """Return what has to be the same on all ranks."""
        dtype = None if self.plan.op is Op.BARRIER else self.wire.dtype
        return self.plan.name, self.detail, dtype, self.shape

    def _dtype(self) -> str:
        """Return the name of the dtype; "" for a barrier, which has none."""
        return "" if self.plan.op is Op.BARRIER else dtype_name(self.wire.dtype)

    def detail_text(self) -> str:
        """Return what the call does beyond its name: the reduction, the root."""
        return "" if self.detail is None else str(getattr(self.detail, "value", self.detail))

    def described(self) -> str:
        """Return a description of the call's data: ``float32[4, 8] sum``."""
        shape = "" if self.shape is None else shown(list(self.shape))
        return f"{self._dtype()}{shape} {self.detail_text()}".strip()

    def steps(self, communicator: Communicator) -> Generator[Completion, None, Completion]:
        """Run the call as a program, or as a part of a larger one."""
        if self.program is not None:
            return (yield from self.program(communicator))
        assert self.start is not None
        return self.start(communicator)

    def outcome(self) -> Any:
        """Return the result, once the native call is over."""
        return self.value if self.finish is None else self.finish()

    def then(self, function: Callable[[Any], object]) -> Call:
        """Return this call, with ``function`` applied to its result."""
        finish, value = self.finish, self.value
        self.finish = lambda: function(value if finish is None else finish())
        self.value = None
        return self


def _preceded(ahead: Callable[[Communicator], Iterable[Completion]], steps: Program) -> Program:
    """Return a program that runs ``ahead``, then ``steps``."""

    def both(communicator: Communicator) -> Generator[Completion, None, Completion]:
        yield from ahead(communicator)
        return (yield from steps(communicator))

    return both


def _after(operations: Sequence[Operation], fill: Callable[[], object] | None, steps: Program) -> Program:
    """Return ``steps`` to be run after ``operations``, however these end, and after ``fill`` in a thread."""

    def filled(communicator: Communicator) -> Generator[Completion, None, Completion]:
        for operation in operations:
            with contextlib.suppress(Exception):
                yield operation.completion
        if fill is not None:
            yield in_thread(fill)
        return (yield from steps(communicator))

    return filled


def in_thread(job: Callable[[], object]) -> Promise:
    """Run ``job`` in another thread. The promise is settled when that ends, with its error if it raises."""
    promise = Transfer()
    return _copiers.run(promise, carried(as_called(job)), promise)


def physical(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` without autograd history, lazy conjugation or negation: what its memory really holds."""
    if x.is_complex() and x.is_conj():
        x = x.resolve_conj()
    if x.is_neg():
        x = x.resolve_neg()
    return x.detach() if has_memory(x) else _computed(x)


def _computed(x: torch.Tensor) -> torch.Tensor:
    """Return the value that a lazy tensor has now, as a tensor of our own that the user cannot write to.

    The graph runs here, in the user's thread, where no other thread touches it. No memory is copied yet.
    """
    try:
        lazy(x.device).compute(x)
    except RuntimeError as error:
        raise CollectiveError(f"the input could not be computed on {x.device}: {error}") from error
    return x.detach().clone()


def _twin(x: torch.Tensor) -> torch.Tensor:
    """Return the value of a lazy tensor (``_computed``), ready to be sent as it is."""
    twin: torch.Tensor = lazy(x.device).settled(physical(x))
    return twin


def check_out(out: torch.Tensor | None, x: torch.Tensor, shape: Sequence[int]) -> None:
    """Refuse an ``out`` that cannot hold a result of ``shape`` as it is."""
    if out is None or (out is x and x.shape == torch.Size(shape)):
        return
    if not isinstance(out, torch.Tensor):
        raise PayloadTypeError(f"out must be a tensor, got {type(out).__name__}")
    if not _holds(out, x, shape):
        raise InvalidArgumentError(f"out is {_described(out, out.shape)}; expected {_described(x, shape)}")


def _holds(out: torch.Tensor, x: torch.Tensor, shape: Sequence[int]) -> bool:
    alike = out.dtype is x.dtype and out.device == x.device and out.layout is x.layout
    return alike and out.shape == torch.Size(shape)


def _described(x: torch.Tensor, shape: Sequence[int]) -> str:
    layout = "" if x.layout is torch.strided else f" ({str(x.layout).removeprefix('torch.')})"
    return f"{dtype_name(x.dtype)}{list(shape)} on {x.device}{layout}"


def kept(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
    """Return where a result of the shape of ``x`` goes: ``out``, or memory with the strides of ``x``.

    Elements are sent in the order of their indices, whatever the strides on each rank. None means that the
    result is wanted in that order, so the received tensor can be the result.
    """
    if out is not None or x.is_contiguous() or x.layout is not torch.strided or not has_memory(x):
        return out
    return torch.empty_like(x, requires_grad=False)


def _can_receive(out: torch.Tensor) -> bool:
    """Whether received data may be written directly to the memory of ``out``."""
    return has_memory(out) and out.is_contiguous() and not (out.is_neg() or out.is_conj())


def target_for(out: torch.Tensor | None, wire: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return memory of ``shape`` for wire elements: the caller's ``out`` if it can be used directly."""
    if out is not None and out.dtype is wire.dtype and out.device == wire.device and _can_receive(out):
        return out.detach().view(shape)
    return fresh(shape, wire)


def undisturbing(out: torch.Tensor | None, wire: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Return ``out``, or None if filling it might change a part of ``wire`` that has yet to be sent.

    The two have to be disjoint, or the shorter one exactly this rank's part of the longer one.
    """
    if out is None or not may_overlap(out, wire):
        return out
    part, whole = sorted((out, wire), key=_nbytes)
    return out if part.data_ptr() == whole.data_ptr() + rank * part.nbytes else None


def deliver(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return the result; copy it to the caller's ``out``, if any, unless it is there already."""
    if out is None:
        return result
    if out is not result and not (same_memory(out, result) and _can_receive(out)):
        out.detach().copy_(result.view(out.shape))
    return out


def delivered(
    wire: torch.Tensor, plan: Plan, out: torch.Tensor | None, decoded: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor | None, Callable[[], torch.Tensor] | None]:
    """Return ``value`` and ``finish`` for a ``Call``: ``wire`` as the result, or how it is made from it."""
    if not plan.direct:
        return None, lambda: deliver(decoded(), out)
    if out is None:
        return wire, None
    if out is wire or (same_memory(out, wire) and _can_receive(out)):
        return out, None
    return None, lambda: deliver(wire, out)


def sent_as(route: Route, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as it is sent: in its own memory if nothing has to change."""
    if route.plain(x):
        return x.detach() if x.requires_grad else x
    return encode(physical(x), route.plan)


def wire_like(route: Route, like: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return what is received for a tensor like ``like``: an example of its elements, and its shape."""
    if route.plan.direct:
        return like, tuple(like.shape)
    example = encode(torch.empty(0, dtype=like.dtype, device=like.device), route.plan)
    ratio = like.element_size() // example.element_size()
    return example, tuple(like.shape) if ratio == 1 else (like.numel() * ratio,)


def owned(
    route: Route, x: torch.Tensor, out: torch.Tensor | None
) -> tuple[torch.Tensor, Callable[[], object] | None, Callable[[], object] | None]:
    """Return a wire tensor for ``x`` that may be overwritten, and what fills it first, and later.

    These are ``fill`` and ``refill`` of a ``Call``; None means that there is nothing to do.
    """
    plan = route.plan
    if (out is None or (out is x and plan.direct)) and route.plain(x):
        wire = x.detach() if x.requires_grad else x
        if out is x:
            return wire, None, None
        buffer = torch.empty_like(wire)
        copy = partial(buffer.copy_, wire)
        return buffer, copy, copy
    if not has_memory(x):
        wire = _twin(x) if plan.direct else encode(physical(x), plan).clone()
        return wire, None, encoding_again(wire, x, plan)
    wire = sent_as(route, x)
    ours = not (wire is x or same_memory(wire, x)) or not wire.numel()
    if out is x and not ours:
        return wire, None, None  # in place, even if what is received has to be processed further
    into = out if out is not None and plan.direct and _can_receive(out) else None
    if ours and into is None:
        return wire, None, encoding_again(wire, x, plan)
    buffer = target_for(into, wire, wire.shape)
    if same_memory(buffer, wire) and wire.numel():
        return buffer, None, None
    if into is not None and may_overlap(buffer, wire):
        across = lambda: buffer.copy_(encode(physical(x), plan).clone())  # noqa: E731  # they overlap
        return buffer, across, across
    return buffer, lambda: buffer.copy_(wire), encoding_again(buffer, x, plan)


def encoding_again(wire: torch.Tensor, x: torch.Tensor, plan: Plan) -> Callable[[], object] | None:
    """Return what updates ``wire``, the encoded ``x``, when ``x`` has changed; None if they share memory."""
    if wire is x or same_memory(wire, x):
        return None
    if plan.wire is Wire.SAME and has_memory(x) and not x.is_complex() and not x.is_neg():
        return partial(wire.view(x.shape).copy_, x.detach())
    return lambda: wire.view(-1).copy_(encode(physical(x), plan).view(-1))


@unseen  # else modes of torch run Python code, in which Ctrl-C strikes
def reduced(
    wire: torch.Tensor, plan: Plan, x: torch.Tensor, size: int, done: list[torch.Tensor]
) -> torch.Tensor:
    """Return what a reduction has left in ``wire``, as ``x`` was: divided for an average, and decoded.

    ``done`` is that of the call: it is empty until ``wire`` has been divided.
    """
    if plan.divide and not done:
        done.extend(map(wire.div_, (size,)))  # in one C call: no signal handler runs in between
    return decode(wire, plan, x.dtype, x.device)
