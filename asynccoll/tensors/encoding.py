"""Convert elements to their wire format and back, as a ``Plan`` says. Local work, no communication.

``encode`` returns a contiguous tensor for the backend to send; ``decode`` converts what was received back to
the caller's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asynccoll.plan.spec import Plan, Wire

_TOP_BIT = torch.iinfo(torch.int64).min


def encode(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return ``x`` as it is sent: contiguous, in the plan's wire dtype, on the plan's device.

    The result shares memory with ``x`` if nothing had to change, so a caller that overwrites it (for a
    reduction) has to clone it first.
    """
    if plan.stage is not None:
        x = x.to(plan.stage)
    return x.contiguous() if plan.wire is Wire.SAME else _ENCODE[plan.wire](x, plan)


def decode(wire: torch.Tensor, plan: Plan, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the received ``wire`` tensor as ``dtype`` on ``device``: the inverse of ``encode``."""
    x = wire if plan.wire is Wire.SAME else _DECODE[plan.wire](wire, dtype)
    return x if plan.stage is None else x.to(device)


def _view(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x.view(dtype)``, for 0-d and empty tensors, too; the last dimension grows or shrinks."""
    if x.dtype is dtype:
        return x
    if not x.numel():  # torch checks strides even if there are no elements
        last = x.shape[-1] * x.element_size() // dtype.itemsize
        return x.new_empty((*x.shape[:-1], last), dtype=dtype)
    if x.dim() == 0:
        x = x.reshape(1)
    if x.stride(-1) != 1:  # the stride of a single element does not matter, but torch checks it
        x = x.as_strided(x.shape, (*x.stride()[:-1], 1))
    return x.view(dtype)


def _encode_view(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    assert plan.wire_dtype is not None
    return _view(x.contiguous(), plan.wire_dtype)


def _encode_cast(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return x.contiguous().to(plan.wire_dtype)


def _encode_real(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return torch.view_as_real(x.contiguous().resolve_conj()).to(plan.wire_dtype)


def _encode_logical(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    if x.is_complex():  # XLA's own conversion considers only the real part
        return torch.view_as_real(x.contiguous()).to(torch.bool).any(-1).view(torch.uint8)
    wide = x.view(torch.int64) if x.dtype is torch.uint64 and x.dim() else x
    return (wide.contiguous().to(torch.bool)).view(torch.uint8)


def _encode_flipped(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return _view(x.contiguous(), torch.int64).bitwise_xor(_TOP_BIT)


_ENCODE: dict[Wire, Callable[[torch.Tensor, Plan], torch.Tensor]] = {
    Wire.VIEW: _encode_view,
    Wire.CAST: _encode_cast,
    Wire.REAL: _encode_real,
    Wire.LOGICAL: _encode_logical,
    Wire.FLIPPED: _encode_flipped,
}
_DECODE: dict[Wire, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    Wire.VIEW: _view,
    Wire.CAST: lambda wire, dtype: wire.to(dtype),
    Wire.REAL: lambda wire, dtype: torch.view_as_complex(wire.to(dtype.to_real())),
    Wire.LOGICAL: lambda wire, dtype: wire.to(dtype),
    Wire.FLIPPED: lambda wire, dtype: _view(wire.bitwise_xor(_TOP_BIT), dtype),
}
