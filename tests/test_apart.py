"""The runner that gives each test file its own process reports as passed only what has passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient

APART = Path(__file__).parent.parent / "tools" / "apart.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def test_it(): pass", ""),
        ("def test_it(): assert False", "ended with 1"),
        ("", "has nothing to run"),
        ("import pytest\npytest.skip('absent', allow_module_level=True)", "has nothing to run"),
        ("def test_it(): import os; os.abort()", "ended with -6"),
    ],
)
def test_only_what_passed_has_passed(tmp_path: Path, text: str, said: str) -> None:
    """This holds if no test is repeated."""
    file = tmp_path / "test_file.py"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, str(APART), "-q", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "CI": "1", "ASYNCCOLL_TEST_ONCE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert (done.returncode == 0) == (said == ""), done.stdout
    assert said in done.stderr
    assert "once more" not in done.stdout
