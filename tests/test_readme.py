"""The first program that a reader copies works."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_first_snippet_is_the_quickstart_and_its_output() -> None:
    """They match word for word: ``test_examples`` runs that file, and expects these lines."""
    readme = (ROOT / "README.md").read_text()
    program = (ROOT / "examples" / "quickstart.py").read_text().split('"""')[2].strip()
    snippet = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert snippet is not None
    assert snippet[1].strip() == program
    shown = re.search(
        r"```console\n\$ asynccoll run -n 2 examples/quickstart.py\n(.*?)```", readme, re.DOTALL
    )
    assert shown is not None
    for page in (readme, (ROOT / "docs" / "quickstart.md").read_text()):
        assert snippet[0] in page
        assert shown[0] in page
    lines = [f"rank {rank}: 3, and meanwhile (512, 512) computed" for rank in range(2)]
    assert shown[1].splitlines() == lines
