"""Which tensors may be sent or filled: plain memory, which no earlier call is still to fill."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from asynccoll.errors import InvalidArgumentError, PayloadTypeError
from asynccoll.memory.aliasing import has_memory
from asynccoll.memory.unfilled import refuse_unfilled

__all__ = [
    "ORDINARY",
    "overwritten",
    "plain_tensor",
    "plain_tensors",
    "raw",
    "writable",
    "writable_together",
]

#: Types of tensors that are nothing but memory.
ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})
_data_ptr = torch.Tensor.data_ptr
_is_inference = torch.Tensor.is_inference
_is_nested = attrgetter("is_nested")


def plain_tensor(name: str, x: torch.Tensor) -> torch.Tensor:
    """``x`` as a ``torch.Tensor`` that native code may read: itself, or what a harmless subclass is.

    Wrappers (``DTensor``, fake and functorch tensors), nested and quantized ones, and tensors whose storage
    was freed have no such memory: ``PayloadTypeError``, with the cure. What an earlier call is still to fill
    is refused with ``InvalidArgumentError``.
    """
    try:
        plain = type(x) in ORDINARY and x.data_ptr() and not x.is_nested
    except RuntimeError:  # no storage: ``_explained`` says why
        plain = False
    if not plain:
        x = _explained(name, x)
    refuse_unfilled(name, (x,))
    return x


def plain_tensors(name: str, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """``plain_tensor`` of each, quick where all are ordinary."""
    if ORDINARY.issuperset(map(type, xs)):
        try:
            if all(map(_data_ptr, xs)) and not any(map(_is_nested, xs)):
                refuse_unfilled(name, xs)
                return xs
        except RuntimeError:
            pass
    return [plain_tensor(name, x) for x in xs]


def _explained(name: str, x: torch.Tensor) -> torch.Tensor:
    """What ``plain_tensor`` says of all that is not quite ordinary."""
    if is_lazy(x):
        raise PayloadTypeError(
            f"{name} got an {type(x).__name__}, which has no shape yet; run the module once "
            "on every rank first"
        )
    wrapped = _is_wrapper(x)
    if not wrapped and (x.layout is not torch.strided or x.device.type in ("meta", "xla")):
        return x  # has no address, and is refused or carried by name elsewhere
    if not wrapped and not x.is_nested and (x.data_ptr() or not x.numel()):
        # ``as_subclass`` shares memory and history, and asks no ``__torch_function__``.
        return x if type(x) in ORDINARY else torch.Tensor.as_subclass(x, torch.Tensor)
    raise PayloadTypeError(f"{name} got {_what(x)}")


def _is_wrapper(x: torch.Tensor) -> bool:
    """Whether ``x`` only stands for other tensors."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
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
        "its data is there"
    )


def writable(name: str, out: torch.Tensor) -> None:
    """Refuse ``out=``, which is plain memory, if it cannot be filled as it is, before anything is sent."""
    inference = out.is_inference()
    if inference and not torch.is_inference_mode_enabled():
        raise InvalidArgumentError(
            f"{name}: out= was made in inference mode and cannot be written to outside of it; pass "
            "out.clone(), or call in torch.inference_mode()"
        )
    if out.layout is torch.strided and not out.is_contiguous() and _folded(out):
        raise InvalidArgumentError(
            f"{name}: several elements of out= are the same memory (shape {list(out.shape)}, strides "
            f"{list(out.stride())}, as expand() makes); pass out.contiguous()"
        )
    if not inference:
        increment_version(out)


def overwritten(*outs: torch.Tensor) -> None:
    """Have autograd know that ``outs`` are being filled, which it does not see.

    A backward that needs what one of them held before raises then, as after any operation in place.
    """
    for out in outs:
        if not out.is_inference():
            increment_version(out)


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor; torch's own ``view`` minds the stride of a single element."""
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _folded(x: torch.Tensor) -> bool:
    """Whether two elements may have one address: a stride is shorter than what lies within it."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _apart(xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
    """Whether all ``outs`` have addresses of their own, none of which is that of another's input.

    Quick, and no for whatever has to be looked at one by one.
    """
    try:
        filled = set(map(_data_ptr, outs))
        if 0 in filled or len(filled) < len(outs):
            return False
        return all(map(is_, xs, outs)) or filled.isdisjoint(map(_data_ptr, xs))
    except RuntimeError:  # of those that have no storage
        return False


def writable_together(name: str, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Refuse ``outs`` where filling one changes another, or one of ``xs`` that is yet to be sent."""
    sent, of_this_mode = set(xs), torch.is_inference_mode_enabled() or not any(map(_is_inference, outs))
    for out in outs:
        if of_this_mode and out in sent and out.layout is torch.strided and out.is_contiguous():
            overwritten(out)
        else:
            writable(name, out)
    if _apart(xs, outs):
        return
    sources = {x.data_ptr(): i for i, x in enumerate(xs) if x.numel() and has_memory(x)}
    filled: dict[int, int] = {}
    for i, out in enumerate(outs):
        if not (out.numel() and has_memory(out) and out.layout is torch.strided):
            continue
        at = out.data_ptr()
        if filled.setdefault(at, i) != i or sources.get(at, i) != i:
            raise InvalidArgumentError(
                f"{name}: leaf {i} of out= is the memory of another leaf; each needs memory of its own"
            )
