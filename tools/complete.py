#!/usr/bin/env python3
"""Fail unless every exported name has a declared type, by ``pyright --verifytypes asynccoll``."""

from __future__ import annotations

import json
import subprocess
import sys


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
    return int(completeness["completenessScore"] != 1)


if __name__ == "__main__":
    sys.exit(main())
