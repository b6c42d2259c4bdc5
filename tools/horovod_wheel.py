#!/usr/bin/env python3
"""Build Horovod against the installed torch: the source archive on the index does not build unpatched.

    python tools/horovod_wheel.py               print the path of the wheel, and build it if it is missing
    python tools/horovod_wheel.py --install     also install it

Run it with the interpreter that has torch; ``tools/requirements/horovod.txt`` lists what else must be
installed. It downloads Horovod's source archive from the package index (3.5 MB), verifies its hash, applies
the patches below, and compiles for about three minutes. The wheel is kept in the cache, in a directory named
by a hash of everything it is made of; one process builds it, others wait.

The transport is gloo and payloads are CPU tensors: neither MPI nor CUDA is needed. The wheel works only with
this version of torch, against whose C++ interface it is compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import envbuild

VERSION = "0.28.1"
ARCHIVE = f"horovod-{VERSION}.tar.gz"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILT_WITH = ("torch", "numpy", "setuptools", "packaging", "wheel", "cffi", "cloudpickle", "psutil", "PyYAML")


@dataclass(frozen=True)
class Patch:
    """A replacement in the sources; the old text must occur exactly once."""

    file: str
    old: str
    new: str
    why: str


PATCHES = (
    Patch(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)\n",
        "set(CMAKE_CXX_STANDARD 20)\nset(CMAKE_SKIP_RPATH ON)\n",
        "torch's headers are C++20; no path of the building machine belongs into the wheel",
    ),
    Patch(
        "horovod/torch/CMakeLists.txt",
        "    set(CMAKE_CXX_STANDARD 14)\n",
        "    set(CMAKE_CXX_STANDARD 20)\n",
        "the same",
    ),
    Patch(
        "horovod/runner/__init__.py",
        "        self.cycle_time_ms = None,\n",
        "        self.cycle_time_ms = None\n",
        "a tuple by mistake: horovod.run would set the cycle time to '(None,)', which spins",
    ),
    Patch(
        "horovod/runner/__init__.py",
        "        self.cache_capacity = None,\n",
        "        self.cache_capacity = None\n",
        "the same: the response cache would be off",
    ),
    Patch(
        "horovod/common/gloo/gloo_controller.cc",
        "  global_ranks_.reserve(size_);\n",
        "  global_ranks_.resize(size_);\n",
        "the stall inspector would see no ranks and never warn",
    ),
    Patch(
        "horovod/common/operations.cc",
        '        << "Horovod background loop uncaught exception: " << ex.what();\n',
        '        << "Horovod background loop uncaught exception: " << ex.what();\n'
        "    state.process_set_table.Get(0).initialization_done = false;\n",
        "a rank is lost: there is no world any more that the next patch could meet",
    ),
    Patch(
        "horovod/common/process_set.cc",
        "    MarkProcessSetForRemoval(id);\n",
        "    if (!Get(0).initialization_done) {\n"
        "      id_to_process_set_[id].Finalize(status);\n"
        "      DeregisterProcessSet(id);\n"
        "      id_to_be_removed_ = NO_PENDING_REMOVAL;\n"
        "      continue;\n"
        "    }\n"
        "    MarkProcessSetForRemoval(id);\n",
        "to remove a process set it meets all ranks: without the lost one, that throws where nobody catches",
    ),
)

_BUILD = {
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "LDFLAGS": "-Wl,-s",
}
#: Otherwise Horovod queries the build machine's processor, and derives flags that g++ 12 rejects.
_FLAGS = {"x86_64": "-mf16c -mavx -mfma", "AMD64": "-mf16c -mavx -mfma"}


def ensure() -> Path:
    """Return the wheel for this interpreter and its torch, which is built first if it is missing."""
    home = envbuild.cache_root().parent / "horovod" / _key()
    found = _wheel_in(home)
    if found is None:
        with envbuild.locked(home.with_name(home.name + ".lock")):
            found = _wheel_in(home) or _make(home)
    return found


def _key() -> str:
    """Return a hash of everything the wheel is made of."""
    parts = [VERSION, SHA256, repr(PATCHES), repr(_BUILD), repr(_FLAGS), platform.machine()]
    parts += [sysconfig.get_config_var("SOABI") or "", importlib.metadata.version("torch")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _wheel_in(home: Path) -> Path | None:
    return next(iter(sorted(home.glob("*.whl"))), None)


def _make(home: Path) -> Path:
    _check_tools()
    began = time.monotonic()
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".building-") as scratch:
        source = _unpack(_download(Path(scratch)), Path(scratch))
        for patch in PATCHES:
            _apply(patch, source)
        envbuild.say(f"compiling Horovod {VERSION} for torch {importlib.metadata.version('torch')}: minutes")
        built = _compile(source, Path(scratch, "dist"), home / "build.log")
        wheel = built.rename(home / built.name)  # atomic
    envbuild.say(f"built {wheel.name} in {time.monotonic() - began:.0f} s")
    return wheel


def _download(into: Path) -> Path:
    envbuild.say(f"downloading {ARCHIVE} (3.5 MB) from the package index")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "download", "--no-input"]
    options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", str(into)]
    subprocess.run([*pip, *options, f"horovod=={VERSION}"], check=True, stdin=subprocess.DEVNULL)
    return _verify(into / ARCHIVE)


def _verify(archive: Path) -> Path:
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"horovod_wheel: {archive.name} has SHA-256 {found}, expected {SHA256}; not built")
    return archive


def _unpack(archive: Path, into: Path) -> Path:
    with tarfile.open(archive) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        file.extractall(into)  # noqa: S202  # its SHA-256 has been verified
    return into / ARCHIVE.removesuffix(".tar.gz")


def _apply(patch: Patch, source: Path) -> None:
    path = source / patch.file
    text = path.read_text()
    if text.count(patch.old) != 1:
        raise SystemExit(f"horovod_wheel: {patch.old.strip()!r} is not in {patch.file} exactly once")
    path.write_text(text.replace(patch.old, patch.new))


def _compile(source: Path, dist: Path, log: Path) -> Path:
    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = os.environ | _BUILD | {"MAKEFLAGS": f"-j{jobs}"}
    variables["HOROVOD_BUILD_ARCH_FLAGS"] = _FLAGS.get(platform.machine(), "")
    variables["PATH"] = os.pathsep.join([_scripts(), os.environ.get("PATH", os.defpath)])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-input"]
    command = [*pip, "--no-deps", "--no-build-isolation", "-v", "-w", str(dist), str(source)]
    with log.open("w") as output:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, check=False
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{tail}\nhorovod_wheel: the compilation failed; all of it is in {log}")
    (wheel,) = dist.glob("*.whl")
    return wheel


def _scripts() -> str:
    """Return the directory of this environment's programs: cmake comes from a wheel."""
    return sysconfig.get_path("scripts")


# Checks before the build


def _check_tools() -> None:
    missing = [name for name in BUILT_WITH if not _installed(name)]
    if missing:
        raise SystemExit(
            f"horovod_wheel: {sys.executable} lacks {', '.join(missing)}: pip install -r "
            f"{envbuild.REQUIREMENTS / 'horovod.txt'} torch numpy"
        )
    packages = _missing_packages()
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        envbuild.say(f"installing {' '.join(packages)} with apt-get, to compile Horovod")
        _apt(packages)
        packages = _missing_packages()
    if packages:
        raise SystemExit(
            "horovod_wheel: compiling Horovod needs a C++ compiler with C++20 and Python's headers; as root: "
            f"apt-get install {' '.join(packages)} (or what your system calls these)"
        )


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _missing_packages() -> list[str]:
    """Return the Debian packages that provide the missing tools."""
    tools = {"g++": "g++", "make": "make", "cmake": "cmake"}
    search = os.pathsep.join([_scripts(), os.environ.get("PATH", os.defpath)])
    missing = [package for tool, package in tools.items() if shutil.which(tool, path=search) is None]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append(f"python{sys.version_info[0]}.{sys.version_info[1]}-dev")
    return missing


def _apt(packages: Sequence[str]) -> None:
    variables = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    patiently = ["-o", "DPkg::Lock::Timeout=120"]  # another process may be installing packages
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        subprocess.run(
            ["apt-get", "-qq", *patiently, *command], stdin=subprocess.DEVNULL, env=variables, check=False
        )


def main(argv: list[str]) -> None:
    """Execute one command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--install", action="store_true", help="install the wheel into this interpreter")
    given = parser.parse_args(argv)
    wheel = ensure()
    if given.install:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "install", "--no-deps"]
        subprocess.run([*pip, "--force-reinstall", str(wheel)], check=True, stdin=subprocess.DEVNULL)
    print(wheel)


if __name__ == "__main__":
    main(sys.argv[1:])
