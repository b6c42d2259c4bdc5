"""Which tensors may be sent or filled: plain memory that no earlier call is still filling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from asynccoll.errors import InvalidArgumentError, PayloadTypeError
from asynccoll.memory.aliasing import Claim, Claims, span_bytes
from asynccoll.memory.unfilled import filler_of, refuse_unfilled

#: The tensor types that are plain memory and never wrap other tensors.
ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})
_data_ptr = torch.Tensor.data_ptr
_is_nested = attrgetter("is_nested")


def plain_tensor(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as a ``torch.Tensor`` that native code may read; a harmless subclass becomes a plain one.

    Wrappers (``DTensor``, fake and functorch tensors, duals), nested and quantized tensors, and tensors whose
    storage was freed have no such memory: they raise ``PayloadTypeError``, which says what to do. Memory that
    an earlier call is still filling is refused with ``InvalidArgumentError``.
    """
    try:
        plain = type(x) in ORDINARY and x.data_ptr() and not x.is_nested
        plain = plain and (forward_ad._current_level < 0 or not _is_dual(x))
    except RuntimeError:  # no storage: ``_explained`` says why
        plain = False
    if not plain:
        x = _explained(name, x)
    refuse_unfilled(name, (x,))
    return x


def all_plain(xs: list[torch.Tensor]) -> bool:
    """Whether ``plain_tensor`` would return each of ``xs`` itself; also False where it takes long to tell."""
    try:
        return (
            ORDINARY.issuperset(map(type, xs))
            and all(map(_data_ptr, xs))
            and not any(map(_is_nested, xs))
            and (forward_ad._current_level < 0 or not any(map(_is_dual, xs)))
            and filler_of(xs) is None
        )
    except RuntimeError:  # a tensor without storage
        return False


def _explained(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, which failed the quick test, as ``plain_tensor`` does, or refuse it with the reason."""
    if is_lazy(x):
        raise PayloadTypeError(
            f"{name} got an {type(x).__name__}, which has no shape yet; run the module once "
            "on every rank first"
        )
    wrapped = _is_wrapper(x)
    if not wrapped and (x.layout is not torch.strided or x.device.type in ("meta", "xla")):
        return x  # it has no address; later code refuses this layout or device by name, or supports it
    if not wrapped and not x.is_nested and (x.data_ptr() or not x.numel()):
        # ``as_subclass`` shares memory and autograd history, and calls no ``__torch_function__``.
        return x if type(x) in ORDINARY else torch.Tensor.as_subclass(x, torch.Tensor)
    raise PayloadTypeError(f"{name} got {_what(x)}")


def _is_dual(x: torch.Tensor) -> bool:
    """Whether ``x`` carries a forward-mode tangent, which a call would not reduce."""
    if x.layout is not torch.strided:
        return False
    tangent = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]  # torch's
    return tangent is not None


def _is_wrapper(x: torch.Tensor) -> bool:
    """Whether ``x`` only represents other tensors."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or _is_dual(x):
        return True
    own = type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return own and not x.data_ptr()


def _what(x: torch.Tensor) -> str:
    kind = type(x).__name__
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return (
            "a tensor inside torch.func or vmap, which stands for several calls; call it outside of the "
            "transformed function"
        )
    if _is_dual(x):
        return (
            "a dual tensor of forward-mode differentiation, of which a call has no derivative; pass its "
            "primal and its tangent, as from forward_ad.unpack_dual(x)"
        )
    if hasattr(x, "to_local"):
        return (
            f"a {kind}, which has no memory of its own: pass this rank's part, x.to_local(), or the whole, "
            "x.full_tensor()"
        )
    if x.is_nested:
        return "a nested tensor; pass its parts, as in list(x.unbind())"
    if type(x) is not torch.Tensor and _is_wrapper(x):
        return (
            f"a {kind}, a tensor subclass that wraps others and has no memory of its own; pass the "
            "plain tensors that it wraps"
        )
    if torch._is_functional_tensor(x) or x._is_zerotensor():
        return "a tensor that has no memory of its own; pass x.clone(), outside of transformed functions"
    return (
        "a tensor whose storage was freed (as FSDP does with parameters that are not in use); pass it while "
        "it has data"
    )


def writable(name: str, out: torch.Tensor) -> None:
    """Refuse an ``out=`` of plain memory that cannot be filled, before anything is sent.

    Otherwise tell autograd that ``out`` is being filled, as ``overwritten`` does.
    """
    inference = out.is_inference()
    if inference and not torch.is_inference_mode_enabled():
        raise InvalidArgumentError(
            f"{name}: out= was made in inference mode and cannot be written to outside of it; pass "
            "out.clone(), or call in torch.inference_mode()"
        )
    if out.layout is torch.strided and not out.is_contiguous() and _folded(out):
        raise InvalidArgumentError(
            f"{name}: several elements of out= share the same memory (shape {list(out.shape)}, strides "
            f"{list(out.stride())}, as expand() makes); pass out.contiguous()"
        )
    if not inference:
        increment_version(out)


def overwritten(*outs: torch.Tensor) -> None:
    """Tell autograd that ``outs`` are being filled, which it cannot see.

    A backward that needs the previous values of one of them then raises, as after any in-place operation.
    """
    for out in outs:
        if not out.is_inference():
            increment_version(out)


def raw(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 tensor.

    ``x.view(torch.uint8)`` alone would depend on the strides even of dimensions with a single element.
    """
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _folded(x: torch.Tensor) -> bool:
    """Whether two elements may share an address: a stride is no longer than what smaller strides span."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _all_apart(xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
    """Whether ``outs``, and those of ``xs`` that are not their own ``out``, have disjoint address ranges.

    This is the quick check: it is also False in cases that have to be checked leaf by leaf.
    """
    found = [*outs, *(x for x, out in zip(xs, outs, strict=True) if x is not out)]
    try:
        ranges = sorted((x.data_ptr(), x.data_ptr() + span_bytes(x)) for x in found)
    except RuntimeError:  # a tensor without storage
        return False
    return all(end <= start for (_, end), (start, _) in pairwise(ranges))


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A claim on the memory of one leaf's input and result."""

    out: list[torch.Tensor]
    claims: bool = True


def sharing(xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the indices of two leaves, if the first one's ``out`` shares memory with the other one.

    To fill it would change the other's result, or its input, which is yet to be sent.
    """
    if _all_apart(xs, outs):
        return None
    leaves: dict[Claim, int] = {
        _Leaf([x] if x is out else [x, out]): i for i, (x, out) in enumerate(zip(xs, outs, strict=True))
    }
    claims = Claims()
    for leaf in leaves:
        claims.add(leaf)
    for leaf, i in leaves.items():
        other = claims.find((outs[i],), leaf)
        if other is not None:
            return i, leaves[other]
    return None
