"""Mistakes that could be made in the library: hand-written ones and mechanical ones."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

__all__ = ["EQUIVALENT", "LIBRARY", "SEEDED", "TRAINING", "Mistake", "mechanical"]

#: Found without being imported: who plants mistakes imports a copy.
_SPEC = find_spec("asynccoll")
assert _SPEC is not None and _SPEC.origin is not None
LIBRARY = Path(_SPEC.origin).parent

#: Where concurrency is: what is mistaken elsewhere, other tests find.
FILES = (
    "backends/memory/engine.py",
    "backends/memory/messages.py",
    "backends/memory/moving.py",
    "backends/memory/pair.py",
    "health/liveness.py",
    "health/refusals.py",
    "health/watchdog.py",
    "order/announcing.py",
    "order/connection.py",
    "order/cut.py",
    "order/failing.py",
    "order/halting.py",
    "order/lane.py",
    "order/operation.py",
    "order/outstanding.py",
    "order/ownership.py",
    "order/places.py",
    "order/queue.py",
    "order/stepping.py",
    "transport/completion.py",
    "transport/progress.py",
    "waiting/arriving.py",
    "waiting/loops.py",
    "waiting/started.py",
    "waiting/suspending.py",
    "waiting/work.py",
)


class Mistake(NamedTuple):
    """A mistake, and the file that contains it."""

    file: str
    what: str
    text: str
    #: where it was found; it is known by what it is, for lines move
    line: int = 0


def _replaced(file: str, right: str, wrong: str, *more: str) -> Mistake:
    """``more``: further pairs, for a condition that is checked in several places."""
    text = (LIBRARY / file).read_text()
    for old, new in zip((right, *more[::2]), (wrong, *more[1::2]), strict=True):
        if text.count(old) != 1:  # in another place it would be another mistake
            raise SystemExit(f"{file} has {old!r} {text.count(old)} times")
        text = text.replace(old, new, 1)
    return Mistake(file, f"{right.strip()!r} -> {wrong.strip()!r}", text)


_ENGINE = "backends/memory/engine.py"
_MOVING = "backends/memory/moving.py"
_PAIR = "backends/memory/pair.py"
_SECOND_LOOK = "            pass\n        with self._lock:\n            moved = self._move()\n"
_WAKE_OTHERS = '        """Wake the sleeping threads and the watchers of the other ranks."""\n'
_FENCED = f"{_WAKE_OTHERS}        with self._fence:\n            pass\n"
#: What each replaces, in which file.
_SEEDED = (
    ("order/queue.py", "            and not self._jobs\n", ""),
    (
        "order/queue.py",
        "            and self._active is None\n            and self._driver",
        "            and self._driver",
    ),
    (
        "order/queue.py",
        (
            "            and self._epochs.cut is None\n"
            "            and not self._failing.out_of_step\n            and not ("
        ),
        "            and not self._failing.out_of_step\n            and not (",
    ),
    ("order/cut.py", "        self.number += 1\n", ""),
    ("order/halting.py", "or epoch != epochs.number or", "or"),
    (
        "order/halting.py",
        "        cut.hold(*self._queue.take_out(refusal, end))\n",
        "        self._queue.take_out(refusal, end)\n",
    ),
    ("order/halting.py", "            self._queue.extend(jobs)\n", ""),
    ("order/halting.py", "place = places.open(count)", "place = places.latest + 1"),
    ("order/queue.py", "return latest if first is None else", "return 0 if first is None else"),
    ("transport/completion.py", "                self._callbacks.insert(0, wake)", "                pass"),
    (
        "transport/completion.py",
        "host.call_each(self._left)",
        "next(self._left)()",
    ),
    (
        "waiting/loops.py",
        "                loop.call_soon_threadsafe(_resolve, future)\n",
        "                pass\n",
    ),
    ("waiting/loops.py", "                token.run_sync_soon(resume)\n", "                pass\n"),
    (
        "health/watchdog.py",
        "            if self._asleep:\n                self._wake.notify()\n",
        "            if self._asleep:\n                pass\n",
    ),
    # Ranks of one host through memory: the second look, fences, room, order of words, bells
    (_MOVING, _SECOND_LOOK, "            pass\n        moved = False\n"),
    (_MOVING, _SECOND_LOOK, "            pass\n        moved = self._move_on()\n"),
    (_MOVING, _FENCED, _WAKE_OTHERS),
    (_ENGINE, "            if step > self._room and not self._has_room(step):\n                break\n", ""),
    (
        _ENGINE,
        "            exchange.take(step - first, step % SLOTS)\n            words[mine + READ] = step\n",
        "            words[mine + READ] = step\n            exchange.take(step - first, step % SLOTS)\n",
    ),
    (
        _ENGINE,
        "                exchange.put(0, slot)\n                exchange.first = step\n",
        (
            "                words[self._mine + POSTED + slot] = "
            "(step & _STEP_BITS) << 32 | exchange.checksum\n"
            "                exchange.put(0, slot)\n                exchange.first = step\n"
        ),
    ),
    (
        _ENGINE,
        "        if all(one == said for one in found):\n            return self._agree(exchange)\n",
        "",
    ),
    (_MOVING, "                self._bells.ring(rank)\n", "                pass\n"),
    (_MOVING, "                self._bells.wake(rank)\n", "                pass\n"),
    (_MOVING, "            self._words[self._mine + ASLEEP] = 0\n", ""),
    (_MOVING, "            self._bells.wake(self.region.index)\n", "            pass\n"),
    (_MOVING, "            said = next(self._naps) % _MOST_NAPS + 1\n", "            said = 1\n"),
    (_ENGINE, "else step == first or self._all_posted(step, exchange.checksum)", "else True"),
    (
        _ENGINE,
        (
            "        if exchange.combined and not self._all_posted(step, exchange.checksum):\n"
            "            return False\n"
        ),
        "",
    ),
    (_ENGINE, "                    self._combining[exchange] = None\n", "                    pass\n"),
    (_ENGINE, "            self._rouse_short(exchange, lengths)\n", ""),
    (
        _ENGINE,
        "                if step - words[self._mine + READ] > _AHEAD:\n                    break\n",
        "",
    ),
    (_ENGINE, "            self._words[self._mine + READ] = exchange.first\n", "            pass\n"),
    (_ENGINE, "            self._be_known()\n        try:", "            pass\n        try:"),
    (_PAIR, "            self._be_known()\n        try:", "            pass\n        try:"),
    (_PAIR, "self._receives or self._receiving or self._replies)", "self._receives or self._receiving)"),
    (_PAIR, "            self._knock()\n", ""),
    (_PAIR, "        if unread > SLOTS:\n            self._knock()\n            return None\n", ""),
    (_PAIR, "            message.data = message.data.clone()", "            pass"),
    (_PAIR, "            self._record = record\n", ""),
    (
        _PAIR,
        "number in self._receiving or (_ACK, number) in self._replies:\n                return",
        "number in self._receiving:\n                return",
    ),
    (_PAIR, "        for one in islice(of_tag.values(), _MOST_ANNOUNCED):\n", "        for one in ():\n"),
    (_PAIR, "            or len(self._sends) > len(self._eager)\n", ""),
    (_PAIR, "        self._tags_to_match[message.tag] = None\n", ""),
    ("backends/memory/messages.py", "                if state == CLOSED:\n", "                if False:\n"),
)


def SEEDED() -> list[Mistake]:  # noqa: N802  # a table
    """Return the hand-written mistakes."""
    return [_replaced(*one) for one in _SEEDED]


#: What training once got wrong in silence.
_TRAINING = (
    ("overlap/buckets.py", "    if _dense(like):\n", "    if False:\n"),  # a gradient without the strides
    ("overlap/shards.py", "register_forward_pre_hook(wait, prepend=True)", "register_forward_pre_hook(wait)"),
    (
        "ops/coalescing.py",
        "        modes = {call.modes for call in self.calls}\n",
        "        modes = {Modes.now()}\n",
    ),
    (
        "ops/coalescing.py",
        "        if read is not None:\n",
        "        if False:\n",
        "        if out is not None:\n            work.fills(out)\n",
        "",
    ),
    ("overlap/gradients.py", "if again or not self._syncing:", "if again and self._syncing:"),
    (
        "overlap/gradients.py",
        "bucket.summed_over, bucket.named = self._summed_over, self._named",
        "bucket.named = self._named",
    ),
    ("overlap/gradients.py", "            self._add_new_parameters()\n", ""),
    (
        "overlap/gathering.py",
        """        parts = {f"layer {self.name}": [number, *(""",
        """        parts = {"layer": [number, *(""",
        """rows = numbers.tolist() if""",
        """rows = numbers[:0].tolist() if""",
    ),
    (
        "overlap/arrivals.py",
        "        self.stale = set(range(len(self.parameters)))\n",
        "        self.stale = set()\n",
    ),
    (
        "overlap/sharded.py",
        "anywhere\n        )\n        return\n    for arrival",
        "anywhere\n        )\n    for arrival",
    ),
)


def TRAINING() -> list[Mistake]:  # noqa: N802  # a table
    """Return the mistakes of training, which drawn trainings must find."""
    return [_replaced(*one) for one in _TRAINING]


# Mechanical ones


def mechanical(count: int, seed: int) -> list[Mistake]:
    """Return ``count`` mechanical mistakes, drawn from all possible ones."""
    found = [mistake for file in FILES for mistake in _all_of(file)]
    return random.Random(seed).sample(found, min(count, len(found)))  # it hides nothing


def _all_of(file: str) -> Iterator[Mistake]:
    text = (LIBRARY / file).read_text()
    tree = ast.parse(text)
    functions = [one for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for function in functions:
        if function.name.startswith("__") and function.name != "__await__":
            continue
        for node in ast.walk(function):
            if isinstance(node, (ast.If, ast.While, ast.IfExp)):
                wrong = f"(not ({ast.unparse(node.test)}))"
                yield _with(file, text, node.test, f"turned condition in {function.name}", wrong)
            for kind, change in _KINDS.items():
                changed = copy.copy(node)
                if (mistaken := change(changed)) is not None:
                    yield _with(file, text, node, f"{kind} in {function.name}", mistaken)


def _with(file: str, text: str, node: ast.AST, kind: str, wrong: str) -> Mistake:
    """Return the text with ``wrong`` in place of ``node``."""
    lines = text.splitlines(keepends=True)
    start, end = _place(lines, node)
    right = text[start:end]
    assert isinstance(node, (ast.stmt, ast.expr))
    return Mistake(file, f"{kind}: {right!r} -> {wrong!r}", text[:start] + wrong + text[end:], node.lineno)


def _place(lines: list[str], node: ast.AST) -> tuple[int, int]:
    assert isinstance(node, (ast.stmt, ast.expr)) and node.end_lineno and node.end_col_offset is not None

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def _forgotten_call(node: ast.AST) -> str | None:
    return "pass" if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


def _forgotten_note(node: ast.AST) -> str | None:
    """Leave out an assignment to an attribute."""
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if all(isinstance(target, ast.Attribute) for target in targets):
            return "pass"
    return None


def _one_less(node: ast.AST) -> str | None:
    """Leave out the last operand of ``and`` or ``or``."""
    if isinstance(node, ast.BoolOp) and len(node.values) > 1:
        node.values = node.values[:-1]
        return f"({ast.unparse(node if len(node.values) > 1 else node.values[0])})"
    return None


_OTHERS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


def _other_comparison(node: ast.AST) -> str | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHERS:
        node.ops = [_OTHERS[type(node.ops[0])]()]
        return f"({ast.unparse(node)})"
    return None


def _other_truth(node: ast.AST) -> str | None:
    if (
        isinstance(node, ast.Return)
        and isinstance(node.value, ast.Constant)
        and node.value.value in (True, False)
    ):
        return f"return {not node.value.value}" if isinstance(node.value.value, bool) else None
    return None


def _other_count(node: ast.AST) -> str | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Sub)):
        return None
    by_one = isinstance(node.right, ast.Constant) and node.right.value == 1
    return f"({ast.unparse(node.left)})" if by_one else None


_KINDS: dict[str, Callable[[ast.AST], str | None]] = {
    "forgotten call": _forgotten_call,
    "forgotten note": _forgotten_note,
    "one less asked for": _one_less,
    "other comparison": _other_comparison,
    "other truth": _other_truth,
    "one off": _other_count,
}


#: Those that make no difference to what any program gets, and why.
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        _ENGINE,
        repr("if all(one == said for one in found):\n            return self._agree(exchange)") + " -> ''",
    ): "a rank posts a step once: one that had another checksum at the first look has it at the second",
    (
        _ENGINE,
        repr("if step - words[self._mine + READ] > _AHEAD:\n                    break") + " -> ''",
    ): "how far ahead data is put is a matter of the cache; that there is room is asked afterwards",
    (
        _MOVING,
        f"{_FENCED.strip()!r} -> {_WAKE_OTHERS.strip()!r}",
    ): "whoever has written has released the lock before this, which is a fence as well",
    (
        _MOVING,
        f"{'self._words[self._mine + ASLEEP] = 0'!r} -> ''",
    ): (
        "after the second look nothing moves without a word of another rank, which then clears this one; "
        "only where a lane is given up, who falls asleep just then hears of it a tenth of a second later"
    ),
    (
        "order/halting.py",
        f"{'or epoch != epochs.number or'!r} -> {'or'!r}",
    ): (
        "a refusal is never taken back: what a verdict leaves of it stands in the next epoch, on all ranks, "
        "and Epochs.halt drops the rest; it is only heard of sooner"
    ),
    (
        _MOVING,
        "forgotten note in _sleep: 'self._sleepers -= 1' -> 'pass'",
    ): "who ends a call then wakes threads of its rank that do not sleep",
    (
        "waiting/work.py",
        "forgotten note in _settle: 'self._finish = None' -> 'pass'",
    ): "what it closed over is kept for as long as the work is; nobody calls it again",
    (
        "waiting/loops.py",
        "turned condition in give_turn: '{0}' -> '(not ({0}))'".format("self.over(host.monotonic())"),
    ): "a matter of who gets a turn when, and nothing that simulated tasks compute takes time",
    (
        "health/watchdog.py",
        "forgotten call in _run: 'self._world.tell_of_stall(operation)' -> 'pass'",
    ): "what is logged is not looked at by programs",
    (
        "waiting/suspending.py",
        "other truth in _hold: 'return True' -> 'return False'",
    ): "its one caller then asks the operation itself whether it is done; only the estimate does not learn",
    (
        "waiting/loops.py",
        "other comparison in on_asyncio: 'loop is None' -> '(loop is not None)'",
    ): "an await on asyncio then goes the longer way to the same end; off asyncio trio has been imported",
    (
        _PAIR,
        "one less asked for in _knock: {!r} -> '(self._replies)'".format(
            "self._replies and self._knocked != self._posted"
        ),
    ): "a rank whose ring is full rings the other at each look, not only once; it has nothing new to read",
    (
        "waiting/suspending.py",
        "other comparison in _inline: 'left < 0.0' -> '(left <= 0.0)'",
    ): "differs at one instant, at which a call that is over is asked by another way whether it is",
    (
        "waiting/suspending.py",
        "other comparison in _inline: 'left > _PATIENCE_SECONDS' -> '(left >= _PATIENCE_SECONDS)'",
    ): "differs at one estimate: whether one that is exactly the patience long is waited for in place",
    (
        "transport/progress.py",
        "other comparison in left: 'now < self._rests' -> '(now <= self._rests)'",
    ): "differs at one instant, by a rest of no length",
    (
        "transport/progress.py",
        "other comparison in nap: 'one.left(now) <= 0' -> '(one.left(now) < 0)'",
    ): "differs at one instant, after which the next look is one nap later",
}
