"""The step that builds Horovod, as far as it can be tested without building, and the error that names it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import asynccoll as ac
import horovod_wheel
from asynccoll.launch import horovodrun
from asynccoll.ops.explaining import explain_offline

PATCH = horovod_wheel.Patch("a.txt", "old\n", "new\n", "to see it done")


def test_a_patch_replaces_one_line(tmp_path: Path) -> None:
    """It changes nothing else."""
    (tmp_path / "a.txt").write_text("one\nold\ntwo\n")
    horovod_wheel._apply(PATCH, tmp_path)
    assert (tmp_path / "a.txt").read_text() == "one\nnew\ntwo\n"


@pytest.mark.parametrize("text", ["one\n", "old\nold\n"])
def test_sources_that_are_not_as_expected_are_not_built(tmp_path: Path, text: str) -> None:
    """A patch that does not match, or matches twice, stops the build."""
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(SystemExit, match=r"'old' is not in a\.txt exactly once"):
        horovod_wheel._apply(PATCH, tmp_path)


def test_an_archive_with_another_hash_is_not_built(tmp_path: Path) -> None:
    """The error shows both hashes."""
    (tmp_path / "a.tar.gz").write_bytes(b"not Horovod")
    with pytest.raises(SystemExit, match=f"has SHA-256 [0-9a-f]{{64}}, expected {horovod_wheel.SHA256}"):
        horovod_wheel._verify(tmp_path / "a.tar.gz")


def test_the_wheel_is_kept_under_what_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another patch or another torch gives another key."""
    key = horovod_wheel._key()
    assert horovod_wheel._key() == key
    with monkeypatch.context() as patched:
        patched.setattr(horovod_wheel, "PATCHES", (*horovod_wheel.PATCHES, PATCH))
        assert horovod_wheel._key() != key
    monkeypatch.setattr(horovod_wheel.importlib.metadata, "version", lambda _: "1.0")
    assert horovod_wheel._key() != key


@pytest.fixture
def no_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide horovod, as in an environment without it."""
    find = importlib.util.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name.partition(".")[0] == "horovod" else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setitem(sys.modules, "horovod", None)


@pytest.mark.usefixtures("no_horovod")
def test_the_error_names_the_step() -> None:
    """No pip command installs Horovod, so the error names the script and the page that do."""
    with pytest.raises(ac.BackendNotFoundError, match=r"tools/horovod_wheel\.py") as caught:
        ac.initialize("horovod")
    assert "docs/backends/horovod.md" in str(caught.value)
    with pytest.raises(ac.BackendNotFoundError, match="horovod"):
        ac.spawn("horovod", print, nproc_per_node=2)
    assert "horovod" not in ac.available_backends()
    assert not ac.is_initialized()


def test_a_missing_launcher_names_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`asynccoll run --backend horovod` without horovodrun gives the same error."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(horovodrun.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ac.BackendNotFoundError, match=r"tools/horovod_wheel\.py"):
        horovodrun.find()


@pytest.mark.parametrize(
    ("op", "dtype", "said"),
    [
        ("all_reduce", "float32", "horovod has all_reduce with avg"),
        ("all_reduce", "bfloat16", "is sent as float32"),
        ("reduce_scatter", "float32", "composed by all_to_all"),
        ("broadcast", "bool", "is sent as uint8"),
    ],
)
def test_what_it_does_can_be_asked_without_it(op: str, dtype: str, said: str) -> None:
    """`asynccoll explain --backend horovod` works without Horovod."""
    reduce = "avg" if dtype == "float32" else "sum"
    assert said in str(explain_offline(op, dtype=dtype, op=reduce, backend="horovod", world_size=2))
