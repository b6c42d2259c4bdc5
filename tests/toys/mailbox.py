"""A backend whose calls all go through the store, built on `asynccoll.backends.api` alone."""

from __future__ import annotations

import torch

from asynccoll.backends.api import (
    Backend,
    Capabilities,
    Communicator,
    Completion,
    Context,
    Op,
    Opening,
    Promise,
    ReduceOp,
    Request,
    Waiters,
    Waiting,
    meet,
)

KINDS = (torch.float32, torch.int64, torch.uint8)
CAPABILITIES = Capabilities(
    "mailbox",
    ops=frozenset({Op.ALL_GATHER, Op.ALL_REDUCE, Op.BROADCAST, Op.BARRIER}),
    reduce=tuple((dtype, frozenset({ReduceOp.SUM})) for dtype in KINDS),
    move=frozenset(KINDS),
)


def capabilities(name: str, device: str) -> Capabilities:
    return CAPABILITIES


def create(request: Request) -> Context:
    request.take_options()
    met = meet(request)
    return Context(
        Mailbox(),
        met.identity,
        store=met.store,
        nodes=met.nodes,
        timeout=request.timeout,
        check=request.check,
    )


class Mailbox(Backend):
    name = "mailbox"
    device = torch.device("cpu")

    def capabilities(self, device: str) -> Capabilities:
        return CAPABILITIES

    def open(self, opening: Opening) -> Communicator:
        return Box(opening)

    def close(self, *, abort: bool) -> None:
        """Do nothing: the store is closed with the context."""


class Box(Communicator):
    """One lane: the input of each rank is stored under the numbers of the call and the rank."""

    def __init__(self, opening: Opening) -> None:
        assert opening.clients is not None
        self._store = Waiting(opening.clients, opening.timeout, self._is_over)
        self._rank, self._size, self._name = opening.rank, opening.size, opening.name
        self._reader = Waiters(f"mailbox-{opening.lane}")
        self._calls = 0
        self._over = False

    def _is_over(self) -> bool:
        return self._over

    def _exchange(self, x: torch.Tensor, use) -> Completion:
        """Store `x`; once all ranks have stored theirs, `use` the tensors on another thread."""
        self._calls += 1
        call = f"{self._name}/{self._calls}"
        self._store.set(f"{call}/{self._rank}", x.numpy().tobytes().hex())
        promise = Promise()

        def read() -> None:
            try:
                said = [self._store.get(f"{call}/{rank}").decode() for rank in range(self._size)]
                use([torch.frombuffer(bytearray.fromhex(row), dtype=x.dtype).view(x.shape) for row in said])
            except BaseException as error:
                promise.settle(error)
            else:
                promise.settle()

        self._reader.submit("reader", read)
        return promise

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        return self._exchange(x, lambda rows: out.copy_(torch.cat([row.view(-1) for row in rows])))

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        return self._exchange(x, lambda rows: x.copy_(torch.stack(rows).sum(0)))

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        return self._exchange(x, lambda rows: x.copy_(rows[src]))

    def barrier(self) -> Completion:
        return self._exchange(torch.zeros(1), lambda rows: None)

    def retire(self) -> bool:
        self._over = True
        return True

    def close(self) -> None:
        self._over = True

    def abort(self) -> None:
        self._over = True
