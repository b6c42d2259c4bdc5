"""A tree as text, node by node, so that an error can name the leaf about which ranks differ.

A tree of some size has no room in a line. So the text of a call (``texts.at_line``) ends with all nodes of
its tree, compressed; ``shown_part`` is what is shown of such a text, ``differing`` says where trees differ.
This module must not know how texts get to other ranks.
"""

from __future__ import annotations

import base64
import keyword
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from asynccoll.host.words import listed
from asynccoll.plan.spec import dtype_name
from asynccoll.plan.trees import TreeSpec

__all__ = ["differing", "packed", "shown_part"]

#: Between what is shown of a text and the nodes of its tree.
_BETWEEN = "\x1f"
#: So many differences are shown; and no more is read of what a peer has packed.
_MOST, _MOST_BYTES = 3, 1 << 20
#: Larger trees have no room anyway, and would take long to compress.
_MOST_LEAVES = 2000
#: Of a leaf that is not in the same native call as the others.
_OTHER = "of another kind"
_LISTED = re.compile(r"leaves \[([\d, ]+)\]")


def packed(what: object) -> str:
    """The end of the text of the call ``what``: the nodes of its tree; "" if it is of none."""
    nodes = _nodes_of(what)
    if not nodes:
        return ""
    lines = "\n".join(f"{path}\t{said}" for path, said in nodes.items())
    return _BETWEEN + base64.b85encode(zlib.compress(lines.encode(errors="replace"), 9)).decode()


def shown_part(text: str) -> str:
    """Return ``text`` without the nodes of its tree."""
    return text.partition(_BETWEEN)[0]


def differing(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """Where the trees of these texts differ, as a line of an error.

    ``(the trees differ at ['b']: float32 [4] on rank 0, but float32 [5] on rank 1)``;
    "" if one of them tells of no tree, or if all trees are alike.
    """
    trees = list(map(_unpacked, texts))
    if not all(trees):
        return ""
    paths = _topmost(trees)
    found = [
        f"{path or 'the tree itself'}: {_sides(ranks, [tree.get(path) for tree in trees])}"
        for path in paths[:_MOST]
    ]
    more = "; and elsewhere" * (len(paths) > _MOST)
    return f"\n(the trees differ at {'; '.join(found)}{more})" if found else ""


def _unpacked(text: str) -> dict[str, str]:
    data = text.partition(_BETWEEN)[2]
    try:
        lines = zlib.decompressobj().decompress(base64.b85decode(data), _MOST_BYTES).decode()
    except (ValueError, zlib.error):  # cut, or not written by this version
        return {}
    parts = [line.partition("\t") for line in lines.split("\n")]
    return {path: said for path, _, said in parts}


def _topmost(trees: Sequence[Mapping[str, str]]) -> list[str]:
    """The first paths at which trees differ, without those below another such path; one too many at most."""
    found, below = list[str](), tuple[str, ...]()
    for path in dict.fromkeys(path for tree in trees for path in tree):
        if len({tree.get(path) for tree in trees}) > 1 and not path.startswith(below):
            found.append(path)
            below += (f"{path}[", f"{path}.")
            if len(found) > _MOST:
                break
    return found


def _sides(ranks: Sequence[int], said: Sequence[str | None]) -> str:
    by_text: dict[str | None, list[int]] = {}
    for rank, one in zip(ranks, said, strict=True):
        by_text.setdefault(one, []).append(rank)
    return ", but ".join(
        f"{'missing' if one is None else one} on {listed(members)}" for one, members in by_text.items()
    )


def _nodes_of(what: object) -> dict[str, str]:
    """What is at each path of the tree that the call ``what`` is of: the class of a node, or of a leaf."""
    match what:
        case ((str(), TreeSpec() as spec, *placed), (str(), detail, *native)) if spec.leaves <= _MOST_LEAVES:
            leaves = _tensors(placed, detail, native)
            counted = iter(range(spec.leaves))
            return {
                path: leaves.get(next(counted), _OTHER) if kind == "*" else kind
                for path, kind in _paths(spec, "")
            }
    return {}


def _paths(spec: TreeSpec, path: str) -> Iterator[tuple[str, str]]:
    yield path, spec.kind
    names = spec.names or [str(index) for index in range(len(spec.children))]
    for name, child in zip(names, spec.children, strict=True):
        field = name.isidentifier() and not keyword.iskeyword(name)
        yield from _paths(child, f"{path}.{name}" if field else f"{path}[{_one_line(name)}]")


def _one_line(name: str) -> str:
    return name.replace("\n", " ").replace("\t", " ").replace(_BETWEEN, " ")


def _tensors(placed: Sequence[object], detail: object, native: Sequence[object]) -> dict[int, str]:
    """Dtype and shape of those leaves, by number, that are in this native call of the tree."""
    match native:
        case (torch.dtype() as dtype, torch.Size() as shape):
            found = [(dtype, shape)]
        case (torch.dtype() as dtype, tuple() as shapes):
            found = [(dtype, shape) for shape in shapes]
        case (tuple() as tensors,):
            found = [(one[0], one[1]) for one in tensors]
        case _:
            return {}
    among = _listed(str(detail)) or range(len(found))  # the tensors of one dtype, among all tensors
    at = next(filter(None, map(_listed, map(str, placed))), None)  # all tensors, among all leaves
    leaves = among if at is None else [at[index] for index in among]
    return {
        leaf: f"{dtype_name(dtype)} {list(shape)}" for leaf, (dtype, shape) in zip(leaves, found, strict=True)
    }


def _listed(text: str) -> list[int]:
    found = _LISTED.search(text)
    return [int(one) for one in found[1].split(",")] if found else []
