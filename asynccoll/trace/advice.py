"""The main result of a trace in words, for terminal and page: what is hidden, and what to look at first."""

from __future__ import annotations

from asynccoll.host.words import duration, listed
from asynccoll.trace.findings import Findings

#: The default prefix of lanes on which backward sends gradients.
_BUCKETS = "gradients/"
#: Gradients are larger than this per call.
_GRADIENTS_BYTES = 4096
#: If more than this share is hidden, no advice is given about the rest.
_WELL_HIDDEN = 0.5
#: If more than this share of the waiting is for other ranks, starting earlier changes little.
_MOSTLY = 0.5


def summary(found: Findings) -> str:
    """Say in a sentence what share is hidden."""
    if not found.operations:
        return "nothing was recorded" if found.broken_off else "nothing was sent"
    if not found.marked:
        return (
            "no compute is marked, so what was hidden is unknown; call an nn.Module, or mark blocks with "
            "ac.trace.span"
        )
    if not found.in_flight:
        after = " after the first step" * found.left_out
        return (
            f"nothing that was sent{after} has finished" if found.unfinished else f"nothing was sent{after}"
        )
    times = f"{duration(found.waited)} of {duration(found.in_flight)} in flight"
    without = ", without the first step" * found.left_out
    share = f"{found.hidden or 0.0:.0%} of the communication is hidden behind compute"
    return f"{share} (on average a rank waited for {times}{without})"


def breaks_off(found: Findings) -> str:
    """Say of which ranks the last moments are not known, or return ""."""
    if not found.broken_off:
        return ""
    who = listed(found.broken_off)
    return f"{who} ended abruptly: what happened there in the last half second may be missing"


def advice(found: Findings) -> str:
    """Say what to look at first: who has not called, who holds up the others, what is waited for; or ""."""
    return str(found.hang or "") or _holding_up(found) or _uneven(found) or _waited_for(found)


def _holding_up(found: Findings) -> str:
    late = found.late
    if late is None:
        return ""
    return (
        f"rank {late.rank} is late: last in {late.last} of {late.of} operations, the others waited "
        f"{duration(late.total)} for it, which no overlap hides; {_why(found, late.doing)}"
    )


def _why(found: Findings, doing: str) -> str:
    if doing:
        return f"it takes longer {longer(doing)}"
    if found.marked:
        return "no mark takes longer there: put ac.trace.span(name) around more of the loop"
    return "what it does meanwhile is not marked: put ac.trace.span(name) around parts of the loop"


def longer(doing: str) -> str:
    """Say what makes a rank late, in words that follow "it takes longer"."""
    if not doing:
        return "-"
    return doing if doing.startswith(("after ", "before ", "between ")) else f"in {doing}"


def _uneven(found: Findings) -> str:
    """Say that most of the waiting is for other ranks, with none of them by far the latest; else ""."""
    late = sum(one.total for one in found.lateness)
    if not _is_exposed(found) or late * (found.ranks - 1) <= _MOSTLY * found.waited * found.ranks:
        return ""
    return (
        f"the ranks are uneven, with none by far the latest: they waited {duration(late)} for each other in "
        "total, which no overlap hides; the table of who was late says where"
    )


def _is_exposed(found: Findings) -> bool:
    """Whether much of the communication is waited for, as far as is known."""
    return found.hidden is not None and found.hidden <= _WELL_HIDDEN


def _waited_for(found: Findings) -> str:
    if not _is_exposed(found) or not found.waits:
        return ""
    most = found.waits[0]
    said = f"most of the waiting is in {most.operation} at {most.place}"
    if most.lane.startswith(_BUCKETS):
        return f"{said}, which backward sends already: smaller buckets are sent earlier (bucket_bytes=)"
    told = f"{said}: start it earlier, or compute before the await"
    has_buckets = any(one.lane.startswith(_BUCKETS) for one in found.waits)
    if has_buckets or most.operation != "all_reduce" or most.size_bytes < _GRADIENTS_BYTES * most.calls:
        return told
    return f"{told}; if it sends gradients, let backward do it (ac.overlap_gradients)"
