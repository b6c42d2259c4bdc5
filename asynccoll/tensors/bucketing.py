"""Many small tensors as a few large ones: which are sent together, and how they are packed and unpacked.

Buckets are filled in leaf order, by dtype and device, up to a size limit. They depend only on the tensors'
shapes, dtypes and devices and on that limit, so every rank makes the same buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch._C import _nn  # the functions that DDP uses, too: one call for all tensors

from asynccoll.memory.aliasing import has_memory
from asynccoll.memory.aligned import Layout
from asynccoll.modes.captured import uncast

#: As in DDP: large enough to reach full bandwidth, small enough to overlap.
BUCKET_BYTES = 25 << 20

#: What tensors that are sent together have in common. Read from every tensor, so a function in C.
kind_of: Callable[[torch.Tensor], tuple[torch.dtype, torch.device, torch.layout]] = attrgetter(
    "dtype", "device", "layout"
)
_numel = torch.Tensor.numel
_dim = torch.Tensor.dim
_is_conj = torch.Tensor.is_conj
_is_neg = torch.Tensor.is_neg
#: As ``torch.no_grad``, which is written in Python: Ctrl-C while it begins would leave gradients disabled.
_unrecorded = torch._C._AutoDispatchBelowAutograd
#: What makes torch note that a tensor is a view of another.
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


#: The leaves of a tree (by position) that are sent together.
Bucket = tuple[int, ...]


def dense_bytes(x: torch.Tensor) -> int:
    """Return the size of ``x`` in bytes; 0 if it is sparse, since then the size differs between ranks."""
    return x.nbytes if x.layout is torch.strided else 0


def buckets(tensors: Sequence[torch.Tensor], limit_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Return which ``tensors`` are sent together: same dtype and device, at most ``limit_bytes``.

    A larger tensor, and one that is not dense, is sent alone.
    """
    kinds = list(map(kind_of, tensors))
    if len(set(kinds)) == 1 and kinds[0][2] is torch.strided:
        total_bytes = sum(map(_numel, tensors)) * tensors[0].element_size()
        if total_bytes <= limit_bytes:
            return [tuple(range(len(tensors)))]
    return _filled(tensors, kinds, limit_bytes)


def _filled(
    tensors: Sequence[torch.Tensor], kinds: Sequence[tuple[object, ...]], limit_bytes: int
) -> list[Bucket]:
    filling: dict[object, tuple[list[int], int]] = {}
    full: list[Bucket] = []
    for index, (x, kind) in enumerate(zip(tensors, kinds, strict=True)):
        if kind[2] is not torch.strided:
            full.append((index,))
            continue
        size = x.nbytes
        members, used = filling.get(kind) or ([], 0)
        if members and used + size > limit_bytes:
            full.append(tuple(members))
            members, used = [], 0
        members.append(index)
        filling[kind] = (members, used + size)
    return [*full, *(tuple(members) for members, _ in filling.values())]


def _flat(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are 1-d (biases, norms, buckets): flattening a tensor takes as long as copying it."""
    return set(map(_dim, tensors)) == {1}


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one flat tensor of all ``tensors``, in order; on CUDA each is aligned, as results are."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    if tensors[0].is_cuda:
        return uncast(torch.cat, _with_gaps(tensors))
    if _flat(tensors):
        return uncast(torch.cat, list(tensors))
    return uncast(_nn.flatten_dense_tensors, list(tensors))


def _layout(tensors: Sequence[torch.Tensor]) -> Layout:
    return Layout(list(map(_numel, tensors)), tensors[0].element_size())


def _with_gaps(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the flattened tensors, with zeros in the gaps that a ``Layout`` leaves after each."""
    layout = _layout(tensors)
    free = tensors[0].new_zeros(max(layout.gaps))
    return [
        piece for x, gap in zip(tensors, layout.gaps, strict=True) for piece in (x.reshape(-1), free[:gap])
    ]


def repack(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy ``tensors`` into ``views`` of one flat tensor."""
    with _unrecorded():
        torch._foreach_copy_(list(views), list(tensors))


def fill(outs: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    """Copy ``views`` of one flat tensor into ``outs``, which the user has passed."""
    if not (any(map(_is_conj, outs)) or any(map(_is_neg, outs))):
        repack(outs, views)
        return
    with _unrecorded():  # torch refuses to copy to such tensors together
        for out, view in zip(outs, views, strict=True):
            out.copy_(view)


def unpack(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``flat``, which has no autograd history, in the shapes of ``like``: the inverse of ``pack``.

    The results share its memory, but are no views of it: to change one in place must not affect the gradients
    of the others.
    """
    with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        return _cut(flat, like)


def _cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    sizes = list(map(_numel, like))
    if flat.is_cuda and len(like) > 1:
        layout = _layout(like)
        return [place.view(x.shape) for place, x in zip(layout.cut(flat), like, strict=True)]
    if flat.numel() != sum(sizes):
        raise ValueError(f"{flat.numel()} elements are not those of {len(like)} tensors")
    if _flat(like) and has_memory(flat):  # of a lazy tensor these would be copies
        return list(flat.unsafe_split_with_sizes(sizes))
    views = list(_nn.unflatten_dense_tensors(flat, list(like)))
    if 0 in sizes:  # torch before 2.10 drops the other dimensions of empty tensors
        views = [view if view.numel() else view.view(x.shape) for view, x in zip(views, like, strict=True)]
    return views
