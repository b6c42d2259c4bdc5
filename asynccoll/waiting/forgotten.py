"""Errors and warnings for a user who forgot to await a work and used it as its result, or dropped it.

Arithmetic, indexing, ``float(work)``, ``work.shape`` and ``torch.relu(work)`` raise an error that names
the call that made the work, and says how to get its result. Type checkers do not see these methods, so they
still report ``work + 1`` as a mistake.

Dropping a work warns. If an uncaught exception, whose frames held the work, has ended the program, a work
warns only if it has an error that was not reported yet. If warnings are errors (``python -W error``), Python
prints one that is raised in a finalizer and continues, as for a coroutine that was never awaited; so the
first one is kept here, and ``finalize`` raises it (``raised``).
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from asynccoll import host
from asynccoll.errors import AbortedError, PayloadTypeError, UnawaitedWorkWarning
from asynccoll.host.call_site import Place
from asynccoll.host.exits import died_of

_ARITHMETIC = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor"
_TAKES_ONE = "neg pos abs invert lt le gt ge float int complex index round getitem len"
#: The methods of operators; ``_AS_SIGNS`` has their symbols in the same order.
_SIGNED = (
    "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor neg pos invert lt le gt ge getitem"
)
_AS_SIGNS = "+ - * @ / // % ** << >> & | ^ - + ~ < <= > >= []"
_SIGNS = dict(zip(_SIGNED.split(), _AS_SIGNS.split(), strict=True))


class _Raised:
    """What has been reported about dropped works.

    ``first``: the first warning about a dropped work that was raised as an error, or "". ``told``: the errors
    of works dropped as the program ended, each reported once. ``shown``: for each file, the registry of
    warnings that were shown, for the ``warnings`` module, which by default shows each of them once.
    """

    def __init__(self) -> None:
        self.first = ""
        self.told: list[str] = []
        self.shown: defaultdict[str, dict[Any, Any]] = defaultdict(dict)


_raised = host.per_process(_Raised)


def warn(text: str, place: Place, failure: BaseException | None = None) -> None:
    """Warn about a work that was created at ``place`` and dropped. Called by its finalizer.

    ``failure``: the error of the work, if it has failed.
    """
    if (end := died_of()) and not _is_news(failure, end):
        return
    try:
        shown = _raised.shown[place.file]
        warnings.warn_explicit(text, UnawaitedWorkWarning, place.file, place.line, registry=shown)
    except BaseException as error:  # warnings turned into errors, or the interpreter is shutting down
        import sys

        if sys is not None and sys.unraisablehook is not None:
            if isinstance(error, UnawaitedWorkWarning):
                _raised.first = _raised.first or text  # not the error: its frames would keep the work alive
            raise


def _is_news(failure: BaseException | None, end: str) -> bool:
    """Whether ``failure`` was not reported yet, in the program's ``end`` or here; record it as reported."""
    text = str(failure).partition("\n")[0]
    if failure is None or isinstance(failure, AbortedError) or text in end or text in _raised.told:
        return False
    _raised.told.append(text)
    return True


def raised() -> UnawaitedWorkWarning | None:
    """Return the first warning raised as an error, which no caller has received; None from then on."""
    text, _raised.first = _raised.first, ""
    return UnawaitedWorkWarning(text) if text else None


def _refuse(work: object, what: str) -> PayloadTypeError:
    if isinstance(work, NotItsResult):
        work._told()
    return PayloadTypeError(
        f"{what} of {work!r}, which is the handle of a call, not its result: was an await forgotten? Use "
        "`await work`, or work.wait() where no event loop runs"
    )


def _refusing(name: str, told: str) -> Callable[..., NoReturn]:
    def method(self: object, *_: object) -> NoReturn:
        raise _refuse(self, told)

    method.__name__ = method.__qualname__ = name
    return method


class NotItsResult:
    """A handle whose operators and attributes raise an error that says to await the result."""

    __slots__ = ()

    def _told(self) -> None:
        """Note that an error said that this was not awaited, so that dropping it need not warn as well."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            # A protocol that the caller looks for, or an own attribute that a failed constructor left unset.
            if name.startswith("__") or hasattr(type(self), name):
                raise AttributeError(name)
            raise AttributeError(str(_refuse(self, f"attribute {name!r}")), name=name, obj=self)

        def __format__(self, spec: str) -> str:
            if spec:
                raise _refuse(self, f"format {spec!r}")
            return str(self)

        @classmethod
        def __torch_function__(
            cls,
            function: object,
            _: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> NoReturn:
            given = [*args, *(kwargs or {}).values()]
            flat = [one for x in given for one in (x if isinstance(x, (list, tuple)) else (x,))]
            work = next((one for one in flat if isinstance(one, cls)), cls.__name__)
            raise _refuse(work, getattr(function, "__name__", str(function)))


for _name in (
    *_TAKES_ONE.split(),
    *(f"{side}{name}" for name in _ARITHMETIC.split() for side in ("", "r")),
):
    _told = _SIGNS.get(_name) or _SIGNS.get(_name.removeprefix("r")) or f"{_name}()"
    setattr(NotItsResult, f"__{_name}__", _refusing(f"__{_name}__", f"`{_told}`"))
