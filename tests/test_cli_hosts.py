"""``asynccoll run --nnodes MIN:MAX``: hosts that join and leave, each simulated by an agent here."""

from __future__ import annotations

import math
import os
import signal

import pytest

from patience import patient
from ports import free_port

pytestmark = pytest.mark.slow

#: Ends with the first world of one rank that follows a world of two.
COMES_AND_GOES = """
    import os, signal
    import asynccoll as ac
    ac.initialize("gloo")
    size = ac.all_reduce(1).wait()
    assert size == ac.get_world_size() == ac.get_nnodes()
    print("world of", size, "life", os.environ["TORCHELASTIC_RESTART_COUNT"])
    if size == 2:
        open("grown", "w").close()
        ac.all_reduce(1, lane=f"of rank {ac.get_rank()} alone").wait()  # until a peer is lost
    elif not os.path.exists("grown"):
        signal.pause()
"""


def test_a_job_grows_by_a_host_and_goes_on_without_it(start, script):
    script(COMES_AND_GOES)
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job"]
    where += ["--local-addr", "127.0.0.1", "--nnodes", "1:2", "-n", 1, "--max-restarts", 1]
    # A host that is this slow is left out or considered lost.
    rounds, attempts = math.ceil(patient(1.0)), math.ceil(patient(3.0))
    waits = f"last_call_timeout={rounds},keep_alive_interval=1,keep_alive_max_attempt={attempts}"
    where += ["--rdzv-conf", waits]

    def host():
        return start("run", *where, "program.py", GLOO_SOCKET_IFNAME="lo", ASYNCCOLL_NODE=os.urandom(4).hex())

    first = host()
    assert first.lines(1) == ["world of 1 life 0"]
    second = host()
    assert first.lines(1) == second.lines(1) == ["world of 2 life 0"]
    second.kill()
    assert first.lines(1) == ["world of 1 life 1"]
    code, _, errors = first.wait()
    assert code == 0, errors
    assert "PeerLostError" in errors
    assert second.wait()[0] == -signal.SIGKILL
