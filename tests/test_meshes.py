"""torch groups that were made without naming a backend: by a DeviceMesh, as in FSDP2 programs."""

from __future__ import annotations

from pathlib import Path

import pytest

import scripts

BESIDE = """
    import torch, torch.distributed as dist, asynccoll as ac
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    MADE
    assert dist.get_backend() == "undefined"
    assert ac.backend() == "gloo"
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    assert ac.all_reduce(ac.get_rank() + 1, group=mesh["dp"]).wait() == 3
    try:
        ac.all_reduce(1, group=mesh)
    except ac.InvalidArgumentError as error:
        assert 'mesh["dp"]' in str(error)
    of_first = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [[0]], mesh_dim_names=("pp", "dp"))["dp"]
    if ac.get_rank() == 0:
        assert [ac.all_reduce(5, group=one).wait() for one in of_first] == [5, 5]
    else:
        assert ac.get_rank(of_first[0]) == -1
        for one in of_first:
            try:
                ac.all_reduce(5, group=one)
            except ac.InvalidArgumentError as error:
                assert "rank 1 is not in the" in str(error), error
            else:
                raise AssertionError(f"{one} took a call of a rank that it lacks")
    print(ac.all_gather_object(ac.get_rank()).wait())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        pytest.param("dist.init_process_group()", marks=pytest.mark.nightly),
        'init_device_mesh("cpu", (2,), mesh_dim_names=("all",))',
    ],
)
def test_a_group_without_a_backend_name(tmp_path: Path, made: str) -> None:
    """It is adopted; one dimension of a mesh is a group, a whole mesh of several is refused by name.

    A rank outside of a mesh is refused like one outside of a list of ranks.
    """
    for ended in scripts.run(tmp_path, BESIDE.replace("MADE", made), ranks=2, timeout=60):
        assert ended.code == 0, ended.err
        assert ended.out.split("\n")[0] == "[0, 1]"


FSDP = """
    import torch, asynccoll as ac
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    alone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    alone.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh["dp"])
    data = torch.randn(2, 3, 4)
    of_one, of_all = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model))
    for turn in range(3):
        seen = ac.all_reduce(torch.tensor([float(turn)]), group=mesh["dp"])
        model(data[ac.get_rank()]).square().mean().backward()
        of_all.step()
        of_all.zero_grad()
        alone(data.flatten(0, 1)).square().mean().backward()
        of_one.step()
        of_one.zero_grad()
        assert seen.wait().tolist() == [2.0 * turn]
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    print("trained", ac.all_reduce(1).wait())
"""


@pytest.mark.slow
def test_fsdp2_beside_ours(tmp_path: Path) -> None:
    """FSDP2 trains as one process does, while our collectives are in flight around its own."""
    for ended in scripts.run(tmp_path, FSDP, ranks=2, timeout=90):
        assert ended.code == 0, ended.err
        assert ended.out.split() == ["trained", "2"]
