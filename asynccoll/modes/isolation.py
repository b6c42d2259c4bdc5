"""torch's modes, kept per task: no task sees the modes that another sets, however their awaits interleave.

torch keeps its modes (``no_grad``, ``autocast``, a default device, ...) per thread, and the tasks of an
event loop share one thread. An isolated coroutine is run in steps, each from one suspension to
the next. Before each step the thread's modes are saved and the coroutine's own are restored; after it, the
reverse.

This module must not know what a collective is, nor which event loop runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch
import torch.utils._device
import torch.utils._python_dispatch

from asynccoll.errors import InvalidArgumentError

P = ParamSpec("P")
T = TypeVar("T")

Dtypes = dict[str, torch.dtype]

_C: ModuleType = torch._C
_DEVICES: Any = torch.utils._device
_DISPATCH = vars(torch.utils._python_dispatch)
_default_device: Any = torch._GLOBAL_DEVICE_CONTEXT  # of this thread

_recording = torch.is_grad_enabled
_inferring = torch.is_inference_mode_enabled
_autocasting = _C._is_any_autocast_enabled
_enter_autocast = _C.autocast_increment_nesting
_leave_autocast = _C.autocast_decrement_nesting
_casts, _cast = torch.is_autocast_enabled, torch.set_autocast_enabled
_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_caching, _set_caching = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_functions = _C._len_torch_function_stack
_dispatchers = _C._len_torch_dispatch_stack
_top_hooks = functools.partial(_C._autograd._top_saved_tensors_default_hooks, False)


def _autocast_depth() -> int:
    """Return how many autocast blocks this thread is in, including those that disable it."""
    _enter_autocast()
    return int(_leave_autocast())


def _plain() -> bool:
    """Whether this thread has torch's default modes, as it nearly always does."""
    _enter_autocast()
    return (
        not _leave_autocast()  # as in _autocast_depth
        and _recording()
        and not _inferring()
        and not _autocasting()
        and not _functions()
        and not _dispatchers()
        and _top_hooks() is None
    )


def _built_for() -> tuple[str, ...]:
    """Return the device types that this torch was built for.

    Does not check whether such a device exists: that initializes CUDA, and a forked child cannot use it then.
    """
    built = {
        "cpu": True,
        "cuda": torch.backends.cuda.is_built(),  # type: ignore[no-untyped-call]  # untyped in torch
        "mps": torch.backends.mps.is_built(),
        "xpu": torch.xpu._is_compiled(),
    }
    return tuple(device for device, is_built in built.items() if is_built)


_BUILT_FOR = _built_for()


def _dtypes() -> Dtypes:
    """Return the dtype that autocast casts to, for each device type on which this process could compute."""
    devices = (*_BUILT_FOR, "xla") if "torch_xla" in sys.modules else _BUILT_FOR
    return {device: torch.get_autocast_dtype(device) for device in devices}


_USUAL_DTYPES = _dtypes()


class _Away:
    """The saved modes of a thread. Creating this resets the thread to torch's defaults.

    ``bring_back``, called once, sets these modes in the thread that calls it. If this object is dropped
    without that, no thread's modes change.
    """

    __slots__ = ("_autocast", "_dispatchers", "_flags", "_functions", "_hooks")

    def __init__(self, usual: Dtypes) -> None:
        # Modes that see torch functions go first and come back last, since they see the setters used here.
        self._functions = _Functions() if _functions() else None
        self._dispatchers = _Dispatchers() if _dispatchers() else None
        self._hooks = _taken_hooks()
        # Only the guard that entered inference mode can leave it, and that one belongs to the task. But
        # entering a guard saves all autograd flags and dispatch keys of the thread (including autocast's
        # switches), and leaving it restores them, in any thread and regardless of what was set since.
        self._flags = _C._InferenceMode(False)
        self._flags.__enter__()
        depth = _autocast_depth()
        self._autocast = _Autocast(depth, usual) if depth or _autocasting() else None

    def bring_back(self) -> None:
        """Set these modes in the calling thread."""
        flags, self._flags = self._flags, None
        flags.__exit__(None, None, None)
        if self._autocast is not None:
            self._autocast.bring_back()
        for pack, unpack in self._hooks:
            _C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        if self._dispatchers is not None:
            self._dispatchers.bring_back()
        if self._functions is not None:
            self._functions.bring_back()

    def __del__(self) -> None:
        if self._flags is not None:  # freeing the guard leaves it in this thread, so undo that
            now = _C._InferenceMode(False)
            now.__enter__()
            self._flags.__exit__(None, None, None)
            now.__exit__(None, None, None)


class _Functions:
    """The torch function modes of a thread. A default device is one of them."""

    __slots__ = ("_default", "_device", "_modes")

    def __init__(self) -> None:
        self._modes = [_C._pop_torch_function_stack() for _ in range(_functions())]
        self._default = getattr(_default_device, "device_context", None)
        self._device = _DEVICES.CURRENT_DEVICE
        _use_default(None)
        _DEVICES.CURRENT_DEVICE = None

    def bring_back(self) -> None:
        for mode in reversed(self._modes):
            _C._push_on_torch_function_stack(mode)
        _use_default(self._default)
        _DEVICES.CURRENT_DEVICE = self._device


def _use_default(context: Any) -> None:
    """Set ``context`` as this thread's default-device context; None removes the attribute.

    With an attribute of None, ``torch.get_default_device()`` would raise AttributeError (torch 2.9).
    """
    if context is not None:
        _default_device.device_context = context
    elif hasattr(_default_device, "device_context"):
        del _default_device.device_context


class _Dispatchers:
    """The torch dispatch modes of a thread, and the process's variables that say whether there are any.

    ``torch.compile`` reads these. A mode sets them when it is entered, and when left puts back what it found.
    """

    __slots__ = ("_modes", "_noted")

    def __init__(self) -> None:
        self._modes = [_C._pop_torch_dispatch_stack(None) for _ in range(_dispatchers())]
        self._noted = _noted()
        _note(dict.fromkeys(self._noted, False))

    def bring_back(self) -> None:
        for mode in reversed(self._modes):
            _C._push_on_torch_dispatch_stack(mode)
        _note(self._noted)


def _noted() -> dict[str, bool]:
    return {name: value for name, value in _DISPATCH.items() if name.startswith("_is_in_")}


def _note(noted: dict[str, bool]) -> None:
    _DISPATCH.update(noted)
    if (tell := _DISPATCH.get("set_is_in_mode_without_ignore_compile_internals")) is not None:
        tell(noted["_is_in_any_mode_without_ignore_compile_internals"])  # a copy in C++


class _Autocast:
    """The state of autocast except its switches: dtypes, nesting depth, and whether it caches casts."""

    __slots__ = ("_caching", "_depth", "_dtypes")

    def __init__(self, depth: int, usual: Dtypes) -> None:
        self._depth = depth
        self._caching = _caching()
        self._dtypes: Dtypes = {}  # those that differ from the defaults
        for device, dtype in usual.items():
            if _casts(device):
                _cast(device, False)
            if (other := _dtype(device)) is not dtype:
                self._dtypes[device] = other
                _set_dtype(device, dtype)
        if not self._caching:
            _set_caching(True)
        for _ in range(depth):
            _leave_autocast()
        # All threads share one cache of cast weights. Another task must not find weights there that this task
        # has cast, perhaps without gradients, or before an update.
        _C.clear_autocast_cache()

    def bring_back(self) -> None:
        for device, dtype in self._dtypes.items():
            _set_dtype(device, dtype)
        if not self._caching:
            _set_caching(False)
        for _ in range(self._depth):
            _enter_autocast()


def _taken_hooks() -> list[tuple[object, object]]:
    """Remove the default hooks for saved tensors, and return them, outermost first."""
    hooks = []
    while (top := _top_hooks()) is not None:
        hooks.append(top)
        _C._autograd._pop_saved_tensors_default_hooks()
    return hooks[::-1]


class _Inherited:
    """A copy of the thread's current modes, for a coroutine that begins later."""

    def __init__(self) -> None:
        self._recording = _recording()
        self._inferring = _inferring()
        self._caching = _caching()
        self._autocast = [pair for pair in _dtypes().items() if _casts(pair[0])]
        self._functions = [_C._get_function_stack_at(k) for k in range(_functions())]
        self._default = getattr(_default_device, "device_context", None)
        self._device = _DEVICES.CURRENT_DEVICE
        self._dispatchers = [_C._get_dispatch_stack_at(k) for k in range(_dispatchers())]
        self._noted = _noted()
        self._hooks = _taken_hooks()
        for pack, unpack in self._hooks:
            _C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    async def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run ``coroutine`` in these modes. Only inference mode has to be left: the task ends anyway."""
        with torch.inference_mode(self._inferring):
            torch.set_grad_enabled(self._recording)
            for device, dtype in self._autocast:
                torch.autocast(device, dtype, cache_enabled=self._caching).__enter__()  # type: ignore[no-untyped-call]
            for pack, unpack in self._hooks:
                _C._autograd._push_saved_tensors_default_hooks(pack, unpack)
            for mode in self._dispatchers:
                _C._push_on_torch_dispatch_stack(mode)
            if self._dispatchers:  # else the variables may be about another thread's
                _note(self._noted)
            for mode in self._functions:
                _C._push_on_torch_function_stack(mode)
            if self._functions:
                _use_default(self._default)
                _DEVICES.CURRENT_DEVICE = self._device
            return await coroutine


class Steps(Awaitable[object]):
    """An awaitable that runs a coroutine in its own modes.

    It has a coroutine's ``cr_frame`` and ``cr_await``, so that task stacks (trio, asyncio) show the
    coroutine's frames.
    """

    __slots__ = ("_begun", "_coroutine", "_inherited", "_modes", "_usual")

    def __init__(self, coroutine: Coroutine[object, object, object]) -> None:
        self._coroutine = coroutine
        self._modes: _Away | None = None  # None: torch's defaults
        plain = _plain()
        self._inherited = None if plain else _Inherited()
        self._usual = _dtypes() if plain else _USUAL_DTYPES
        self._begun = False

    def _begin(self) -> None:
        self._begun = True
        inherited, self._inherited = self._inherited, None
        if inherited is not None:
            self._coroutine = inherited.run(self._coroutine)

    def _step(self, resume: Callable[..., object], *given: object) -> object:
        outside = None if _plain() else _Away(self._usual)
        try:
            mine, self._modes = self._modes, None
            if mine is not None:
                mine.bring_back()
            return resume(*given)
        finally:
            if not _plain():
                self._modes = _Away(self._usual)
            if outside is not None:
                outside.bring_back()

    def __await__(self) -> Generator[object, object, object]:
        return cast(Generator[object, object, object], self)

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> object:
        if not self._begun:
            self._begin()
        return self._step(self._coroutine.send, None)

    def send(self, value: object) -> object:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: object) -> object:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._step(self._coroutine.close)

    def __del__(self) -> None:
        if not self._begun:
            self._coroutine.close()  # no second warning: Python warns of the coroutine awaiting this

    @property
    def cr_frame(self) -> object:
        return getattr(self._coroutine, "cr_frame", None)

    @property
    def cr_await(self) -> object:
        return getattr(self._coroutine, "cr_await", None)


async def _driven(steps: Steps) -> Any:
    return await steps


@overload
def isolated(work: Coroutine[object, object, T]) -> Coroutine[object, object, T]: ...


@overload
def isolated(
    work: Callable[P, Coroutine[object, object, T]],
) -> Callable[P, Coroutine[object, object, T]]: ...


def isolated(work: object) -> object:
    """Wrap ``work``, a coroutine or an async function, so that it has its own torch modes.

    torch keeps its modes per thread, so ``with torch.no_grad():`` around an ``await`` in one task disables
    gradients in every other task. An isolated coroutine neither changes the modes of other tasks nor sees
    theirs: gradients, inference mode, autocast of every device, the default device, torch function and
    dispatch modes, and default hooks for saved tensors. It begins in the modes that are set when
    ``isolated`` is called, or when the function that ``isolated`` returned is called. Children of
    ``ac.create_task_group()`` are isolated already. For other tasks:

    >>> asyncio.create_task(ac.isolated(evaluate(model)))
    >>> nursery.start_soon(ac.isolated(evaluate), model)
    >>> asyncio.run(ac.isolated(main()))

    Awaiting it is like awaiting the coroutine itself: same result, exceptions and cancellation.

    Raises:
        InvalidArgumentError: ``work`` is neither a coroutine nor a function that returns one.
    """
    if isinstance(work, Coroutine):
        return _isolated(work)
    if not callable(work):
        raise InvalidArgumentError(
            "isolated takes a coroutine that has not begun, or an async function, got "
            f"{type(work).__name__}; a task that runs already cannot be isolated: pass its coroutine"
        )

    @functools.wraps(work)
    def start(*args: object, **kwargs: object) -> Coroutine[object, object, object]:
        made = work(*args, **kwargs)
        if not isinstance(made, Coroutine):
            raise InvalidArgumentError(
                f"isolated takes an async function; {getattr(work, '__qualname__', work)!s} returned "
                f"{type(made).__name__}, no coroutine"
            )
        return _isolated(made)

    return start


def _isolated(coroutine: Coroutine[object, object, T]) -> Coroutine[object, object, T]:
    driven = _driven(Steps(coroutine))
    for name in ("__name__", "__qualname__"):  # for the event loop's messages
        setattr(driven, name, getattr(coroutine, name, "coroutine"))
    return driven
