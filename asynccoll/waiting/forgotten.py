"""What a user who forgot to await a work is told, whatever is done with it instead, or if nothing is.

Arithmetic, indexing, ``float(work)``, ``work.shape``, ``torch.relu(work)``: the error names the call that
made the work, and how to get its result. Type checkers do not see these methods: to them ``work + 1`` stays a
mistake.

A work that is dropped warns; not if an uncaught exception has ended the program, whose frames held it: then
only an error of its own is told. Where warnings are errors (``python -W error``) Python prints that of a
finalizer and goes on, as with a coroutine that was never awaited: ``raised`` keeps the first, which
``finalize`` raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from asynccoll import host
from asynccoll.errors import AbortedError, PayloadTypeError, UnawaitedWorkWarning
from asynccoll.host.call_site import Place
from asynccoll.host.exits import died_of

__all__ = ["NotItsResult", "raised", "warn"]

_ARITHMETIC = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor"
_TAKES_ONE = "neg pos abs invert lt le gt ge float int complex index round getitem len"
#: Those that are written as signs.
_SIGNED = (
    "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor neg pos invert lt le gt ge getitem"
)
_AS_SIGNS = "+ - * @ / // % ** << >> & | ^ - + ~ < <= > >= []"
_SIGNS = dict(zip(_SIGNED.split(), _AS_SIGNS.split(), strict=True))


class _Raised:
    """The warnings of dropped works that were raised as errors, and the errors that the last ones had."""

    def __init__(self) -> None:
        self.first = ""
        self.told: list[str] = []


_raised = host.per_process(_Raised)


def warn(text: str, place: Place, failure: BaseException | None = None) -> None:
    """Warn of what was created at ``place`` and dropped: called by its finalizer.

    ``failure``: what it has failed with, if it has.
    """
    if (end := died_of()) and not _is_news(failure, end):
        return
    try:
        warnings.warn_explicit(text, UnawaitedWorkWarning, place.file, place.line)
    except BaseException as error:  # warnings turned into errors, or an interpreter that is shutting down
        import sys

        if sys is not None and sys.unraisablehook is not None:
            if isinstance(error, UnawaitedWorkWarning):
                _raised.first = _raised.first or text  # not the error: its frames would keep the work alive
            raise


def _is_news(failure: BaseException | None, end: str) -> bool:
    """Whether ``failure`` was told to nobody: not as the ``end`` of the program, nor here before."""
    text = str(failure).partition("\n")[0]
    if failure is None or isinstance(failure, AbortedError) or text in end or text in _raised.told:
        return False
    _raised.told.append(text)
    return True


def raised() -> UnawaitedWorkWarning | None:
    """The first that was raised as an error, which nobody has got; once."""
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
    """The operators and attributes of results, each of which says that a result has to be waited for."""

    __slots__ = ()

    def _told(self) -> None:
        """An error says now that it was not awaited: a warning need not say it again when it is dropped."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            # A protocol that somebody looks for; or its own, which a constructor that failed left unset.
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
