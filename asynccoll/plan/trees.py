"""Pytrees: dicts, lists, tuples, named tuples and dataclasses of payloads, flattened and rebuilt.

Dictionary keys are sorted, never taken in insertion order: two ranks that fill a dict in different
orders must reduce the same leaves with each other. So keys need an order that is the same on all ranks:
strings, numbers, bytes, None, enum members, paths, dtypes, devices and tuples of these have one; a frozenset
or an object of a user's class has none, and is refused. ``None`` as a value is part of the structure, not a
leaf. A dataclass is sent as its fields, and rebuilt without calling ``__init__``; an instance with other
attributes is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
import numbers
import pathlib
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import torch

from asynccoll.errors import InvalidArgumentError, PayloadTypeError

#: How deep trees may be nested: they are walked by recursion, here and where they are described and rebuilt.
MAX_DEPTH = 100


@dataclasses.dataclass(frozen=True, slots=True)
class TreeSpec:
    """The structure of a tree: the kind of its root, and the names and structures of the root's children.

    ``kind`` is the class's name, ``"*"`` for a leaf, or ``"None"``. ``make`` rebuilds the root from children.
    """

    kind: str
    make: Callable[[Sequence[object]], object] | None = dataclasses.field(compare=False, repr=False)
    names: tuple[str, ...] = ()
    children: tuple[TreeSpec, ...] = ()

    #: Whether all children are leaves, so that the node can be rebuilt without recursion.
    flat: bool = dataclasses.field(default=False, compare=False, repr=False)

    @property
    def leaves(self) -> int:
        return 1 if self.kind == "*" else sum(child.leaves for child in self.children)

    @property
    def bare(self) -> TreeSpec:
        """The same structure without ``make``, which may keep the tree and its tensors alive."""
        if self.make is None:
            return self
        children = self.children if self.flat else tuple(child.bare for child in self.children)
        return TreeSpec(self.kind, None, self.names, children)

    def __str__(self) -> str:
        if self.kind in ("*", "None"):
            return self.kind
        inside = ", ".join(
            f"{name}: {child}" if name else str(child)
            for name, child in zip(self.names or [""] * len(self.children), self.children, strict=True)
        )
        return f"{self.kind}({inside})"


_LEAF = TreeSpec("*", None)
_NONE = TreeSpec("None", None)


def is_tree(x: Any) -> bool:
    """Whether ``x`` is a container (or None) and not a leaf."""
    return bool(_is_tree_type(x.__class__))


@lru_cache(maxsize=1024)
def _is_tree_type(cls: Any) -> bool:
    return cls is type(None) or issubclass(cls, (dict, list, tuple)) or dataclasses.is_dataclass(cls)


def flatten(tree: object) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of ``tree`` from left to right, and its structure, for ``unflatten``."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, ())


def _flatten(x: object, leaves: list[object], path: tuple[int, ...]) -> TreeSpec:
    if x is None:
        return _NONE
    if not is_tree(x):
        leaves.append(x)
        return _LEAF
    if id(x) in path:
        raise InvalidArgumentError(f"a {type(x).__name__} contains itself; pass a tree")
    if len(path) == MAX_DEPTH:
        raise InvalidArgumentError(f"a tree is nested more than {MAX_DEPTH} deep; pass a list of its leaves")
    kind, names, children, make = _node(x)
    if not any(_is_tree_type(cls) for cls in {*map(type, children)}):
        leaves.extend(children)
        return TreeSpec(kind, make, names, (_LEAF,) * len(children), flat=True)
    below = (*path, id(x))
    return TreeSpec(kind, make, names, tuple(_flatten(child, leaves, below) for child in children))


def _node(x: Any) -> tuple[str, tuple[str, ...], list[object], Callable[[Sequence[object]], object]]:
    cls = type(x)
    if isinstance(x, dict):
        texts = {*map(type, x)} == {str}  # the common case, in which keys need no further checks
        keys = sorted(x) if texts else sorted(x, key=_key_order)
        names = tuple(map(repr if texts else _key_name, keys))
        return cls.__name__, names, [x[key] for key in keys], _dict_maker(x, keys)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return cls.__name__, tuple(x._fields), list(x), lambda values: tuple.__new__(cls, values)
    if isinstance(x, (list, tuple)):
        make = list if isinstance(x, list) else tuple
        return cls.__name__, (), list(x), make
    names = tuple(field.name for field in dataclasses.fields(x))
    if others := beside_fields(x, names):
        raise PayloadTypeError(
            f"a {cls.__name__} has attributes that are not fields ({', '.join(others)}), which "
            "its result would lack; make them fields, or properties if they follow from the fields"
        )
    try:
        return cls.__name__, names, [getattr(x, name) for name in names], _dataclass_maker(x, names)
    except AttributeError as error:
        raise PayloadTypeError(f"a field of a {cls.__name__} has no value: {error}") from None


def _key_name(key: object) -> str:
    """Return the name of a key for comparing trees; equal keys have the same name."""
    if isinstance(key, numbers.Integral):
        return repr(int(key))
    if isinstance(key, numbers.Real):
        value = float(key)
        return repr(int(value) if value.is_integer() else value)
    if type(key) is tuple:
        return f"({', '.join(map(_key_name, key))})"
    return repr(key)


def _key_order(key: object) -> tuple[object, ...]:
    """Return what a key is sorted by, which is the same on every rank.

    All numbers are of one kind, because 1, True and 1.0 are the same key.
    """
    if isinstance(key, str):
        return ("str", str.__str__(key))
    if isinstance(key, numbers.Real) and not math.isnan(key):
        return ("number", key)
    if isinstance(key, bytes):
        return ("bytes", key)
    if isinstance(key, enum.Enum) and isinstance(key.name, str):
        return ("enum", type(key).__module__, type(key).__qualname__, key.name)
    if isinstance(key, tuple):
        return ("tuple", tuple(map(_key_order, key)))
    if key is None or isinstance(key, (pathlib.PurePath, torch.dtype, torch.device)):
        return (type(key).__name__, str(key))
    shown = "nan" if isinstance(key, numbers.Real) else f"a {type(key).__name__}"
    raise PayloadTypeError(
        f"a dict has {shown} among its keys, which has no order that is the same on every rank, so the wrong "
        "leaves could be matched; use keys of str, numbers, bytes, enum members or tuples of these, or pass "
        "a list"
    )


def _dict_maker(x: dict[object, object], keys: list[object]) -> Callable[[Sequence[object]], object]:
    if type(x) is dict:
        order = list(x)

        def make(values: Sequence[object]) -> object:
            by_key = dict(zip(keys, values, strict=True))
            return {key: by_key[key] for key in order}

        return make
    shell = _shell(x)

    def refill(values: Sequence[object]) -> object:
        rebuilt = copy.copy(shell)
        for key, value in zip(keys, values, strict=True):
            rebuilt[key] = value
        return rebuilt

    return refill


def _shell(x: dict[object, object]) -> dict[object, object]:
    """Return a copy of a dict subclass's instance, from which results are made; refuse one that has no copy.

    The copy is made during the call, before anything is sent.
    """
    try:
        made = copy.copy(x)
        for key in list(made):
            made[key] = x[key]
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    else:
        if type(made) is type(x) and list(made) == list(x):
            return made
        why = "the copy differs"
    raise PayloadTypeError(
        f"a {type(x).__name__} cannot be rebuilt with other values (copy.copy: {why}); pass dict(x)"
    )


def beside_fields(x: object, names: Sequence[str]) -> list[str]:
    """Return the attributes of a dataclass instance that are not among its fields, ``names``.

    Leaves out Python's own, and the values that a ``cached_property`` keeps, which are computed again.
    """
    return [
        name
        for name in sorted(getattr(x, "__dict__", {}).keys() - set(names))
        if not name.startswith("__") and not isinstance(getattr(type(x), name, None), cached_property)
    ]


def _dataclass_maker(x: object, names: tuple[str, ...]) -> Callable[[Sequence[object]], object]:
    # Not dataclasses.replace: it runs __init__, which may refuse or recompute.
    def make(values: Sequence[object]) -> object:
        made = object.__new__(type(x))
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return make


def unflatten(spec: TreeSpec, leaves: Sequence[object]) -> object:
    """Return a tree with the structure ``spec`` and these ``leaves``."""
    return _unflatten(spec, iter(leaves))


def _unflatten(spec: TreeSpec, leaves: Any) -> object:
    if spec.make is None:
        return next(leaves) if spec.kind == "*" else None
    if spec.flat:
        return spec.make(list(islice(leaves, len(spec.children))))
    return spec.make([_unflatten(child, leaves) for child in spec.children])
