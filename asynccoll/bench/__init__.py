"""``asynccoll bench``: this library next to its peers, in one run, with the conventions of nccl-tests.

Every round runs every peer once, in an order that changes from round to round and is the same on every rank;
the reported figures are medians over rounds. It uses the public names of this library as a program would, and
must not print: its results are values (``rows``), which the command line shows.
"""

from __future__ import annotations
