#!/usr/bin/env python3
"""Two hosts on one machine: network namespaces with an Ethernet link between them.

    python tools/netns.py [--rate 1gbit] COMMAND

runs COMMAND through the shell on both, with HOST_RANK=0 or 1 and MASTER_ADDR in its environment. The exit
code is the first one other than 0. As a library: ``with Hosts(rate="1gbit") as hosts: hosts.start(0, ...)``.

Each host has its own network, host name, process ids and /etc/hosts, which, as on Debian, maps the host's own
name to a loopback address. The namespaces are anonymous and held by a process of ours: when that process
ends, for whatever reason, the kernel kills every process of the host and removes the link. Needs root, Linux,
and the programs ip, tc, unshare and nsenter.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import delayline

NAMES = ("hosta", "hostb")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
#: The name of each host's end of the link.
INTERFACE = "eth0"
#: tc's parameters for the queue of a link with a rate.
QUEUE = ("burst", "256kb", "latency", "50ms")

#: The first process of a host: it waits for its standard input to end.
_INIT = """
hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && echo ready && exec cat >/dev/null
"""
_LINK_SECONDS = 5.0
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class Hosts:
    """A context manager: two hosts with a link, for the duration of the block."""

    def __init__(self, *, rate: str | None = None, delay: float = 0.0) -> None:
        """``rate``: the link's bandwidth; ``delay``: the seconds that a packet takes (`delayline.py`)."""
        self._rate = rate
        self._delay = delay
        self._processes: list[subprocess.Popen[str]] = []
        self._pids: list[int] = []
        self._directory = ""

    def __enter__(self) -> Hosts:
        self._directory = tempfile.mkdtemp(prefix="asynccoll-hosts-")
        try:
            for number in range(len(NAMES)):
                self._add(number)
            line = self._connect()
            for number, address in enumerate(ADDRESSES):
                self.run(number, "ip", "address", "add", f"{address}/24", "dev", INTERFACE)
                self.run(number, "ip", "link", "set", INTERFACE, "up")
            if line is None:
                self._await_link()
            elif line.stdin is not None:
                line.stdin.write("go\n")
                line.stdin.flush()
            if self._rate is not None:
                self.limit(self._rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End both hosts and everything that runs on them."""
        for process in self._processes:
            process.kill()  # kills its child, the host's first process, as well
            process.communicate()
        self._processes.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def command(self, host: int, *line: str) -> list[str]:
        """Return the command line that runs ``line`` on a host."""
        return [*self._enter(host), *line]

    def start(self, host: int, *line: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program on a host, with its output captured."""
        return subprocess.Popen(
            self.command(host, *line),
            env=dict(env) if env is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, host: int, *line: str) -> str:
        """Run a program on a host, and return its output. A failure raises OSError."""
        return _run(*self.command(host, *line))

    def limit(self, rate: str) -> None:
        """Limit both directions of the link to ``rate`` (in tc's notation: ``1gbit``)."""
        for host in range(len(NAMES)):
            shape = ["tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", rate, *QUEUE]
            self.run(host, *shape)

    def lift(self) -> None:
        """Remove the limit."""
        for host in range(len(NAMES)):
            self.run(host, "tc", "qdisc", "del", "dev", INTERFACE, "root")

    def cut(self) -> None:
        """Take the link down: packets are lost silently, as with a pulled cable."""
        self.run(0, "ip", "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """Bring the link back."""
        self.run(0, "ip", "link", "set", INTERFACE, "up")
        self._await_link()

    def _connect(self) -> subprocess.Popen[str] | None:
        """Give both hosts their interface. Returns the program that forwards packets, if there is one."""
        first, second = map(str, self._pids)
        if not self._delay:
            ends = [INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns"]
            _run("ip", "link", "add", *ends, second)
            return None
        program = str(Path(__file__).with_name("delayline.py"))
        started = self._await_ready([sys.executable, program, first, second, str(self._delay)])
        for number in range(len(NAMES)):
            self.run(number, "ip", "link", "set", INTERFACE, "mtu", str(delayline.MTU))
        return started

    def _await_ready(self, line: list[str]) -> subprocess.Popen[str]:
        """Start a program that runs as long as the hosts do, and wait until it prints ``ready``."""
        process = subprocess.Popen(
            line,
            env={**os.environ, "PATH": _PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != "ready\n":
            raise OSError(f"this machine makes no such network: {process.stderr.read().strip()}")
        return process

    def _await_link(self) -> None:
        """Wait until both ends of the link are up, which takes a moment."""
        deadline = time.monotonic() + _LINK_SECONDS
        for host in range(len(NAMES)):
            while " UP " not in self.run(host, "ip", "-brief", "link", "show", INTERFACE):
                if time.monotonic() > deadline:
                    raise OSError(f"the link is not up after {_LINK_SECONDS} s")
                time.sleep(0.01)

    def _add(self, number: int) -> None:
        name, other = NAMES[number], 1 - number
        hosts = Path(self._directory, f"hosts-{name}")
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{ADDRESSES[other]} {NAMES[other]}\n")
        apart = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = self._await_ready([_find("unshare"), *apart, "sh", "-c", _INIT, "sh", name, str(hosts)])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self._pids.append(int(children[0]))

    def _enter(self, host: int) -> list[str]:
        return [_find("nsenter"), "--target", str(self._pids[host]), "--net", "--uts", "--mount", "--pid"]


def _find(program: str) -> str:
    found = shutil.which(program, path=_PATH)
    if found is None:
        raise OSError(f"{program} is not installed")
    return found


def _run(*line: str) -> str:
    done = subprocess.run(
        [_find(line[0]), *line[1:]],
        env={**os.environ, "PATH": _PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{' '.join(line)}: {done.stderr.strip()}")
    return done.stdout


def main(argv: list[str]) -> int:
    """Run one command on both hosts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", help="what the link carries, as tc writes it: 1gbit")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(argv)
    with Hosts(rate=given.rate) as hosts:
        running = []
        for host in range(len(NAMES)):
            place = {"HOST_RANK": str(host), "MASTER_ADDR": NAMES[0]}
            line = hosts.command(host, "sh", "-c", " ".join(given.command))
            running.append(subprocess.Popen(line, env={**os.environ, **place}))
        while any(one.poll() is None for one in running):
            if any(one.returncode for one in running if one.returncode is not None):
                break  # the other may otherwise wait for it forever
            time.sleep(0.1)
        return next((one.returncode for one in running if one.returncode), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
