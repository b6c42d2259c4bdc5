"""Two hosts: network namespaces with a link between them; each host's own name is a loopback address.

Nothing tells gloo which interface to use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import asynccoll
import needs
import netns
import training
from patience import patient

pytestmark = pytest.mark.slow

TRAINING = str(Path(training.__file__))
LIMIT_S = patient(90)
PORT = 29_400
#: A job of one rank on each host.
ONE_EACH = [(0, 0), (1, 0)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[netns.Hosts]:
    """Yield both hosts, for all tests of this file."""
    needs.need_root("network namespaces")
    needs.need("iproute2", "util-linux")
    try:
        made = netns.Hosts().__enter__()
    except OSError as error:
        needs.absent(str(error), "leave to administer the network: docker run --privileged")
    yield made
    made.close()


def environment(**variables: str) -> dict[str, str]:
    """Return our environment with the package under test, and nothing about interfaces or launchers."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GLOO_", "MASTER_", "SLURM_"))}
    search = [str(Path(asynccoll.__file__).parent.parent), str(Path(__file__).parent)]
    search.append(kept.get("PYTHONPATH", ""))
    return {**kept, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1", **variables}


class Ended:
    """What the programs on both hosts printed, and how they ended."""

    def __init__(self, running: list[subprocess.Popen[str]]) -> None:
        start = time.monotonic()
        try:
            said = [one.communicate(timeout=LIMIT_S) for one in running]
        finally:
            for one in running:
                one.kill()
        self.seconds = time.monotonic() - start
        self.codes = [one.returncode for one in running]
        self.out, self.err = ([both[k] for both in said] for k in (0, 1))

    @property
    def said(self) -> str:
        return f"codes {self.codes}\n" + "\n".join([*self.out, *self.err])


def both(hosts: netns.Hosts, *line: str, **variables: list[str]) -> Ended:
    """Run a program on both hosts; ``@`` stands for the host's number."""
    return Ended(
        [
            hosts.start(
                host,
                *(word.replace("@", str(host)) for word in line),
                env=environment(**{name: values[host] for name, values in variables.items()}),
            )
            for host in (0, 1)
        ]
    )


def check(directory: Path) -> None:
    """Check that both ranks have trained, each on its own host."""
    found = training.check(directory, ONE_EACH, backend="gloo")
    assert [one["host"] for one in found] == list(netns.NAMES)


@pytest.mark.parametrize(
    ("address", "how"),
    [(netns.ADDRESSES[0], "sync"), pytest.param(netns.NAMES[0], "parallel", marks=pytest.mark.nightly)],
    ids=["address", "name"],
)
def test_parallel_with_a_script_on_each_host(
    hosts: netns.Hosts, tmp_path: Path, address: str, how: str
) -> None:
    """`Parallel(nnodes=2, node_rank=...)` works as with ignite, also with the first host's own name."""
    where = {"nproc_per_node": 1, "nnodes": 2, "master_addr": address, "master_port": PORT}
    given = [json.dumps({**where, "node_rank": node}) for node in (0, 1)]
    ended = both(hosts, sys.executable, TRAINING, how, str(tmp_path), PARALLEL=given)
    assert ended.codes == [0, 0], ended.said
    check(tmp_path)


@pytest.mark.parametrize("launcher", ["asynccoll run", "torch.distributed.run"])
def test_an_agent_on_each_host(hosts: netns.Hosts, tmp_path: Path, launcher: str) -> None:
    """The agents meet at the given endpoint."""
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{netns.NAMES[0]}:{PORT}"]
    options = [*meeting, "--rdzv-id", launcher.replace(" ", "-"), "--nproc-per-node", "1"]
    line = [sys.executable, "-m", *launcher.split(), *options]
    ended = both(hosts, *line, TRAINING, "bare", str(tmp_path))
    assert ended.codes == [0, 0], ended.said
    found = training.check(tmp_path, ONE_EACH, backend="gloo")
    # The agents decide among themselves which host is the first.
    assert {one["host"] for one in found} == set(netns.NAMES)


BY_ADDRESS = """
    import os, sys
    import torch
    import torch.distributed as dist
    import asynccoll as ac
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    ac.initialize("gloo", init_method="tcp://ADDRESS:PORT", rank=int(sys.argv[1]), world_size=2)
    assert (ac.get_nnodes(), ac.get_node_rank(), ac.get_local_rank()) == (2, ac.get_rank(), 0)
    total = [ac.all_reduce(1).wait(), ac.all_gather("é" * 70_000, lane="second").wait() == ["é" * 70_000] * 2]
    x = torch.ones(3)
    dist.all_reduce(x)  # the user's own groups work as well
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    ac.finalize()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before
    print(total, x.tolist())
"""


def script(directory: Path, source: str) -> list[str]:
    """Return the command line of a script with this text; its argument is the host's number."""
    path = directory / "script.py"
    text = textwrap.dedent(source).replace("ADDRESS", netns.ADDRESSES[0]).replace("PORT", str(PORT))
    path.write_text(text)
    return [sys.executable, str(path), "@"]


def test_by_address(hosts: netns.Hosts, tmp_path: Path) -> None:
    """There is no launcher; nodes are distinguished by name."""
    ended = both(hosts, *script(tmp_path, BY_ADDRESS))
    assert ended.codes == [0, 0], ended.said
    assert ended.out == ["[2, True] [4.0, 4.0, 4.0]\n"] * 2


LATE = """
    import sys, time
    import asynccoll as ac
    from asynccoll.health import watchdog as watch
    watch.PATIENCE_SECONDS = 0.1  # after which the others ask whether it is still there
    ac.initialize("gloo", init_method="tcp://ADDRESS:PORT", rank=int(sys.argv[1]), world_size=2)
    total = [ac.all_reduce(1).wait()]
    for late in (0, 1):
        time.sleep(1.0 if ac.get_rank() == late else 0.0)
        total.append(ac.all_reduce(1).wait())
    ac.finalize()
    print(total)
"""


@pytest.mark.parametrize(
    "address",
    [pytest.param(netns.ADDRESSES[0], marks=pytest.mark.nightly), netns.NAMES[0]],
    ids=["address", "name"],
)
def test_a_rank_that_is_late(hosts: netns.Hosts, tmp_path: Path, address: str) -> None:
    """On another host, too, it is not considered lost."""
    ended = both(hosts, *script(tmp_path, LATE.replace("ADDRESS", address)))
    assert ended.codes == [0, 0], ended.said
    assert ended.out == ["[2, 2, 2]\n"] * 2


def test_what_the_user_chose_wins(hosts: netns.Hosts, tmp_path: Path) -> None:
    """GLOO_SOCKET_IFNAME names the interface; a wrong one gives an error that names the variable."""
    line = script(tmp_path, BY_ADDRESS)
    ended = both(hosts, *line, GLOO_SOCKET_IFNAME=["eth0", "eth0"])
    assert ended.codes == [0, 0], ended.said


# --- when the other host cannot be reached -----------------------------------------------------

WAITS = """
    import sys, time
    import asynccoll as ac
    started = time.monotonic()
    try:
        ac.initialize(
            "gloo", init_method="tcp://ADDRESS:PORT", rank=int(sys.argv[1]), world_size=2, timeout=3
        )
    except ac.CollectiveTimeoutError as error:
        print(f"{time.monotonic() - started < 10} {error}")
"""


@pytest.mark.parametrize("cut", [False, True], ids=["nobody-there", "no-link"])
def test_a_meeting_place_that_cannot_be_reached(hosts: netns.Hosts, tmp_path: Path, cut: bool) -> None:
    """The error names it, within the timeout."""
    line = script(tmp_path, WAITS)
    if cut:
        hosts.cut()
    try:
        ended = Ended([hosts.start(1, *line[:-1], "1", env=environment())])
    finally:
        if cut:
            hosts.mend()
    assert ended.codes == [0], ended.said
    assert ended.out[0].startswith("True "), ended.said
    assert f"{netns.ADDRESSES[0]}:{PORT}" in ended.out[0]


def test_a_rank_that_does_not_come(hosts: netns.Hosts, tmp_path: Path) -> None:
    """The rank that serves the store names the missing rank, within the timeout."""
    line = script(tmp_path, WAITS)
    ended = Ended([hosts.start(0, *line[:-1], "0", env=environment())])
    assert ended.codes == [0], ended.said
    assert ended.out[0].startswith("True "), ended.said
    assert "rank 0 timed out waiting for rank 1 of 2" in ended.out[0]


LOSES = """
    import sys, time
    import torch
    import asynccoll as ac
    ac.initialize("gloo", init_method="tcp://ADDRESS:PORT", rank=int(sys.argv[1]), world_size=2, timeout=5)
    ac.all_reduce(1).wait()
    print("here", flush=True)
    assert sys.stdin is not None
    started = time.monotonic()
    try:
        for _ in range(100_000):
            ac.all_reduce(torch.ones(100_000)).wait()
    except ac.CollectiveError as error:
        print(f"{type(error).__name__} {time.monotonic() - started < 20} {error}", flush=True)
    ac.finalize(abort=True)
"""


def test_a_link_that_is_lost(hosts: netns.Hosts, tmp_path: Path) -> None:
    """No packet reports it, but the timeout does; both ranks end by themselves."""
    line = script(tmp_path, LOSES)
    running = [hosts.start(host, *line[:-1], str(host), env=environment()) for host in (0, 1)]
    try:
        for one in running:
            assert one.stdout is not None
            assert one.stdout.readline() == "here\n"
        hosts.cut()
        ended = Ended(running)
    finally:
        hosts.mend()
    assert ended.codes == [0, 0], ended.said
    for said in ended.out:
        assert said.startswith(("CollectiveTimeoutError True", "PeerLostError True")), ended.said


SLOW = """
    import sys
    import torch
    import asynccoll as ac
    ac.initialize("gloo", init_method="tcp://ADDRESS:PORT", rank=int(sys.argv[1]), world_size=2, timeout=60)
    ac.all_reduce(1).wait()  # connects
    work = ac.all_reduce(torch.full((1 << 20,), float(ac.get_rank() + 1)), timeout=1)
    try:
        work.wait()
    except ac.CollectiveTimeoutError as error:
        print(error.ranks, error, flush=True)
    while True:
        try:
            print(work.wait().unique().tolist())
            break
        except ac.CollectiveTimeoutError:
            pass
    ac.finalize()
"""


def test_a_link_that_is_slow(hosts: netns.Hosts, tmp_path: Path) -> None:
    """4 MiB at 1 MB/s: at its timeout the call is in progress, no rank is blamed, and it completes."""
    line = script(tmp_path, SLOW)
    hosts.limit("8mbit")
    try:
        ended = Ended([hosts.start(host, *line[:-1], str(host), env=environment()) for host in (0, 1)])
    finally:
        hosts.lift()
    assert ended.codes == [0, 0], ended.said
    for said in ended.out:
        *text, last = said.splitlines()
        assert text[0].startswith("() all_reduce #2 on lane 'default'"), said
        assert "every rank has called it: the operation is slow, or stuck in the network" in "\n".join(text)
        assert last == "[3.0]"
