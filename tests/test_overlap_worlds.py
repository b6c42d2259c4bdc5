"""Objects that average or shard belong to the number of ranks they were made for; others refuse them."""

from __future__ import annotations

from pathlib import Path

import scripts

MADE_BEFORE = """
    import os, torch, asynccoll as ac

    rank, port = (int(os.environ[name]) for name in ("RANK", "MASTER_PORT"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]

    def linear():
        return torch.nn.Linear(2, 2)

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(model):
        model(torch.ones(2)).sum().backward()

    def loop(layers):
        for layer in layers:
            layer(torch.ones(2))

    one, two, three, four = (linear() for _ in range(4))
    made = ac.overlap_gradients(one), ac.async_optim(sgd(two)), ac.overlap.shard_optimizer(three, sgd(three))
    layers, prepared = ac.overlap.shard_layers([four]), ac.prepare("all_reduce", like=torch.ones(2))
    ac.initialize("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    trained = [lambda model=model: backward(model) for model in (one, two, three)]
    for use in (*trained, lambda: loop(layers), prepared.start):
        try:
            use()
        except ac.AsyncCollError as error:
            print(error)
    first, *_ = made
    first.close()
    anew = ac.overlap_gradients(one)
    one.zero_grad()
    one(torch.full((2,), 1.0 + rank)).sum().backward()
    anew.wait()
    print(one.weight.grad.tolist())
    ac.finalize()
"""


def test_what_was_made_in_a_world_of_one_is_refused_in_one_of_two(tmp_path: Path) -> None:
    """Regression: made before `ac.initialize`, averages were sums, and prepared operations ran alone."""
    for rank, ended in enumerate(scripts.run(tmp_path, MADE_BEFORE, ranks=2)):
        assert ended.code == 0, ended.err
        *refused, last = ended.out.splitlines()
        told = f"made on rank 0 of 1, but this is rank {rank} of 2: make it after ac.initialize()"
        assert [told in one for one in refused] == [True] * 4 + [False], refused
        assert "prepare it again" in refused[4]
        assert last == "[[1.5, 1.5], [1.5, 1.5]]"
