"""``python -m asynccoll``: the command line without the installed script."""

from __future__ import annotations

import sys

from asynccoll.cli.entry import main

sys.exit(main())
