"""``asynccoll bench``: this library beside its peers, in one run, with the conventions of nccl-tests.

Every round runs every peer once, in an order that changes from round to round and is the same on every rank,
and what is reported are medians over rounds. Uses the public names of this library as a program would; must
not print: what it finds are values (``rows``), which the command line shows.
"""

from __future__ import annotations
