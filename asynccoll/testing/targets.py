"""The function that is explored, which other processes find by its file and name."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asynccoll.backends import choosing
from asynccoll.errors import InvalidArgumentError
from asynccoll.testing.processes import exchanged

__all__ = ["Target", "of_function", "of_path"]


@dataclass(frozen=True)
class Target:
    """A function: as it is, or as another process finds it."""

    function: Callable[..., object]
    #: how a script imports it, what it is called there, and the folder that has to be on its ``sys.path``
    imported: str
    name: str
    folder: str = ""
    path: str = ""

    def sendable(self) -> bytes:
        """Return bytes from which ``found`` gets the function in another process.

        Raises:
            InvalidArgumentError: the function cannot be found there.
        """
        try:
            return pickle.dumps((self.path, self.name) if self.path else self.function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidArgumentError(
                f"jobs= needs a function that other processes can import, at the top of its module: {error}"
            ) from error

    @staticmethod
    def found(sent: bytes) -> Callable[..., object]:
        """Return the function that was sent."""
        what: Any = pickle.loads(sent)  # noqa: S301  # our own process sent it
        return _load(*what) if isinstance(what, tuple) else what


def of_function(function: Callable[..., object]) -> Target:
    """Return the target for a function that the caller has."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if all(part.isidentifier() for part in name.split(".")):  # else defined inside a function
        if module == "__main__":
            module, script = _main()
            if script and "." not in Path(script).stem:
                return Target(function, *_in_script(Path(script).resolve(), name))
        if module:
            return Target(function, _import(module, name), name)
    name = getattr(function, "__name__", "")
    name = name if name.isidentifier() else "main"
    return Target(function, f"# Define {name} here: no other program can import it from where it is.", name)


def _main() -> tuple[str, str]:
    """Return how others import ``__main__``: by its module (``python -m``), or its file, if it has one."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return ("", getattr(main, "__file__", "")) if spec is None else (spec.name, "")


def _in_script(file: Path, name: str) -> tuple[str, str, str]:
    """Return how to import ``name`` from a script, ``name``, and the script's folder if it is another one."""
    folder = "" if file.parent == Path.cwd() else str(file.parent)
    return _import(file.stem, name), name, folder


def _import(module: str, name: str) -> str:
    top = name.partition(".")[0]
    if all(part.isidentifier() for part in module.split(".")):
        return f"from {module} import {top}"
    return f"import importlib\n\n{top} = importlib.import_module({module!r}).{top}"


def of_path(path: str) -> Target:
    """Return the target for a function given as ``file.py::name``.

    Raises:
        InvalidArgumentError: there is no such file, or no such function there.
    """
    file, mark, name = path.partition("::")
    if not mark or not name:
        raise InvalidArgumentError(
            f"expected a file and a function, such as test_loop.py::main, got {path!r}"
        )
    where = Path(file).resolve()
    if not where.is_file():
        raise InvalidArgumentError(f"there is no file {file!r}")
    return Target(_load(str(where), name), *_in_script(where, name), str(where))


def _load(file: str, name: str) -> Callable[..., Any]:
    where = Path(file)
    if str(where.parent) not in sys.path:
        sys.path.insert(0, str(where.parent))
    if "." in where.stem:
        raise InvalidArgumentError(f"{where.name} cannot be imported, with a dot in its name; rename it")
    with exchanged(choosing, ("create",), SimpleNamespace(create=partial(_joins, where.name))):
        module = importlib.import_module(where.stem)
    imported = getattr(module, "__file__", None) or "a part of Python"
    if Path(imported).resolve() != where:
        raise InvalidArgumentError(
            f"{file} cannot be imported: another module has its name, {imported}; rename it"
        )
    found = getattr(module, name, None)
    if not callable(found):
        raise InvalidArgumentError(f"{where.name} has no function {name!r}")
    function: Callable[..., object] = found
    return function


def _joins(file: str, *_: object, **__: object) -> object:
    """Raise instead of joining a world, for a script that runs when it is imported."""
    raise InvalidArgumentError(
        f"{file} joins a world while it is imported: it would run for real, and write its files; put what "
        'runs it under `if __name__ == "__main__":`'
    )
