"""What the ranks of this host are doing now, according to their flight recorders.

``snapshot`` reads; ``survey`` compares two snapshots, and is pure. The ranks themselves are not asked: one
that hangs in native code, or is stopped, is seen like any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from asynccoll import flight, host
from asynccoll.errors import InvalidArgumentError
from asynccoll.flight import Call, Flight, Hang, hang_of
from asynccoll.flight.comparing import members
from asynccoll.host import shared_memory

_PROC = Path("/proc")
#: The programs that other launchers start for ``spawn``.
_OF_SPAWN = ("/asynccoll/launch/planned_rank.py", "/asynccoll/launch/xla_rank.py")
STATES = {"T": "stopped", "t": "traced", "D": "in the kernel", "Z": "dead", "": "gone"}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The flight recorders at one moment, by process, with each process's kernel state and parent."""

    at: float
    flights: Mapping[int, Flight]
    states: Mapping[int, str]
    parents: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class RankNow:
    """One rank. ``behind`` counts the calls on lane ``behind_on`` that another rank has made and it has not.

    ``seconds`` is how long its oldest operation has been in flight, 0 without any; ``idle`` is how long ago
    its latest call was.
    """

    job: int
    rank: int
    world_size: int
    pid: int
    state: str
    calls_per_second: float
    bytes_per_second: float
    operation: str
    sequence: int
    lane: str
    place: str
    in_flight: int
    seconds: float
    idle: float
    behind: int
    behind_on: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def check_running(pid: int) -> None:
    """Raise unless there is such a process.

    Raises:
        InvalidArgumentError: there is none.
    """
    if not is_running(pid):
        raise InvalidArgumentError(f"there is no process {pid} on this host")


def is_running(pid: int) -> bool:
    """Whether there is such a process."""
    return (_PROC / str(pid)).exists()


def command_of(pid: int) -> str:
    """Return what was typed to start a process of this host, without the interpreter; "" if unknown."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:  # it has ended, or is another user's
        return ""
    if Path(words[0]).name.startswith("python"):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] not in ("-", "-c", "-m"):
            words = words[2 if words[0] in ("-W", "-X") else 1 :]
    if words and words[0].endswith("/asynccoll/launch/child.py"):  # then the kind of program, then as typed
        words = words[2:]
    if words[:1] == ["-c"] and "from multiprocessing." in words[1]:  # a rank of spawn: not typed
        return command_of(_parent(pid) or 0)
    if words and words[0].endswith(_OF_SPAWN):  # the same, where another launcher starts them
        return command_of(next(filter(_is_python, _ancestors(pid, _parents())), 0))
    return " ".join(words)


def _is_python(pid: int) -> bool:
    """Whether the process runs a Python program, unlike ``mpiexec`` and its helpers."""
    with contextlib.suppress(OSError):
        name = (_PROC / str(pid) / "cmdline").read_text(errors="replace").partition("\0")[0]
        return Path(name).name.startswith("python")
    return False


def snapshot(root: int | None = None) -> Snapshot:
    """Return every rank of this host that may be inspected; with ``root`` those below that process."""
    flights: dict[int, Flight] = {}
    states: dict[int, str] = {}
    parents = _parents()
    for pid in parents:
        if root is not None and not _descends(pid, root, parents):
            continue
        for descriptor in shared_memory.find(pid, flight.NAME):
            memory = shared_memory.look(pid, descriptor)
            found = None if memory is None else flight.read(memory)
            if found is not None and found.pid == pid and found.ending != "finalized":
                flights[pid] = found
                states[pid] = shared_memory.process_state(pid)
    return Snapshot(host.monotonic(), flights, states, parents)


def _parents() -> dict[int, int]:
    """Return the parent of each process."""
    pids = [int(process.name) for process in _PROC.glob("[0-9]*")]
    return {pid: parent for pid in pids if (parent := _parent(pid)) is not None}


def _parent(pid: int) -> int | None:
    """Return the parent of the process; None if it has ended meanwhile."""
    try:
        status = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return int(status.rpartition(")")[2].split()[1])


def _descends(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    while pid not in (root, 0):
        pid = parents.get(pid, 0)
    return pid == root


def survey(now: Snapshot, before: Snapshot) -> list[RankNow]:
    """Return what each rank does, ordered by job and rank."""
    rows = [
        _rank(pid, now.flights[pid], now, before, job, [now.flights[other] for other in pids])
        for job, pids in _jobs(now).items() for pid in pids
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row.job, row.rank, row.pid))


def hangs(now: Snapshot) -> dict[int, Hang]:
    """Return which ranks the others wait for, by job, for jobs that wait for some of their ranks."""
    found = {}
    for job, pids in sorted(_jobs(now).items()):
        ranks = {now.flights[pid].rank: now.flights[pid] for pid in pids}
        if (hang := hang_of(ranks, dict.fromkeys(ranks, now.at))) is not None:
            found[job] = hang
    return found


def _jobs(now: Snapshot) -> dict[int, list[int]]:
    """Return the ranks of each job: those that met in one place, else those that one process started.

    A job is identified by the process below which all of its ranks are or, if that has started several jobs,
    by the lowest pid of its ranks.
    """
    met: dict[tuple[object, int], list[int]] = {}
    for pid, one in now.flights.items():
        met.setdefault((one.said.get("meets") or now.parents.get(pid), one.world_size), []).append(pid)
    above = [_above_all(pids, now.parents) for pids in met.values()]
    return {
        (number if above.count(number) == 1 else min(pids)): pids
        for number, pids in zip(above, met.values(), strict=True)
    }


def _above_all(pids: Sequence[int], parents: Mapping[int, int]) -> int:
    """Return the nearest process that started all of these, directly or through others; 0 if none did."""
    first, *others = [_ancestors(pid, parents) for pid in pids]
    return next((one for one in first if all(one in other for other in others)), 0)


def _ancestors(pid: int, parents: Mapping[int, int]) -> list[int]:
    """Return the process's parent, that one's parent, and so on."""
    line: list[int] = []
    while (pid := parents.get(pid, 0)) and pid not in line:
        line.append(pid)
    return line


def _rank(
    pid: int, recorded: Flight, now: Snapshot, before: Snapshot, job: int, ranks: Iterable[Flight]
) -> RankNow:
    calls = recorded.calls
    last = calls[-1] if calls else None
    flying = [call for call in calls if call.is_open]
    oldest = min((call.called for call in flying), default=now.at)
    shown = flying[0] if flying else last
    new = _new(recorded, before.flights.get(pid))
    seconds = max(now.at - before.at, 1e-9)
    behind, lane = _behind(recorded, ranks)
    return RankNow(
        job=job,
        rank=recorded.rank,
        world_size=recorded.world_size,
        pid=pid,
        state=STATES.get(now.states.get(pid, ""), "running"),
        calls_per_second=len(new) / seconds,
        bytes_per_second=sum(call.size_bytes for call in new) / seconds,
        operation=shown.operation if shown else "",
        sequence=shown.sequence if shown else 0,
        lane=shown.lane if shown else "",
        place=shown.place if shown else "",
        in_flight=len(flying),
        seconds=now.at - oldest,
        idle=now.at - last.called if last else now.at - recorded.began,
        behind=behind,
        behind_on=lane,
    )


def _new(recorded: Flight, before: Flight | None) -> list[Call]:
    """Return the calls since ``before``, as far as they are still recorded."""
    last = before.calls[-1].ticket if before is not None and before.calls else 0
    return [call for call in recorded.calls if call.ticket > last] if before is not None else []


def _behind(recorded: Flight, job: Iterable[Flight]) -> tuple[int, str]:
    """Return by how much at most, and on which lane of its groups; a lane that it has never used counts."""
    most, where = 0, ""
    for other in job:
        for lane in other.lanes:
            missing = lane.sequence - recorded.reached(lane.group, lane.lane_key)
            if missing > most and members({recorded.rank: recorded}, lane.group):
                called = other.on_lane(lane.group, lane.lane_key)
                most, where = missing, called[-1].lane if called else lane.lane_key
    return most, where
