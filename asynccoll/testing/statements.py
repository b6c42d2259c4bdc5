"""Switch points before every statement of some modules, for the duration of a block.

Each module's source is recompiled with a call before every statement, and its existing functions get the new
code: nothing is imported again, and line numbers stay the same. Functions that are already running keep their
old code. Methods that the interpreter calls in odd places (``__del__``, ``__repr__``, ``__str__``,
``__hash__``, ``__eq__``) are left alone.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import gc
import importlib
import inspect
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import check, misfit
from asynccoll.testing.scheduler import running

__all__ = ["Source", "instrumented", "sources"]

_NAME = "__asynccoll_statement__"
_LEFT_OUT = frozenset({"__del__", "__repr__", "__str__", "__hash__", "__eq__"})
#: Tells functions of one file apart: name and first line.
Key = tuple[str, int]
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))  # TryStar: since Python 3.11


@dataclass(frozen=True)
class Source:
    """The source file of one module."""

    module: str
    file: str


def sources(modules: Sequence[str]) -> tuple[Source, ...]:
    """Return the source files of ``modules``.

    Raises:
        InvalidArgumentError: there is no such module, or it has no source.
    """
    if isinstance(modules, str):
        raise misfit("statements", "a list of names of modules", modules, f"write [{modules!r}]")
    check("statements", modules, Iterable, "a list of names of modules")
    return tuple(_source(name) for name in modules)


def _source(name: str) -> Source:
    check("each of statements", name, str, "the name of a module")
    try:
        module = importlib.import_module(name)
        file = inspect.getsourcefile(module)
    except (ImportError, TypeError) as error:
        raise InvalidArgumentError(f"statements: no source of module {name!r}: {error}") from error
    if file is None or name.startswith("asynccoll.testing"):
        raise InvalidArgumentError(f"statements: no source of module {name!r} to put switch points into")
    return Source(name, file)


@contextlib.contextmanager
def instrumented(modules: Sequence[Source]) -> Iterator[None]:
    """Put a switch point before each statement of ``modules``, for the block."""
    if not modules:
        yield
        return
    codes = {source.file: _codes(source) for source in modules}
    changed: list[tuple[types.FunctionType, types.CodeType]] = []
    setattr(builtins, _NAME, _statement)
    for one in gc.get_objects():
        if type(one) is types.FunctionType:
            code = codes.get(one.__code__.co_filename, {}).get(_key(one.__code__))
            if code is not None and code.co_freevars == one.__code__.co_freevars:
                changed.append((one, one.__code__))
                one.__code__ = code
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code


def _statement() -> None:
    scheduler = running()
    if scheduler is not None:
        scheduler.statement()


def _key(code: types.CodeType) -> Key:
    return getattr(code, "co_qualname", code.co_name), code.co_firstlineno  # co_qualname: since Python 3.11


@cache
def _codes(source: Source) -> dict[Key, types.CodeType]:
    """Return each function's code with switch points, except functions that cannot be told apart."""
    module = importlib.import_module(source.module)
    tree = _Points().visit(ast.parse(inspect.getsource(module)))
    ast.fix_missing_locations(tree)
    whole = compile(tree, source.file, "exec", dont_inherit=True, flags=_future_flags(module))
    found: dict[Key, types.CodeType] = {}
    twice: set[Key] = set()
    left = [whole]
    while left:
        for one in left.pop().co_consts:
            if isinstance(one, types.CodeType):
                left.append(one)
                twice |= {_key(one)} & found.keys()
                found[_key(one)] = one
    return {key: code for key, code in found.items() if key not in twice}


def _future_flags(module: types.ModuleType) -> int:
    """Return the compiler flags for what the module has imported from ``__future__``."""
    flags = 0
    for name in __future__.all_feature_names:
        feature: Any = getattr(__future__, name)
        flags |= feature.compiler_flag if vars(module).get(name) == feature else 0
    return flags


class _Points(ast.NodeTransformer):
    """Puts a call before each statement of a function."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._function(node)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        self._function(node)
        return node

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name not in _LEFT_OUT:
            self.generic_visit(node)
            doc = node.body[:1] if ast.get_docstring(node, clean=False) is not None else []
            node.body = [*doc, *_with_points(node.body[len(doc) :])]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, *_TRIES)):
            for name in ("body", "orelse", "finalbody"):
                if getattr(node, name, None):
                    setattr(node, name, _with_points(getattr(node, name)))
        elif isinstance(node, (ast.ExceptHandler, ast.match_case)):
            node.body = _with_points(node.body)
        return node


def _with_points(body: list[ast.stmt]) -> list[ast.stmt]:
    return [one for statement in body for one in (_call(statement), statement)]


def _call(before: ast.stmt) -> ast.stmt:
    call = ast.Expr(ast.Call(ast.Name(_NAME, ast.Load()), [], []))
    return ast.copy_location(call, before)
