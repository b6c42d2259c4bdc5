"""Ranks in containers of several kinds: they share memory or use gloo, say which and why, and never hang.

The tests build containers from the parts that Docker uses: namespaces, limits and a system call filter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from worlds import rank_environment

#: Joins two ranks by a file, with the limit that the last argument names, and prints the path of their calls.
PROGRAM = '''
import ctypes, json, os, resource, struct, sys
import asynccoll as ac, torch
rank, size, where, limit = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]

def forbid(number):
    """As a seccomp profile does: that call of the kernel is not permitted (x86-64)."""
    libc = ctypes.CDLL(None, use_errno=True)
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0, ctypes.get_errno()

if limit == "memfd_create":
    forbid(319)
elif limit == "pidfd_open":
    forbid(434)
elif limit == "file size":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
ac.initialize("gloo", init_method="file://" + where, rank=rank, world_size=size, timeout=60, memory=True)
x = torch.full((300_000,), float(rank + 1))
assert torch.equal(ac.all_reduce(x).wait(), torch.full_like(x, 3.0))
assert ac.all_gather(f"rank {rank}").wait() == ["rank 0", "rank 1"]
said = ac.explain("all_reduce", x).why[0]
ac.finalize()
print(said)
'''


def said(tmp_path: Path, *wrapped: tuple[list[str], str]) -> list[str]:
    """Return the path of calls that each rank prints; each is wrapped in a command line, and has a limit."""
    running = [
        subprocess.Popen(
            [*line, sys.executable, "-c", PROGRAM, str(rank), str(len(wrapped)), f"{tmp_path}/meet", limit],
            env=rank_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (line, limit) in enumerate(wrapped)
    ]
    try:
        ended = [one.communicate(timeout=patient(30)) for one in running]
    finally:
        for one in running:
            one.kill()
    assert not any(one.returncode for one in running), ended
    return [out.strip() for out, _ in ended]


NEAR = "through memory that ranks share"
PLAIN: tuple[list[str], str] = ([], "")
apart = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root and unshare"
)


def unshared(*options: str, then: str = "") -> list[str]:
    """Return a command that runs another in its own namespaces, after a line of shell code."""
    return ["unshare", *options, "--fork", "--kill-child", "sh", "-c", f'{then}\nexec "$@"', "sh"]


@apart
def test_process_numbers_of_their_own(tmp_path: Path) -> None:
    """Each rank has its own container, with a common host name and network, as in a pod that shares them."""
    own = (unshared("--pid", "--mount-proc"), "")
    assert said(tmp_path, own, own) == [NEAR, NEAR]


@apart
def test_a_small_dev_shm(tmp_path: Path) -> None:
    """Docker's default is 64 MiB; this one has 64 KiB."""
    own = (unshared("--mount", then="mount -t tmpfs -o size=64k tmpfs /dev/shm"), "")
    assert said(tmp_path, own, own) == [NEAR, NEAR]


@apart
def test_host_names_of_their_own(tmp_path: Path) -> None:
    """Containers with their own host names, as Docker makes them, count as separate hosts."""
    one, other = ((unshared("--uts", then=f"hostname {name}"), "") for name in ("red", "blue"))
    assert said(tmp_path, one, other) == ["gloo: these ranks are on 2 hosts"] * 2


@apart
def test_a_user_namespace(tmp_path: Path) -> None:
    """Its root is the same user as here, so the kernel lets the ranks meet."""
    assert said(tmp_path, PLAIN, (unshared("--user", "--map-root-user"), "")) == [NEAR, NEAR]


@pytest.mark.parametrize("limited", [pytest.param(0, marks=pytest.mark.nightly), 1])
@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ("memfd_create", "shared memory cannot be created"),
        ("file size", "shared memory cannot be created"),
        ("pidfd_open", "this process cannot give other processes a handle to itself"),
    ],
)
def test_what_is_forbidden_to_one_rank(tmp_path: Path, limited: int, limit: str, why: str) -> None:
    """All ranks use gloo, and say why."""
    ranks = [PLAIN, PLAIN]
    ranks[limited] = ([], limit)
    for way in said(tmp_path, *ranks):
        assert way.startswith(f"gloo: {why}"), way
