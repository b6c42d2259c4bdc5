"""Errors for arguments that do not fit a function's signature or have the wrong type.

Python's own error only says how many arguments it expected, or which attribute an object deep inside lacks,
and is not one of this library's types. This module must not know what a call does.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from numbers import Integral
from typing import Any, NoReturn, TypeVar

from asynccoll.errors import (
    AsyncCollError,
    InvalidArgumentError,
    InvalidCallError,
    PayloadTypeError,
    UnsupportedOpError,
)
from asynccoll.host.frames import without_ours

Function = TypeVar("Function", bound=Callable[..., object])
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
#: Errors that refuse an argument; what found it wrong may not know of which call it is.
_REFUSALS = (InvalidArgumentError, PayloadTypeError, UnsupportedOpError)
#: How users write the names of public packages other than ``ac``.
_WRITTEN = {"overlap": "ac.overlap", "trace": "ac.trace", "testing": "asynccoll.testing"}
#: Raises the error for a call that Python rejected: its function, its arguments, and Python's ``TypeError``.
Refuse = Callable[[Callable[..., object], Sequence[object], Mapping[str, object], TypeError], NoReturn]


def fitting(
    function: Function,
    refuse: Refuse | None = None,
    *,
    left_out: Mapping[str, str] | None = None,
    name: str = "",
) -> Function:
    """Wrap a function or constructor: arguments that do not fit raise an error that says which ones do.

    ``left_out``: keywords that other libraries' functions take, and why this one does not take them.
    ``name``: what errors that refuse an argument begin with, unless they mention it.
    """

    @wraps(function)
    def call(*args: Any, **given: Any) -> object:
        try:
            try:
                return function(*args, **given)
            except TypeError as error:
                if getattr(error.__traceback__, "tb_next", None) is not None:  # raised by the function itself
                    raise
                said = error
            (refuse or partial(_refuse, left_out=left_out or {}))(function, args, given, said)
        except (AsyncCollError, KeyboardInterrupt) as error:
            if isinstance(error, _REFUSALS) and name and not re.search(rf"\b{name}\b", str(error)):
                error.args = (f"{name}: {error}",)
            raise without_ours(error)  # noqa: B904  # it is the same one

    return call  # type: ignore[return-value]  # by its signature


def check(name: str, given: object, kinds: type | tuple[type, ...], expected: str, instead: str = "") -> None:
    """Raise ``misfit`` unless ``given`` is an instance of one of ``kinds``, which ``expected`` describes."""
    if not isinstance(given, kinds):
        raise misfit(name, expected, given, instead)


def integer(given: object) -> int | None:
    """Return an integer, NumPy's as well, as an ``int``; None for all else, also for a bool or a tensor."""
    if type(given) is int:
        return given
    return int(given) if isinstance(given, Integral) and not isinstance(given, bool) else None


def check_count(name: str, given: object, least: int = 1) -> None:
    """Raise ``misfit`` unless ``given`` is an ``integer`` of at least ``least``."""
    count = integer(given)
    if count is None or count < least:
        raise misfit(name, f"an int of {least} or more" if least else "an int from 0 up", given)


def misfit(name: str, expected: str, given: object, instead: str = "") -> InvalidCallError:
    """Build the error for the argument ``name``; ``instead``: what to write instead of it."""
    short = given is None or isinstance(given, (bool, int, float, str))
    told = f"{given!r:.80}" if short else named_type(given)
    return InvalidCallError(f"{name} must be {expected}, got {told}{f': {instead}' if instead else ''}")


def check_function(name: str, given: object, expected: str = "a function", instead: str = "") -> None:
    """Raise ``misfit`` if ``given`` cannot be called."""
    if not callable(given):
        raise misfit(name, expected, given, instead)


def check_options(called: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise an error for keywords in ``given`` that ``called``, to which they are passed, does not take."""
    if unknown := sorted({*given} - {*known}):
        what = f"{called} takes no {', '.join(f'{one}=' for one in unknown)}"
        raise InvalidCallError("; ".join([what, *meant(unknown, known), _keywords([*known])]))


def meant(unknown: Sequence[str], known: Collection[str], cutoff: float = 0.6) -> list[str]:
    """Return a question for each of the ``unknown`` keywords that is spelled much like a ``known`` one."""
    found = (near(one, sorted(known), cutoff) for one in unknown)
    return [f"did you mean {right}=?" for right in found if right]


def named_type(given: object) -> str:
    """Describe the type of ``given``: ``None``, ``a Tensor``, ``a list of int``, ``the class Adam``."""
    if given is None:
        return "None"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if isinstance(given, (list, tuple)) and given:
        return f"a {type(given).__name__} of {type(given[0]).__name__}"
    return f"{'an' if type(given).__name__[0] in 'AEIOUaeiou' else 'a'} {type(given).__name__}"


def near(name: str, names: Sequence[str], cutoff: float = 0.6) -> str:
    """Return the one of ``names`` that is spelled most like ``name``; "" if none is close."""
    return next(iter(difflib.get_close_matches(name, names, 1, cutoff)), "")


def _refuse(
    function: Callable[..., object],
    args: Sequence[object],
    given: Mapping[str, object],
    said: TypeError,
    left_out: Mapping[str, str],
) -> NoReturn:
    parameters = list(inspect.signature(function).parameters.values())
    name, text = function.__name__, str(said)
    if name == "__init__":  # Python counts ``self``, and uses a name that no user writes
        name, parameters = function.__qualname__.split(".")[-2], parameters[1:]
        text = f"{name}() {_by_binding(inspect.Signature(parameters), args[1:], given)}"
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    unknown = [one for one in given if one not in {*named, *left_out} and not takes_any]
    meant = {one: near(one, named) for one in unknown}
    advice = [f"leave {one}= out: {left_out[one]}" for one in given if one in left_out]
    advice += [f"did you mean {right}=?" if right else _keywords(named) for right in meant.values()]
    text = "; ".join([text, *dict.fromkeys(advice)])
    if all(meant.values()):  # otherwise the suggested call would mean something else
        written = _written(parameters, {meant.get(one, one) for one in given if one not in left_out})
        package = function.__module__.split(".")[1:2]
        text += f": write {_WRITTEN.get(''.join(package), 'ac')}.{name}({written})"
    raise InvalidCallError(text)


def _written(parameters: Sequence[inspect.Parameter], by_name: Collection[str]) -> str:
    """Write out the arguments to pass: those that are required, and those that were passed ``by_name``."""
    needed = [one for one in parameters if one.default is one.empty and one.kind not in _VARIABLE]
    first = [one.name for one in needed if one.kind is not one.KEYWORD_ONLY]
    named = [one.name for one in needed if one.kind is one.KEYWORD_ONLY]
    named += sorted({*by_name} - {*first, *named})
    return ", ".join([*first, *(f"{one}=..." for one in named)])


def _keywords(names: Sequence[str]) -> str:
    if not names:
        return "there are no keyword arguments"
    return f"keyword argument{'s' * (len(names) > 1)}: {', '.join(names)}"


def _by_binding(signature: inspect.Signature, args: Sequence[object], given: Mapping[str, object]) -> str:
    """Return what ``inspect`` says about arguments that do not fit."""
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        return f"{'got ' * str(error).startswith('too')}{error}"
    return "got arguments that do not fit"
