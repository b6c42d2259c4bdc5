"""The API page lists what is public, all of it and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import asynccoll

API = Path(__file__).parent.parent / "docs" / "api.md"


def test_every_public_name_is_on_the_api_page():
    text = API.read_text()
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(asynccoll.__all__)
