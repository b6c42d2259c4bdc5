"""The tests run on what is installed: under ``make test``, the wheel, complete and typed."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import asynccoll
from patience import patient

WHEEL = os.environ.get("ASYNCCOLL_TESTED_WHEEL")
HERE = Path(asynccoll.__file__).parent
CHECKOUT = Path(__file__).parent.parent / "asynccoll"

on_wheel = pytest.mark.skipif(WHEEL is None, reason="`make test` tests the wheel, this is the checkout")


@on_wheel
def test_the_package_under_test_is_the_wheel():
    assert HERE.parent == Path(WHEEL)


@on_wheel
def test_the_wheel_holds_every_module_and_says_that_it_is_typed():
    modules = {path.relative_to(CHECKOUT) for path in CHECKOUT.rglob("*.py")}
    assert {path.relative_to(HERE) for path in HERE.rglob("*.py")} == modules
    assert (HERE / "py.typed").is_file()


@on_wheel
def test_the_installed_version_is_the_packages():
    assert importlib.metadata.version("asynccoll") == asynccoll.__version__


@on_wheel
def test_the_command_is_installed():
    command = shutil.which("asynccoll")
    assert command is not None
    assert Path(command).is_relative_to(WHEEL)
    done = subprocess.run(
        [command, "--help"], capture_output=True, text=True, timeout=patient(60), check=True
    )
    assert "explain" in done.stdout


def test_the_citation_names_this_version():
    citation = (CHECKOUT.parent / "CITATION.cff").read_text()
    assert f"\nversion: {asynccoll.__version__}\n" in citation
