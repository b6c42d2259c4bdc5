"""Calls that fit no signature, as torch.distributed users write them: the error suggests the right call."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import asynccoll as ac
from asynccoll import testing
from patience import patient
from ranks import Rank, raising
from worlds import World

X = torch.ones(2)
called: Any = ac  # Any, as a type checker would reject the wrong calls

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
        [RETURNED, "write y = ac.reduce_scatter(torch.cat(input_list)).wait()"],
    ),
    "parts by name": (
        lambda: called.reduce_scatter(output=X, input_list=[X, X], op="max"),
        ["write y = ac.reduce_scatter(torch.cat(input_list), op=..., out=...).wait()"],
    ),
    "parts of one rank": (
        lambda: called.scatter(X, [X, X], 1),
        ["write y = ac.scatter(scatter_list if ac.get_rank() == 1 else None, src=1).wait()"],
    ),
    "parts of another rank": (
        lambda: called.scatter(X, None),
        ["write y = ac.scatter(scatter_list if ac.get_rank() == 0 else None, src=0).wait()"],
    ),
    "parts of all": (
        lambda: called.all_to_all([X, X], [X, X]),
        [RETURNED, "write y = ac.all_to_all(input_tensor_list).wait()"],
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
        ["data is passed by position; keyword arguments: dim, uneven", "all_gather(x)"],
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
    """It is also a ``TypeError``, includes Python's message, and has no other error as its context."""
    call, says = MISFITS[name]
    with raising(ac.InvalidCallError, *says) as caught:
        call()
    assert isinstance(caught.error, ac.InvalidArgumentError)
    assert isinstance(caught.error, TypeError)
    assert caught.error.__context__ is None


#: Wrong calls of functions that are not collectives, and what their errors say.
OTHERS = {
    "message of nothing": (called.P2POp, "P2POp() missing", "write ac.P2POp(op, tensor)"),
    "message without a tensor": (lambda: called.P2POp(ac.send), "'tensor'", "write ac.P2POp(op, tensor)"),
    "message with more": (lambda: called.P2POp(ac.send, X, 1, None, 0, 1, 2), "P2POp() got too many"),
    "message mistyped": (lambda: called.P2POp(ac.send, X, peers=1), "did you mean peer=?", "peer=..."),
    "message to": (lambda: called.P2POp(ac.send, X, dst=1), "'dst'", "keyword arguments: op, tensor, peer"),
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
        "keyword arguments: src, ",
    ),
    "lane": (called.lane, "lane() missing", "write ac.lane(name)"),
    "a closed one": (lambda: called.close_lane("a", None), "write ac.close_lane(name)"),
    "its name": (called.new_lane, "write ac.new_lane(kind)"),
    "of gradients": (lambda: called.backward_lane(nam="a"), "did you mean name=?", "backward_lane(name)"),
    "who": (called.who_is_missing, "write ac.who_is_missing(work)"),
    "what": (lambda: called.adopt(work=1), "'work'", "keyword argument: timeout"),
    "metrics": (lambda: called.gather_for_metrics(X), "write ac.gather_for_metrics(x, samples=...)"),
    "seed": (lambda: called.manual_seed(1, True), "write ac.manual_seed(seed)"),
    "print": (lambda: called.print0("x", stderr=True), "keyword arguments: sep, end, file, flush"),
    "main": (lambda: called.is_main(True), "write ac.is_main()"),
    "first": (lambda: called.main_first(True), "main_first() got too many", "write ac.main_first()"),
    "end": (lambda: called.finalize(True), "write ac.finalize()"),
    "start": (lambda: called.initialize("gloo", 2), "write ac.initialize()"),
    "spawn": (lambda: called.spawn("gloo"), "'fn'", "write ac.spawn(backend, fn)"),
    "parallel": (lambda: called.Parallel(*range(8)), "Parallel() got too many"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_collective_says_as_much(name: str) -> None:
    """The error is typed, and shows how the call is written where that is known."""
    call, *says = OTHERS[name]
    with raising(ac.InvalidCallError, *says) as caught:
        call()
    assert isinstance(caught.error, TypeError)
    assert caught.error.__context__ is None
    assert "__init__" not in str(caught.error)


def _net() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2)


def _sgd(model: torch.nn.Module | None = None) -> torch.optim.SGD:
    return torch.optim.SGD((model or _net()).parameters(), lr=0.1)


def _sharded() -> Any:
    model = _net()
    return ac.overlap.shard_optimizer(model, _sgd(model), lane=ac.new_lane("sharded"))


def _layers() -> Any:
    return ac.overlap.shard_layers([_net()])


def _sum() -> ac.Work[Any]:
    return ac.all_reduce(X)


async def _first(works: Any, **call: Any) -> None:
    async for _ in called.as_completed(works, **call):
        pass


async def _never() -> None:
    """A coroutine function whose coroutine is passed where a function is expected."""


def _rank(rank: int) -> int:
    return rank


def _two(stage: object) -> Any:
    return testing.simulate(_rank, world_size=2, faults=stage)


#: Arguments of a type that the function does not take, and what the error says: which one, and what was
#: given.
OF_ANOTHER_TYPE = {
    "one work": (
        lambda: asyncio.run(called.wait_all(_sum())),
        "a list of Works",
        "a Work: write wait_all([work])",
    ),
    "works by name": (
        lambda: asyncio.run(called.wait_all({"a": _sum()})),
        "works[0] of wait_all must be a Work",
        "got 'a': write wait_all(works.values())",
    ),
    "no work among them": (
        lambda: asyncio.run(called.wait_all([_sum(), None])),
        "works[1] of wait_all must be a Work, as every call returns, got None",
    ),
    "results": (lambda: asyncio.run(called.wait_all([X])), "works[0]", "got a Tensor: coroutines"),
    "no works": (lambda: asyncio.run(called.wait_all(None)), "a list of Works, got None"),
    "works one by one": (lambda: called.wait_all(_sum(), _sum()), "write ac.wait_all(works)"),
    "completed of one": (lambda: asyncio.run(_first(_sum())), "write as_completed([work])"),
    "completed of none": (
        lambda: asyncio.run(_first([_sum(), [_sum()]])),
        "works[1] of as_completed",
        "a list of Work",
    ),
    "patience": (lambda: _sum().wait(called), "timeout must be None or a number of seconds", "got a module"),
    "patience in words": (lambda: _sum().wait(cast("Any", "3")), "a number of seconds, got '3'"),
    "patience of torch's": (
        lambda: _sum().wait(cast("Any", timedelta(seconds=3))),
        "timedelta: write timeout=3",
    ),
    "no patience": (lambda: _sum().wait(float("nan")), "a number of seconds, got nan"),
    "patience with many": (
        lambda: asyncio.run(_first([_sum()], timeout="3")),
        "a number of seconds, got '3'",
    ),
    "map": (lambda: _sum().map(cast("Any", 2)), "what work.map() calls must be a function, got 2"),
    "callback": (
        lambda: _sum().add_done_callback(cast("Any", None)),
        "work.add_done_callback() calls",
        "got None",
    ),
    "memory": (lambda: called.may_overlap(X, [X]), "must be tensors, got a tuple of Tensor"),
    "model's optimizer": (lambda: called.auto_model(_sgd()), "the model of auto_model", "got a SGD"),
    "model's class": (lambda: called.auto_model(torch.nn.Linear), "got the class Linear"),
    "optimizer's model": (lambda: called.auto_optim(_net()), "the optimizer of auto_optim", "got a Linear"),
    "awaited option": (
        lambda: called.async_optim(_sgd(), bucket_byte=1),
        "async_optim takes no bucket_byte=",
        "mean bucket_bytes=?",
    ),
    "data": (lambda: called.auto_dataloader(None), "the dataset of auto_dataloader", "got None"),
    "loader": (
        lambda: called.auto_dataloader(torch.utils.data.DataLoader(cast("Any", [1]))),
        "got a DataLoader: it makes the DataLoader itself: pass loader.dataset",
    ),
    "batch": (
        lambda: called.auto_dataloader([1], batch_size="8"),
        "batch_size must be an int of 1 or more, got '8'",
    ),
    "workers": (
        lambda: called.auto_dataloader([1], num_workers=-1),
        "num_workers must be an int from 0 up, got -1",
    ),
    "sampler": (
        lambda: called.DistributedProxySampler([1]),
        "Argument sampler should be instance of torch Sampler",
    ),
    "shares": (
        lambda: called.DistributedProxySampler(torch.utils.data.SequentialSampler([1]), "2", 0),
        "num_replicas must be an int of 1 or more, got '2'",
    ),
    "gradients of a function": (
        lambda: called.overlap_gradients(lambda: None),
        "expected a torch.nn.Module",
        "got None",
    ),
    "gradients' option": (
        lambda: called.overlap_gradients(_net(), codec=None),
        "'codec'",
        "write ac.overlap.overlap_gradients(model)",
    ),
    "gradients' time": (
        lambda: called.overlap_gradients(_net(), timeout="3"),
        "timeout must be None or a positive number",
    ),
    "averages": (
        lambda: called.overlap.average_parameters(_net()),
        "'every'",
        "write ac.overlap.average_parameters(model, every=...)",
    ),
    "prefetch of one": (
        lambda: called.overlap.prefetch(_sum),
        "starts must be an iterable of functions",
        "got a function",
    ),
    "prefetch of works": (
        lambda: next(iter(called.overlap.prefetch([_sum()]))),
        "what prefetch starts must be a function without arguments, got a Work",
    ),
    "prefetch of nothing": (
        lambda: next(iter(called.overlap.prefetch([lambda: None]))),
        "must be a Work",
        "got None",
    ),
    "sharded model": (
        lambda: called.overlap.shard_optimizer(_net(), _net()),
        "optimizer of shard_optimizer",
        "a Linear",
    ),
    "sharded option": (
        lambda: called.overlap.shard_optimizer(_net(), _sgd(), lanes="a"),
        "shard_optimizer takes no lanes=; did you mean lane=?",
    ),
    "step of a scaler": (
        lambda: _sharded().step(torch.amp.GradScaler("cpu")),
        "closure must be None or a function that returns the loss",
        "write step(scaler=scaler)",
    ),
    "step of an optimizer": (
        lambda: called.async_optim(_sgd()).step(scaler=_sgd()),
        "scaler must be a gradient scaler",
    ),
    "unscaled": (lambda: _sharded().unscale_(None), "scaler must be a gradient scaler, such as", "got None"),
    "clipped": (lambda: _sharded().clip_grad_norm_(None), "max_norm must be a number, got None"),
    "clipped by": (lambda: _layers().clip_grad_norm_(1.0, "inf"), "norm_type must be a number, got 'inf'"),
    "state": (
        lambda: _sharded().load_full_state_dict({}),
        "with an entry 'param_groups', got a dict",
    ),
    "state of layers": (
        lambda: _layers().load_full_state_dict(_net()),
        "the state must be a dict of tensors",
    ),
    "layers' optimizer": (
        lambda: _layers().full_optimizer_state(_net()),
        "optimizer must be a torch.optim.Optimizer",
    ),
    "window": (lambda: called.overlap.InFlight(1).start_blocking(_sum(), X), "write start(ac.all_reduce, x)"),
    "window of a function": (
        lambda: called.overlap.InFlight(1).start_blocking(len, X),
        "that returns a Work, got 2",
    ),
    "DDP's time": (lambda: called.overlap.DDPState(timeout=-1), "timeout must be None or a positive number"),
    "trace": (
        lambda: called.trace.gather("trace.html"),
        "the timeline must be what ac.trace.recording() gives",
    ),
    "trace's place": (lambda: called.trace.load(None), "where must be the path of a directory, got None"),
    "span": (lambda: called.trace.span(3).__enter__(), "the name of a span must be a string, got 3"),
    "hook": (lambda: called.trace.add_hook(None), "what add_hook calls must be a function"),
    "codec": (lambda: called.Codec("mine", None, len), "encode of a Codec must be a function, got None"),
    "source": (
        lambda: called.recv_any(X, sources=[[1]]),
        "each of sources must be a rank, got a list of int",
    ),
    "spawned call": (
        lambda: called.spawn("gloo", _never()),
        "what the ranks run must be a function",
        "without calling it",
    ),
    "spawned argument": (lambda: called.spawn("gloo", _rank, 3), "args must be a tuple, got 3", "write (x,)"),
    "parallel call": (
        lambda: called.Parallel().run(_rank(3)),
        "what the ranks run must be a function, got 3",
    ),
    "world": (
        lambda: called.initialize("gloo", rank=0, world_size="2"),
        "world_size must be an int of 1 or more, got '2'",
    ),
    "simulated call": (
        lambda: testing.simulate(cast("Any", _never())),
        "main must be a function",
        "without calling it",
    ),
    "simulated ranks": (
        lambda: testing.simulate(_rank, world_size=cast("Any", "2")),
        "world_size must be",
        "'2'",
    ),
    "simulated loop": (lambda: testing.simulate(_rank, loop=cast("Any", [])), "loop must be one of"),
    "seed": (lambda: testing.simulate(_rank, seed=cast("Any", None)), "seed must be an int, got None"),
    "schedule": (
        lambda: testing.simulate(_rank, schedule=cast("Any", "PCT")),
        "schedule must be None, RandomWalk()",
    ),
    "statements": (lambda: testing.simulate(_rank, statements="json"), "write ['json']"),
    "one fault": (lambda: _two(testing.Kill(1, at=1.0)), "faults must be a list of faults", "got a Kill"),
    "no fault": (lambda: _two([1]), "each of faults must be a fault", "got 1"),
    "fault of nobody": (
        lambda: testing.Kill(cast("Any", "1"), at=1.0),
        "rank of Kill must be an int",
        "got '1'",
    ),
    "fault before": (lambda: testing.Kill(1, after_call=0), "after_call of Kill must be an int of 1 or more"),
    "link": (lambda: testing.Link(cast("Any", None)), "latency of Link must be a number of seconds"),
    "seeds": (lambda: testing.explore(_rank, seeds=cast("Any", 100)), "write range(100)"),
    "expected": (
        lambda: testing.explore(_rank, expect=cast("Any", 6)),
        "expect must be None or a function, got 6",
    ),
    "ranks": (
        lambda: testing.world(cast("Any", "2")),
        "the size of a world must be an int of 1 or more, got '2'",
    ),
}


@pytest.mark.filterwarnings("ignore::asynccoll.UnawaitedWorkWarning")  # of the refused works
@pytest.mark.parametrize("name", OF_ANOTHER_TYPE)
def test_an_argument_of_another_type_is_named(name: str) -> None:
    """The error names the argument, and is also of the type that Python would raise deep inside."""
    call, *says = OF_ANOTHER_TYPE[name]
    with raising(ac.InvalidArgumentError, *says):
        call()


@pytest.mark.parametrize("name", ["prescale", "postscale"])
def test_a_factor_is_a_number(name: str) -> None:
    """Otherwise Python would only complain about a tensor's truth value, and name no argument."""
    with raising(ac.PayloadTypeError, f"{name} must be a number, got tensor"):
        called.all_reduce(X, **{name: torch.ones(2)})


@pytest.mark.parametrize("sources", [1.0, ac])
def test_sources_are_listed(sources: Any) -> None:
    with raising(ac.PayloadTypeError, f"sources must be a list of ranks, got {sources!r}"):
        called.recv_any(X, sources=sources)


NO_RANK_HERE = {
    "a group": lambda: called.all_reduce(X, group=[0, 1]),
    "a source": lambda: called.broadcast(X, src=1),
}


@pytest.mark.parametrize("name", NO_RANK_HERE)
def test_in_a_world_of_one_an_error_about_other_ranks_says_how_to_start_some(name: str) -> None:
    with raising(ac.InvalidArgumentError, "expected 0, as this is a world of one; a launcher starts more"):
        NO_RANK_HERE[name]()


def test_there_is_no_out_for_a_list() -> None:
    with raising(ac.InvalidArgumentError, "out= is for a result that is known to be one tensor"):
        called.all_gather(X, uneven=True, out=X)
    with raising(ac.PayloadTypeError, "scatter got None; expected on src"):
        called.scatter(None)


def test_of_what_is_no_work_nobody_is_missing() -> None:
    with raising(ac.PayloadTypeError, "takes a Work, as every call returns, got a float"):
        called.who_is_missing(1.0)


def test_a_seed_is_a_number() -> None:
    with raising(ac.InvalidArgumentError, "a seed must be an int, got '7'"):
        called.manual_seed("7")


def test_the_error_says_where_the_result_is() -> None:
    """Torch's calls work in place: a program that drops the result of ours continues with old values."""
    with raising(
        ac.InvalidCallError,
        "write y = ac.broadcast(x, src=0).wait(), or ac.broadcast(x, src=0, out=x).wait() to change x itself",
    ):
        called.broadcast(X, 0)
    with raising(ac.InvalidCallError, "write y = ac.broadcast_object(obj, src=0).wait()") as caught:
        called.broadcast_object([1], 0)
    assert "out=" not in str(caught.error)
    with raising(ac.InvalidCallError, "ac.recv(x, src=0, out=x).wait() to change x itself"):
        called.recv(X, 0)
    with raising(ac.InvalidCallError, "write ac.send(x, dst=0).wait()"):
        called.send(X, 0)


def test_in_an_event_loop_the_right_call_is_awaited() -> None:
    """Where no event loop runs, the error suggests no ``await``, as that would be invalid there."""

    async def main() -> None:
        with raising(
            ac.InvalidCallError,
            "write y = await ac.broadcast(x, src=0), or await ac.broadcast(x, src=0, out=x) to change x",
        ):
            called.broadcast(X, 0)
        with raising(ac.InvalidCallError, "write await ac.send(x, dst=0)"):
            called.send(X, 0)

    asyncio.run(main())


def test_an_error_of_a_call_that_does_not_fit_shows_the_line_of_the_call() -> None:
    """Frames of the code that looked for the right call are not shown."""
    with pytest.raises(ac.InvalidCallError) as caught:
        called.all_reduce(X, dist.ReduceOp.MAX)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [one.filename == __file__ for one in frames] == [True, False]


def test_an_error_that_mentions_another_function_names_its_own() -> None:
    """``recv_any``, which the error recommends, is not a mention of ``recv``."""
    with raising(ac.InvalidArgumentError, "recv: pass src=", "ac.recv_any"):
        called.recv(X)


def test_what_is_not_understood_is_not_left_out_of_the_right_call() -> None:
    """The suggested call would mean something else without it, so none is suggested."""
    with raising(ac.InvalidCallError, "wire_dtype", "keyword arguments: op") as caught:
        called.all_reduce(X, wire_dtype=torch.bfloat16)
    assert "write" not in str(caught.error)


def test_a_type_error_of_what_is_called_stays_as_it_is() -> None:
    """A TypeError that a user's codec raises is not about the arguments."""

    def encode(_: object) -> bytes:
        raise TypeError("a codec's own")

    with pytest.raises(TypeError, match="a codec's own") as caught:
        ac.all_gather_object(1, codec=ac.Codec("own", encode, pickle.loads))
    assert not isinstance(caught.value, ac.InvalidCallError)


async def told(me: Rank) -> None:
    group = ac.new_group([0, 1])  # every rank has to make the group
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
    """The peers get the error on the intended lane and group, even if the group was passed by position."""
    four.run(told, runner=runner, timeout=patient(30))
