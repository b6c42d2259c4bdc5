"""The code blocks on the pages of the documentation, and why the tests do not run some of them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])

_BLOCK = re.compile(
    r"^(?P<heading>##? [^\n]+)$|^(?P<space> *)(<!-- (?P<comment>[^\n]*) -->\n+ *)?```(?P<language>\w+)\n"
    r"(?P<code>.*?)^(?P=space)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block, and the comment right before it."""

    path: Path
    heading: str
    line: int
    language: str
    code: str
    comment: str

    @property
    def page(self) -> str:
        """The path of its page in docs, or in the repository if the page is not in docs."""
        return self.path.relative_to(DOCS if DOCS in self.path.parents else ROOT).as_posix()

    @property
    def name(self) -> str:
        """The page and line of the block."""
        return f"{self.page}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return a page's blocks in any of these languages, in their order."""
    text, heading = page.read_text(), ""
    found = []
    for match in _BLOCK.finditer(text):
        heading = (match["heading"] or heading).lstrip("# ")
        if match["language"] in languages:
            line = 1 + text.count("\n", 0, match.start("code"))
            code = textwrap.dedent(match["code"])
            found.append(Block(page, heading, line, match["language"], code, match["comment"] or ""))
    return found


BLOCKS = {block.name: block for page in PAGES for block in blocks(page, "python")}
