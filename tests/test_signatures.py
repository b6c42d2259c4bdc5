"""Calls that fit no signature, as users of torch.distributed make them: the error writes the right one."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asynccoll as ac
from patience import patient
from ranks import Rank, raising
from worlds import World

X = torch.ones(2)
called: Any = ac  # wrongly, which a type checker would say

DROPPED = "starts at once and returns a Work: drop async_op"
RETURNED = "the result is returned"
MISFITS = {
    "reduction": (lambda: called.all_reduce(X, dist.ReduceOp.MAX), ["all_reduce(x, op='max')"]),
    "by name": (lambda: called.all_reduce(X, "mean"), ["all_reduce(x, op='avg')"]),
    "root": (lambda: called.broadcast(X, 0), ["broadcast(x, src=0)"]),
    "root and reduction": (
        lambda: called.reduce(X, 0, dist.ReduceOp.SUM),
        ["reduce(x, dst=0, op='sum')"],
    ),
    "async_op": (lambda: called.all_reduce(X, async_op=True), [DROPPED, "all_reduce(x)"]),
    "all at once": (
        lambda: called.all_reduce(X, dist.ReduceOp.SUM, ac.new_group([0]), True),
        [DROPPED, "all_reduce(x, op='sum', group=group)"],
    ),
    "what is right stays": (
        lambda: called.all_reduce(X, op="max", async_op=False),
        ["all_reduce(x, op=...)"],
    ),
    "list first": (lambda: called.all_gather([X, X], X), [RETURNED, "all_gather(x)"]),
    "parts of a reduction": (
        lambda: called.reduce_scatter(X, [X, X]),
        [RETURNED, "write y = await ac.reduce_scatter(torch.cat(input_list))"],
    ),
    "parts by name": (
        lambda: called.reduce_scatter(output=X, input_list=[X, X], op="max"),
        ["write y = await ac.reduce_scatter(torch.cat(input_list), op=..., out=...)"],
    ),
    "parts of one rank": (
        lambda: called.scatter(X, [X, X], 1),
        ["write y = await ac.scatter(scatter_list if ac.get_rank() == 1 else None, src=1)"],
    ),
    "parts of another rank": (
        lambda: called.scatter(X, None),
        ["write y = await ac.scatter(scatter_list if ac.get_rank() == 0 else None, src=0)"],
    ),
    "parts of all": (
        lambda: called.all_to_all([X, X], [X, X]),
        [RETURNED, "write y = await ac.all_to_all(input_tensor_list)"],
    ),
    "nothing of torch's": (lambda: called.reduce_scatter(X, "avg"), ["ac.reduce_scatter(x, op='avg')"]),
    "list between": (lambda: called.gather(X, [X], 0), [RETURNED, "gather(x, dst=0)"]),
    "objects": (lambda: called.all_gather_object([None], 3), [RETURNED, "all_gather_object(obj)"]),
    "codec": (
        lambda: called.all_gather_object(3, "pickle"),
        ["all_gather_object(obj, codec='pickle')"],
    ),
    "object's root": (lambda: called.broadcast_object([1], 0), ["broadcast_object(obj, src=0)"]),
    "send": (lambda: called.send(X, 1, ac.new_group([0]), 3), ["send(x, dst=1, group=group, tag=3)"]),
    "recv": (lambda: called.recv(X, 1), ["recv(like, src=1)"]),
    "any source": (lambda: called.recv_any(X, 1), ["recv_any(like, sources=[1])"]),
    "any source by name": (lambda: called.recv_any(X, src=1), ["did you mean sources=?"]),
    "any object": (lambda: called.recv_any_object([None]), ["recv_any_object()"]),
    "prepared": (
        lambda: called.prepare("all_reduce", X, dist.ReduceOp.SUM),
        ["prepare(name, like, op='sum')"],
    ),
    "prepared by name": (
        lambda: called.prepare("broadcast", like=X, root=0, async_op=True),
        [DROPPED, "root= is src= here", "prepare(name, like, src=0)"],
    ),
    "prepared for nobody": (lambda: called.prepare("all_reduce"), ["'like'", "prepare(name, like)"]),
    "batch": (
        lambda: called.batch_isend_irecv([ac.P2POp(ac.send, X, 1)], async_op=True),
        [DROPPED, "batch_isend_irecv(p2p_op_list)"],
    ),
    "barrier": (lambda: called.barrier(ac.new_group([0])), ["barrier(group=group)"]),
    "nothing": (called.all_reduce, ["'x'", "all_reduce(x)"]),
    "data by name": (
        lambda: called.all_gather(tensor=X),
        ["data is passed by position, by name there are dim, uneven", "all_gather(x)"],
    ),
    "mistyped": (
        lambda: called.all_reduce(X, grup=None),
        ["did you mean group=?", "all_reduce(x, group=...)"],
    ),
    "mean": (
        lambda: called.all_reduce(X, average=True),
        ["average= is op= here", "all_reduce(x, op='avg')"],
    ),
    "no mean": (lambda: called.all_reduce(X, average=False), ["all_reduce(x, op='sum')"]),
    "MPI's root": (lambda: called.broadcast(X, root=1), ["root= is src= here", "broadcast(x, src=1)"]),
    "MPI's root of a sum": (
        lambda: called.reduce(X, root=1),
        ["root= is dst= here", "reduce(x, dst=1)"],
    ),
    "Horovod's root": (lambda: called.broadcast(X, root_rank=1), ["broadcast(x, src=1)"]),
    "NumPy's dim": (
        lambda: called.all_gather(X, axis=1),
        ["axis= is dim= here", "all_gather(x, dim=1)"],
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_the_error_writes_the_right_call(name: str) -> None:
    """It is Python's ``TypeError``, too, says what Python says, and has no other error behind it."""
    call, says = MISFITS[name]
    with raising(ac.InvalidCallError, *says) as caught:
        call()
    assert isinstance(caught.error, ac.InvalidArgumentError)
    assert isinstance(caught.error, TypeError)
    assert caught.error.__context__ is None


#: What is no call of a collective, made wrongly, and what its error says.
OTHERS = {
    "message of nothing": (called.P2POp, "P2POp() missing", "write ac.P2POp(op, tensor)"),
    "message without a tensor": (lambda: called.P2POp(ac.send), "'tensor'", "write ac.P2POp(op, tensor)"),
    "message with more": (lambda: called.P2POp(ac.send, X, 1, None, 0, 1, 2), "P2POp() got too many"),
    "message mistyped": (lambda: called.P2POp(ac.send, X, peers=1), "did you mean peer=?", "peer=..."),
    "message to": (lambda: called.P2POp(ac.send, X, dst=1), "'dst'", "by name there are op, tensor, peer"),
    "group of nothing": (called.new_group, "'ranks'", "write ac.new_group(ranks)"),
    "group of torch's": (
        lambda: called.new_group([0], backend="gloo", timeout=30),
        "leave backend= out: a group uses the world's backend",
        "leave timeout= out: it is an argument of each call: write ac.new_group(ranks)",
    ),
    "group mistyped": (lambda: called.new_group(rank=[0], backend="gloo"), "did you mean ranks=?"),
    "groups": (lambda: called.new_subgroups(1, 2), "write ac.new_subgroups()"),
    "no plan": (called.explain, "'name'", "write ac.explain(name)"),
    "plan with more": (lambda: called.explain("all_reduce", X, 1), "write ac.explain(name)"),
    "plan mistyped": (
        lambda: called.explain("broadcast", X, root=0, source=0),
        "broadcast takes no root=, source=",
        "by name there are src, ",
    ),
    "lane": (called.lane, "lane() missing", "write ac.lane(name)"),
    "a closed one": (lambda: called.close_lane("a", None), "write ac.close_lane(name)"),
    "its name": (called.new_lane, "write ac.new_lane(kind)"),
    "of gradients": (lambda: called.backward_lane(nam="a"), "did you mean name=?", "backward_lane(name)"),
    "who": (called.who_is_missing, "write ac.who_is_missing(work)"),
    "what": (lambda: called.adopt(work=1), "'work'", "by name there is timeout"),
    "metrics": (lambda: called.gather_for_metrics(X), "write ac.gather_for_metrics(x, samples=...)"),
    "seed": (lambda: called.manual_seed(1, True), "write ac.manual_seed(seed)"),
    "print": (lambda: called.print0("x", stderr=True), "by name there are sep, end, file, flush"),
    "main": (lambda: called.is_main(True), "write ac.is_main()"),
    "first": (lambda: called.main_first(True), "main_first() got too many", "write ac.main_first()"),
    "end": (lambda: called.finalize(True), "write ac.finalize()"),
    "start": (lambda: called.initialize("gloo", 2), "write ac.initialize()"),
    "spawn": (lambda: called.spawn("gloo"), "'fn'", "write ac.spawn(backend, fn)"),
    "parallel": (lambda: called.Parallel(*range(8)), "Parallel() got too many"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_collective_says_as_much(name: str) -> None:
    """Typed, and with the call as it is written, where that is known."""
    call, *says = OTHERS[name]
    with raising(ac.InvalidCallError, *says) as caught:
        call()
    assert isinstance(caught.error, TypeError)
    assert caught.error.__context__ is None
    assert "__init__" not in str(caught.error)


def test_of_what_is_no_work_nobody_is_missing() -> None:
    with raising(ac.PayloadTypeError, "takes a Work, as every call returns, got a float"):
        called.who_is_missing(1.0)


def test_a_seed_is_a_number() -> None:
    with raising(ac.InvalidArgumentError, "a seed is an int, got '7'"):
        called.manual_seed("7")


def test_the_error_says_where_the_result_is() -> None:
    """Torch's calls change what they are given: who drops the result of ours goes on with old values."""
    with raising(
        ac.InvalidCallError,
        "write y = await ac.broadcast(x, src=0), or await ac.broadcast(x, src=0, out=x) to change x itself",
    ):
        called.broadcast(X, 0)
    with raising(ac.InvalidCallError, "write y = await ac.broadcast_object(obj, src=0)") as caught:
        called.broadcast_object([1], 0)
    assert "out=" not in str(caught.error)
    with raising(ac.InvalidCallError, "await ac.recv(x, src=0, out=x) to change x itself"):
        called.recv(X, 0)
    with raising(ac.InvalidCallError, "write await ac.send(x, dst=0)"):
        called.send(X, 0)


def test_what_is_not_understood_is_not_left_out_of_the_right_call() -> None:
    """The call without it would mean something else."""
    with raising(ac.InvalidCallError, "wire_dtype", "by name there are op") as caught:
        called.all_reduce(X, wire_dtype=torch.bfloat16)
    assert "write" not in str(caught.error)


def test_a_type_error_of_what_is_called_stays_as_it_is() -> None:
    """Whatever a user's codec raises is not about the arguments."""

    def encode(_: object) -> bytes:
        raise TypeError("a codec's own")

    with pytest.raises(TypeError, match="a codec's own") as caught:
        ac.all_gather_object(1, codec=ac.Codec("own", encode, pickle.loads))
    assert not isinstance(caught.value, ac.InvalidCallError)


async def told(me: Rank) -> None:
    group = ac.new_group([0, 1])  # where every rank has to make it
    if me.rank == 0:
        for name, call in {
            "world": lambda: called.all_reduce(torch.ones(2), dist.ReduceOp.MAX),
            "lane": lambda: called.broadcast(torch.ones(2), 0, lane="torch's"),
            "group": lambda: called.all_reduce(torch.ones(2), group, async_op=True),
        }.items():
            with me.case(name), raising(ac.InvalidCallError, "write"):
                call()
    else:
        works: dict[str, Any] = {
            "world": ac.all_reduce(torch.ones(2)),
            "lane": ac.broadcast(torch.ones(2), lane="torch's"),
        }
        if me.rank == 1:
            works["group"] = ac.all_reduce(torch.ones(2), group=group)
        for name, work in works.items():
            with me.case(name), raising(ac.PeerRefusedError, "rank 0", "InvalidCallError"):
                await me.get(work)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)
    if me.rank < 2:
        await me.check("in the group", ac.all_reduce, 1, group=group, expect=2)


def test_the_peers_are_told(four: World, runner: str) -> None:
    """On the lane and group that were meant, also where the group was passed by position."""
    four.run(told, runner=runner, timeout=patient(30))
