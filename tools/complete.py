#!/usr/bin/env python3
"""Fail unless every exported name has a declared type, by ``pyright --verifytypes asynccoll``.

``Any`` counts as a declared type but says nothing, so its frequency in the library is bounded.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent.parent / "asynccoll"
#: The most uses of ``Any`` per 1,000 lines, imports included; to be lowered as the library improves.
MOST_ANY = 12.0


def any_per_thousand_lines() -> float:
    """Return how often the library uses ``Any`` per 1,000 lines, outside of comments and strings."""
    said = lines = 0
    for file in LIBRARY.rglob("*.py"):
        text = file.read_text()
        lines += text.count("\n")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        said += sum(token.type == tokenize.NAME and token.string == "Any" for token in tokens)
    return 1000 * said / lines


def main() -> int:
    command = ["pyright", "--verifytypes", "asynccoll", "--ignoreexternal", "--outputjson"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    completeness = found["typeCompleteness"]
    for symbol in completeness["symbols"]:
        for one in symbol["diagnostics"]:
            if one["severity"] == "error":
                print(f"{symbol['name']}: {' '.join(one['message'].split())}")
    counts = completeness["exportedSymbolCounts"]
    print(f"pyright: {counts['withKnownType']} of {sum(counts.values())} exported names have a declared type")
    said = any_per_thousand_lines()
    print(f"Any: {said:.1f} times in 1,000 lines (at most {MOST_ANY})")
    return int(completeness["completenessScore"] != 1 or said > MOST_ANY)


if __name__ == "__main__":
    sys.exit(main())
