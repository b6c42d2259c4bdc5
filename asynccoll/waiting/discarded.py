"""Detect that a call's result is thrown away: ``await all_reduce(x)``, as if ``x`` itself were reduced.

The bytecode after the call shows this; it is read once for each call in the source.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType

from asynccoll.host.call_site import is_users

#: How each call seen so far throws its result away, by the id of its code object and the instruction. The
#: code object is kept alive so that no other one gets its id; of at most ``_MOST`` calls, as a program may
#: compile code at every step.
_known: dict[tuple[int, int], tuple[str, CodeType]] = {}
_MOST = 4096
#: Instructions that leave the value of a call alone, or are part of the ``await`` after it.
_AWAIT = frozenset(["CACHE", "NOP", "RESUME", "GET_AWAITABLE", "LOAD_CONST", "END_SEND", "YIELD_FROM"])
#: Instructions between the name ``wait`` and its call in ``.wait(timeout=...)``, in any version of Python.
_ARGUMENTS = frozenset(
    [
        "CACHE",
        "NOP",
        "PUSH_NULL",
        "PRECALL",
        "KW_NAMES",
        "LOAD_CONST",
        "LOAD_SMALL_INT",
        "LOAD_FAST",
        "LOAD_FAST_BORROW",
        "LOAD_GLOBAL",
        "LOAD_NAME",
    ]
)
_CALLS = frozenset(["CALL", "CALL_KW", "CALL_METHOD", "CALL_FUNCTION", "CALL_FUNCTION_KW"])


def thrown_away_by(depth: int) -> str:
    """Return by which wait the user's call ``depth`` frames above throws its result away (0.3 us once known).

    That is "await" or "wait", or "" if it does not.
    """
    frame = sys._getframe(depth + 1)
    code, instruction = frame.f_code, frame.f_lasti
    known = _known.get((id(code), instruction))
    if known is None:
        how = discarded_by(code, instruction) if is_users(code.co_filename) else ""
        if len(_known) >= _MOST:
            _known.clear()
        known = _known[id(code), instruction] = how, code
    return known[0]


def discarded_by(code: CodeType, instruction: int) -> str:
    """Return by which wait the result of the call at ``instruction`` is discarded: "await", "wait" or ""."""
    steps = [step for step in dis.get_instructions(code) if step.offset > instruction]
    first = next((step for step in steps if step.opname not in ("CACHE", "NOP")), None)
    if first is None:
        return ""
    if first.opname == "GET_AWAITABLE":
        # An await is a loop of instructions, whose SEND names the instruction after the loop.
        ends = next((step.argval for step in steps if step.opname == "SEND"), 0)
        rest = [step for step in steps if step.offset >= ends]
        passed = _AWAIT
    elif first.opname in ("LOAD_METHOD", "LOAD_ATTR") and first.argval == "wait":
        rest = steps[steps.index(first) + 1 :]
        called = next((at for at, step in enumerate(rest) if step.opname not in _ARGUMENTS), 0)
        if rest[called].opname not in _CALLS:
            return ""
        rest = rest[called + 1 :]
        passed = frozenset({"CACHE"})
    else:
        return ""
    is_discarded = next((step.opname for step in rest if step.opname not in passed), "") == "POP_TOP"
    return ("await" if passed is _AWAIT else "wait") * is_discarded
