"""Where ranks meet, in processes: nodes that nobody told, a name server that is gone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import needs
from jobs import on_linux
from patience import patient
from worlds import free_port, rank_environment

pytestmark = pytest.mark.slow


NODES = """
    import json
    import asynccoll as ac
    ac.initialize("gloo")
    print(json.dumps([ac.get_local_rank(), ac.get_nproc_per_node(), ac.get_node_rank(), ac.get_nnodes()]))
    ac.finalize()
"""


def test_ranks_that_nobody_told_of_nodes_compare_them(tmp_path: Path) -> None:
    """As the pods of a Kubernetes job: two of these three are on one node."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(NODES))
    environ = {k: v for k, v in rank_environment().items() if not k.startswith("LOCAL_")}
    environ |= {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**environ, "RANK": str(rank), "ASYNCCOLL_NODE": node},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, node in enumerate("aba")
    ]
    said = [one.communicate(timeout=patient(60))[0] for one in running]
    assert [json.loads(line) for line in said] == [[0, 2, 0, 2], [0, 1, 1, 2], [1, 2, 0, 2]]


TIMED = """
    import os, sys, time
    import asynccoll as ac
    import asynccoll.backends.c10d
    here, size = sys.argv[1], int(os.environ["WORLD_SIZE"])
    open(f"{here}/{os.environ['RANK']}", "w").close()
    while len(os.listdir(here)) < size:  # what imports take is not counted
        time.sleep(0.01)
    start = time.monotonic()
    ac.initialize("gloo")
    seconds = time.monotonic() - start
    print("seconds", ac.all_reduce(seconds, op="max").wait())
    ac.finalize()
"""


@on_linux
def test_a_name_server_that_is_gone_delays_nobody(tmp_path: Path) -> None:
    """torchrun's agent listens on all addresses, and asks for the name of whoever connects."""
    needs.need_root("a resolv.conf of one's own")
    needs.need("util-linux")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TIMED))
    (tmp_path / "here").mkdir()
    mount = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    line = (program, tmp_path / "here")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as black_hole:
        try:
            black_hole.bind(("127.0.0.59", 53))
        except OSError as error:
            needs.absent(f"port 53 of 127.0.0.59: {error}", "free it")
        (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.59\n")
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, *map(str, (tmp_path / "resolv.conf", *launch, *line))],
            env=rank_environment(),
            capture_output=True,
            text=True,
            timeout=patient(120),
            check=False,
        )
    if "mount" in done.stderr and done.returncode:
        needs.absent(done.stderr.splitlines()[0], "leave to mount: docker run --privileged")
    assert done.returncode == 0, done.stderr
    seconds = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("seconds")]
    assert len(seconds) == 2
    assert max(seconds) < 5, "a look-up that nobody answers takes ten"
