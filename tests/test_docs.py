"""What is public is documented: on the API page, and where it is defined."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import asynccoll

API = Path(__file__).parent.parent / "docs" / "api.md"


def test_every_public_name_is_on_the_api_page():
    text = API.read_text()
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE)
    modules = re.findall(r"^\.\. py:module:: asynccoll\.(\w+)$", text, re.MULTILINE)
    inside = {name for module in modules for name in getattr(asynccoll, module).__all__}
    assert sorted({*listed, *modules} - (inside - {*asynccoll.__all__})) == sorted(asynccoll.__all__)
    assert inside <= {*listed}


@pytest.mark.parametrize("name", asynccoll.__all__)
def test_every_public_name_says_what_it_is(name):
    text = getattr(asynccoll, name).__doc__
    assert text
    assert text.split("\n\n")[0].strip().endswith((".", ":", "``"))
