"""Ranks under mpiexec: started by hand or by `asynccoll run`, at every thread level, and how they end."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import asynccoll
import needs
from asynccoll.launch import mpiexec
from patience import outlive, patient

needs.need_package("mpi4py", "mpi", "`make mpi` has environments with mpi4py")

LIMIT_S = patient(60)


class Ended:
    """The exit code and the output of a command."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.out = done.stdout
        self.err = done.stderr

    @property
    def said(self) -> str:
        return f"code {self.code}\n{self.out}\n{self.err}"


def environment(**variables: str) -> dict[str, str]:
    """Return our environment, with the package under test on the path."""
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    here = str(Path(asynccoll.__file__).parent.parent)
    environ["PYTHONPATH"] = os.pathsep.join([here, environ.get("PYTHONPATH", "")])
    return mpiexec.find().environment(environ | variables)


def write(directory: Path, source: str) -> str:
    script = directory / "script.py"
    script.write_text(textwrap.dedent(source))
    return str(script)


def call(line: list[str], **variables: str) -> Ended:
    """Run a command line, which must end in time."""
    done = subprocess.run(
        line,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Ended(done)


def by_hand(directory: Path, source: str, ranks: int = 2, **variables: str) -> Ended:
    """Run `mpiexec -n RANKS python script.py`."""
    program = [sys.executable, write(directory, source)]
    return call(mpiexec.find().command(ranks, program), **variables)


def run(directory: Path, source: str, *options: str, ranks: int = 2) -> Ended:
    """Run `asynccoll run --backend mpi -n RANKS script.py`."""
    line = [sys.executable, "-m", "asynccoll", "run", "--backend", "mpi", "-n", str(ranks), *options]
    return call([*line, write(directory, source)])


WHO = """
    import sys
    import asynccoll as ac
    ac.initialize()
    total = ac.all_reduce(ac.get_rank() + 1).wait()
    place = ac.get_rank(), ac.get_world_size(), ac.get_local_rank(), ac.get_nproc_per_node(), ac.get_nnodes()
    sys.stdout.write(f"{ac.backend()} {place} {total}\\n")
"""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_initialize_without_arguments_under_mpiexec_is_mpi(tmp_path: Path, ranks: int) -> None:
    """In `mpiexec -n 4 python script.py`, the rest comes from the launcher."""
    ended = by_hand(tmp_path, WHO, ranks)
    assert ended.code == 0, ended.said
    total = ranks * (ranks + 1) // 2
    name = "mpi" if ranks > 1 or "mpi " in ended.out else "serial"
    wanted = [f"{name} {(rank, ranks, rank, ranks, 1)} {total}" for rank in range(ranks)]
    assert sorted(ended.out.split("\n")[:-1]) == wanted


def test_asynccoll_run_starts_ranks_with_mpiexec(tmp_path: Path) -> None:
    """It uses the environment's own mpiexec; the script keeps its name and arguments."""
    ended = run(tmp_path, WHO, ranks=3)
    assert ended.code == 0, ended.said
    assert sorted(ended.out.split("\n")[:-1]) == [f"mpi {(rank, 3, rank, 3, 1)} 6" for rank in range(3)]


def test_without_mpiexec_it_is_a_world_of_one(tmp_path: Path) -> None:
    """A script started by plain python may name mpi."""
    source = WHO.replace("initialize()", "initialize('mpi')")
    ended = call([sys.executable, write(tmp_path, source)])
    assert ended.code == 0, ended.said
    assert ended.out.strip() == "mpi (0, 1, 0, 1, 1) 1"


@pytest.mark.skipif(mpiexec.find().family != "openmpi", reason="Open MPI brings prterun, MPICH does not")
def test_ranks_that_are_told_by_pmix_alone_are_refused(tmp_path: Path) -> None:
    """Ranks of prterun are an example: it tells only its own library how many ranks there are."""
    source = WHO.replace("initialize()", "initialize('gloo')")
    prterun = str(Path(mpiexec.find().path).with_name("prterun"))
    options = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "-n", "2"]
    ended = call([prterun, *options, sys.executable, write(tmp_path, source)])
    assert ended.code != 0
    assert "LaunchEnvironmentError: PMIx started this process (PMIX_RANK='" in ended.err, ended.said
    assert ended.out == ""


@pytest.mark.skipif(mpiexec.find().family != "mpich", reason="MPICH has that option, Open MPI does not")
def test_ranks_that_are_told_of_a_port_alone_are_refused(tmp_path: Path) -> None:
    """MPI asks at that port for the rank and the number of ranks."""
    source = WHO.replace("initialize()", "initialize('gloo')")
    ended = call([mpiexec.find().path, "-pmi-port", "-n", "2", sys.executable, write(tmp_path, source)])
    assert ended.code != 0
    assert "LaunchEnvironmentError: mpiexec -pmi-port started this process (PMI_ID='" in ended.err, ended.said
    assert ended.out == ""


RAISES = """
    import asynccoll as ac
    ac.initialize()
    ac.all_reduce(1).wait()
    if ac.get_rank() == 1:
        raise LookupError("of my own")
    ac.all_reduce(1, lane="never").wait()
"""


@pytest.mark.parametrize("start", [by_hand, run])
def test_an_uncaught_error_ends_the_job(tmp_path: Path, start) -> None:
    """The peers would wait forever; MPI ends a job one of whose ranks has died."""
    ended = start(tmp_path, RAISES)
    assert ended.code != 0
    assert "LookupError: of my own" in ended.err, ended.said
    if start is run:
        assert "asynccoll run: rank 1 failed" in ended.err
        assert ended.err.count("\nLookupError: of my own") == 1, "told more than once"


EXITS = RAISES.replace('raise LookupError("of my own")', "raise SystemExit(7)")


def test_an_exit_code_ends_the_job_and_comes_back(tmp_path: Path) -> None:
    """`asynccoll run` ends a job of which a rank exits early, for which MPI alone would wait."""
    ended = run(tmp_path, EXITS)
    assert ended.code == 7, ended.said
    assert "exit code 7" in ended.err, ended.said


# As if rank 0 noticed before mpiexec does: the code it aborts with becomes the exit code of mpiexec.
HEARD_FIRST = """
    import os, signal, time
    import asynccoll as ac
    ac.initialize()
    ac.all_reduce(1).wait()
    if ac.get_rank() == 1:
        import atexit
        atexit.register(lambda: time.sleep(5))  # its end, which mpiexec may cut short
        raise SystemExit(7)
    ac.all_reduce(1, lane="never").wait()
"""


def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    ended = run(tmp_path, HEARD_FIRST)
    assert ended.code == 7, ended.said
    assert re.search(r"rank 1 failed on \S+ \(pid \d+\): exit code 7", ended.err), ended.said


KILLED = """
    import os, signal
    import asynccoll as ac
    ac.initialize()
    ac.all_reduce(1).wait()
    if ac.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ac.all_reduce(1).wait()
"""


def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    """mpiexec kills the others; the report says which rank died first, and where it was."""
    ended = run(tmp_path, KILLED, ranks=3)
    assert ended.code in (9, 137), ended.said
    assert "rank 1 on " in ended.err, ended.said
    assert re.search(r"its last call was all_reduce #1 on lane 'default' at \S+:5, ", ended.err), ended.said


STUCK = """
    import os, sys
    import asynccoll as ac
    ac.initialize()
    ac.barrier().wait()
    sys.stdout.write(f"{os.getpid()}\\n")
    sys.stdout.flush()
    if ac.get_rank() == 0:
        ac.all_reduce(1).wait()
    ac.all_reduce(1, lane="never").wait()
"""


#: So that signals have an effect even if these tests run under nohup.
HEARS_ALL = ["env", "--default-signal"]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name
)
def test_a_stop_signal_ends_ranks_that_wait_in_mpi(tmp_path: Path, number: signal.Signals) -> None:
    """`asynccoll run` prints one line, returns the code a shell expects, and leaves no process or file."""
    line = [sys.executable, "-m", "asynccoll", "run", "--backend", "mpi", "-n", "2", write(tmp_path, STUCK)]
    made = tmp_path / "tmp"
    made.mkdir()
    with subprocess.Popen(
        [*HEARS_ALL, *line],
        env=environment(TMPDIR=str(made)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        ranks = [int(job.stdout.readline()) for _ in range(2)]
        job.send_signal(number)
        _, said = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + number, said
    assert "asynccoll run: " in said
    assert "Traceback" not in said
    assert not outlive(ranks), "a rank lives on"
    assert not list(made.glob("asynccoll-run-*"))


#: Cleaning up takes longer than a process in `subprocess.run` waits after Ctrl-C.
CLEANS_UP = """
    import signal, sys
    import asynccoll as ac

    def wait(rank=None):
        try:
            sys.stdout.write("ready\\n")
            sys.stdout.flush()
            signal.pause()
        finally:
            signal.sigtimedwait([signal.SIGUSR1], 0.6)
            sys.stdout.write("cleaned\\n")
"""


@pytest.mark.skipif(mpiexec.find().family != "mpich", reason="Open MPI's mpiexec kills ranks at Ctrl-C")
@pytest.mark.parametrize(
    ("how", "code"),
    [(["-m", "asynccoll", "run", "--backend", "mpi", "-n", "2"], 130), ([], -signal.SIGINT)],
    ids=["run", "spawn"],
)
def test_ranks_clean_up_at_a_ctrl_c_on_a_terminal(tmp_path: Path, how: list[str], code: int) -> None:
    """A terminal signals all processes of its job; mpiexec must get only one: it exits at the second."""
    program = CLEANS_UP + (
        "\n    wait()"
        if how
        else "\n    if __name__ == '__main__':\n        ac.spawn('mpi', wait, nproc_per_node=2)"
    )
    with subprocess.Popen(
        [*HEARS_ALL, sys.executable, *how, write(tmp_path, program)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        os.killpg(job.pid, signal.SIGINT)
        output, said = job.communicate(timeout=LIMIT_S)
    assert (job.returncode, output.count("cleaned")) == (code, 2), (output, said)


READS = """
    import sys
    import asynccoll as ac
    ac.initialize()
    if ac.get_rank() == 0:
        sys.stdout.write("ready\\n")
        sys.stdout.flush()
        sys.stdout.write(f"rank 0 has read {input()}\\n")
    ac.barrier().wait()
"""


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_rank_0_reads_what_is_typed(tmp_path: Path, *, background: bool) -> None:
    """Input comes from the terminal, which mpiexec's session lacks; input for the shell is not taken."""
    line = [sys.executable, "-m", "asynccoll", "run", "--backend", "mpi", "-n", "2", write(tmp_path, READS)]
    shell = 'set -m; "$@" & read -r line; echo "the shell has read $line"; kill %1; wait'
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*HEARS_ALL, "setsid", "--ctty", *(["sh", "-c", shell, "sh"] if background else []), *line],
        env=environment(),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            assert select.select([job.stdout], [], [], LIMIT_S)[0]
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
            os.write(ours, b"this\n")
            output, said = job.communicate(timeout=LIMIT_S)
        finally:
            job.terminate()
            os.close(ours)
            os.close(theirs)
    assert output.startswith(f"{'the shell' if background else 'rank 0'} has read this\n"), said


IN_FLIGHT = """
    import torch
    import asynccoll as ac
    ac.initialize()
    ac.all_reduce(1).wait()
    if ac.get_rank() == 0:
        ac.all_reduce(torch.ones(10)).detach()
        ac.finalize(abort=True)
    print("end of script")
"""


def test_a_rank_that_aborted_ends_cleanly(tmp_path: Path) -> None:
    """An operation that never matches does not hang MPI_Finalize."""
    ended = by_hand(tmp_path, IN_FLIGHT)
    assert ended.code == 0, ended.said
    assert ended.out.count("end of script") == 2


AFTER_GLOO = """
    import asynccoll as ac
    ac.initialize("serial")
    ac.finalize()
    ac.initialize("mpi")
    ac.all_reduce(1, lane="left to the exit hook").detach()
    print("end of script")
"""


def test_the_exit_hook_runs_before_mpi_is_finalized(tmp_path: Path) -> None:
    """This holds even if an earlier world had registered the hook already."""
    ended = by_hand(tmp_path, AFTER_GLOO)
    assert ended.code == 0, ended.said
    assert "aborted" not in ended.err


THREADS = """
    import mpi4py
    mpi4py.rc.thread_level = "LEVEL"
    import asyncio, torch, sys
    import asynccoll as ac

    async def lane(name):
        for turn in range(50):
            total = await ac.all_reduce(torch.full((5,), turn), lane=name)
            assert total.tolist() == [turn * ac.get_world_size()] * 5

    async def main():
        async with ac.create_task_group() as tg:
            for k in sorted(range(4), reverse=ac.get_rank() % 2 == 1):
                tg.start_soon(lane, f"lane {k}", name=str(k))

    ac.initialize("mpi")
    from mpi4py import MPI
    asyncio.run(main())
    work = ac.all_reduce(torch.ones(1 << 20))
    assert float(work.wait()[0]) == ac.get_world_size()
    group = ac.new_group([0, 1])
    if ac.get_rank() < 2:
        assert ac.all_reduce(1, group=group).wait() == 2
    sys.stdout.write(f"level {MPI.Query_thread() == MPI.THREAD_LEVEL}\\n")
"""


def test_a_library_that_takes_one_call_at_a_time(tmp_path: Path) -> None:
    """A lock guards every call, on lanes and in groups, too."""
    source = THREADS.replace("THREAD_LEVEL", "THREAD_SERIALIZED").replace("LEVEL", "serialized")
    ended = by_hand(tmp_path, source, 3)
    assert ended.code == 0, ended.said
    assert ended.out.count("level True") == 3


ONE_THREAD = """
    import sys
    import mpi4py
    mpi4py.rc.thread_level = "LEVEL"
    import asynccoll as ac
    try:
        ac.initialize("mpi")
    except ac.InvalidArgumentError as error:
        sys.stdout.write(f"{'MPI_THREAD_NAME' in str(error)} {'thread_level' in str(error)}\\n")
"""


@pytest.mark.parametrize("level", ["funneled", "single"])
def test_a_library_that_takes_calls_of_one_thread_is_refused(tmp_path: Path, level: str) -> None:
    """Every rank gets an error that names the level and the remedy; the job ends normally."""
    ended = by_hand(tmp_path, ONE_THREAD.replace("NAME", level.upper()).replace("LEVEL", level))
    assert ended.code == 0, ended.said
    assert ended.out.split() == ["True"] * 4, ended.said


DEVICE_MEMORY = """
    import torch
    torch.cuda.is_available = lambda: True
    from mpi4py import MPI
    from asynccoll.backends.mpi import library as mpi_library
    print(mpi_library._path_of_library())
    print(mpi_library._cuda_aware(MPI))

    class Saying:
        # Lists these kinds of memory: as mpi4py's module, its communicator and its Info.
        COMM_SELF = property(lambda self: self)
        Get_info = lambda self: self

        def __init__(self, kinds):
            self.kinds = kinds

        def Get(self, key):
            return self.kinds if key == "mpi_memory_alloc_kinds" else None

    for kinds in ("system,cuda", "mpi,cuda:host:device", "cuda:host", "rocm:device"):
        print(mpi_library._cuda_aware(Saying(kinds)))
"""


def test_a_library_that_takes_no_device_memory_says_so(tmp_path: Path) -> None:
    """The plain wheels' own answer, as on a machine with a GPU, is that CUDA tensors are staged."""
    ended = call([sys.executable, write(tmp_path, DEVICE_MEMORY)])
    assert ended.code == 0, ended.said
    path, aware, *restricted = ended.out.split()
    assert Path(path).name.startswith("libmpi.so")
    assert aware == "False"
    assert restricted == ["True", "True", "False", "False"]


LEFT_TO_US = """
    import sys
    import mpi4py
    mpi4py.rc.initialize = False
    import asynccoll as ac
    ac.initialize("mpi")
    from mpi4py import MPI
    assert MPI.Is_initialized()
    sys.stdout.write(f"{ac.all_reduce(1).wait()}\\n")
"""


def test_mpi_is_initialised_by_us_only_where_nobody_did(tmp_path: Path) -> None:
    """If mpi4py is told not to, we initialize MPI, and finalize it at the end."""
    ended = by_hand(tmp_path, LEFT_TO_US)
    assert ended.code == 0, ended.said
    assert ended.out.split() == ["2", "2"]


FINALIZED_BY_HAND = """
    import asynccoll as ac
    from mpi4py import MPI
    ac.initialize("mpi")
    ac.all_reduce(1, lane="one more").wait()
    MPI.Finalize()
    print("end of script")
"""


def test_a_script_may_finalize_mpi_before_us(tmp_path: Path) -> None:
    """Our cleanup at exit makes no MPI calls after that: MPI would abort the process."""
    ended = by_hand(tmp_path, FINALIZED_BY_HAND)
    assert ended.code == 0, ended.said
    assert ended.out.count("end of script") == 2


FINALIZED = """
    from mpi4py import MPI
    MPI.Finalize()
    import asynccoll as ac
    ac.initialize("mpi")
"""


def test_after_mpi_was_finalized_it_is_refused(tmp_path: Path) -> None:
    """MPI can be initialized only once in a process."""
    ended = by_hand(tmp_path, FINALIZED, 1)
    assert "InvalidArgumentError" in ended.err, ended.said
    assert "cannot be initialised again" in ended.err


UNDER_TORCHRUN = "import asynccoll as ac\nac.initialize('mpi')\n"


def test_another_launcher_that_disagrees_is_refused(tmp_path: Path) -> None:
    """To MPI, torchrun's ranks are worlds of one; the error says how to start them instead."""
    said = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    line = [sys.executable, write(tmp_path, UNDER_TORCHRUN)]
    environ = environment() | said
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "LaunchEnvironmentError" in done.stderr
    assert "rank 1 of 4" in done.stderr
    assert "asynccoll run --backend mpi" in done.stderr


@pytest.mark.parametrize(
    "option", ["--nnodes=2", "--max-restarts=1", "--log-dir=logs", "--rdzv-backend=c10d"]
)
def test_options_that_mpiexec_has_no_word_for_are_refused(tmp_path: Path, option: str) -> None:
    """The error advises to call mpiexec directly."""
    ended = run(tmp_path, WHO, option)
    assert ended.code == 2
    assert option.partition("=")[0] in ended.err, ended.said
    assert "mpiexec" in ended.err


def test_spawn_starts_ranks_on_this_node_only() -> None:
    """The error names the argument."""
    with pytest.raises(asynccoll.InvalidArgumentError, match="nnodes=2"):
        asynccoll.spawn("mpi", print, nnodes=2, node_rank=0)


def test_available_and_info_tell_of_mpi(tmp_path: Path) -> None:
    """mpi is listed if mpi4py and its library are installed."""
    assert "mpi" in asynccoll.available_backends()
    ended = call([sys.executable, "-m", "asynccoll", "explain", "all_reduce", "--backend", "mpi"])
    assert ended.code == 0, ended.said
    assert "on mpi: all_reduce" in ended.out
