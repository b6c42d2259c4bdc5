"""The memory that gradients are reduced in: flat tensors, called buckets. Each ``.grad`` is a view of one.

``assign`` decides which gradients share a bucket. When a bucket is sent, and what reduces it, is in
``gradients``.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from asynccoll.errors import InvalidArgumentError, PayloadTypeError
from asynccoll.memory.aliasing import has_memory, may_overlap
from asynccoll.memory.aligned import Layout
from asynccoll.overlap.accepted import named_in

__all__ = ["Bucket", "FlaggedBucket", "Gradients", "assign", "shaped"]


def _references() -> int:
    """Return what ``_vacate`` counts for a view that only its bucket has; Python versions differ in this."""
    views = [object()]
    view = views[0]
    return sys.getrefcount(view)


_REFERENCES = _references()


class Gradients(ABC):
    """Gradients that are sent together, and their state since then: the base of all buckets."""

    #: what is sent
    flat: torch.Tensor

    def __init__(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> None:
        """``dtype``: that of the reduction, if not the parameters' own; complex ones use its counterpart."""
        self.parameters = parameters
        self.dtype: torch.dtype = parameters[0].dtype
        #: the dtype of what is sent
        self.held: torch.dtype = dtype or self.dtype
        if dtype is not None and self.dtype.is_complex:
            self.held = torch.promote_types(dtype, torch.complex64)
        #: by index, the gradients being sent, with their versions and their parameters' at that time
        self._sent: dict[int, tuple[torch.Tensor, int, int]] = {}
        #: the gradients that an earlier reduction summed over all ranks (op="sum"), else None
        self._summed: list[torch.Tensor | None] = [None] * len(parameters)
        #: over how many ranks gradients are summed (op="sum"); 1 for averages, which ``divide`` leaves alone
        self.summed_over: int = 1
        #: describes a parameter in errors
        self.named: Callable[[torch.Tensor], str] = named_in(None)
        self.begin()

    def begin(self) -> None:
        """Expect every gradient again, for the next step."""
        self.waiting: int = len(self.parameters)
        self.has: list[bool] = [False] * self.waiting
        self._sent.clear()

    def checked(self, index: int, shape: torch.Size, *, may_be_sparse: bool = False) -> torch.Tensor:
        """Do what ``check`` does, with the ``shape`` that is expected."""
        return _checked_gradient(
            self.parameters[index], shape, self.dtype, self.named, may_be_sparse=may_be_sparse
        )

    @abstractmethod
    def check(self, index: int) -> torch.Tensor:
        """Return the gradient of the parameter at ``index``; refuse one that cannot be sent."""

    @abstractmethod
    def put(self, index: int, scale: float) -> None:
        """Put the gradient of the parameter at ``index``, times ``scale``, into what is sent."""

    @abstractmethod
    def fill(self, scale: float) -> None:
        """Complete what is sent: where backward made no gradient, put the existing ``.grad``, or zeros."""

    @abstractmethod
    def adopt(self) -> None:
        """Make the reduced gradients each parameter's ``.grad``."""

    def took(self, index: int) -> None:
        """Note that the gradient of the parameter at ``index`` is in the bucket."""
        parameter = self.parameters[index]
        assert parameter.grad is not None
        self._sent[index] = parameter.grad, parameter.grad._version, parameter._version
        self.has[index] = True
        self.waiting -= 1

    def _is_converted(self, index: int) -> bool:
        """Whether ``.grad`` no longer has the memory that is sent, since ``model.to(...)`` replaced it."""
        return False

    def summed(self, gradients: list[torch.Tensor | None]) -> None:
        """Note that ``gradients`` are sums over all ranks."""
        self._summed = gradients

    def was_summed(self, index: int) -> bool:
        """Whether the gradient at ``index`` is a sum over all ranks, from an earlier reduction."""
        return self._summed[index] is not None

    def divide(self, index: int) -> None:
        """Divide a gradient that is a sum over all ranks by their number, since it will be summed again.

        Backward adds to it (there was no ``zero_grad``), and each rank has the whole sum: without this the
        sum would count once for every rank.
        """
        summed, gradient = self._summed[index], self.parameters[index].grad
        if summed is not None and gradient is not None and _is_another(gradient, summed):
            raise InvalidArgumentError(
                f"the .grad of {self.named(self.parameters[index])} is not the tensor that was summed over "
                "all ranks (op='sum'), so it is unknown whether to sum it again: change gradients in place "
                "(grad.mul_(...)), zero them, or use op='avg'"
            )
        # Without a call in between: Ctrl-C must not have this run again, or not at all.
        self._summed[index] = None
        if summed is not None and gradient is not None:
            gradient.div_(self.summed_over)

    def reported(self, index: int) -> None:
        """Exempt the gradient at ``index`` from ``check_unwritten``: an error already reports its change."""
        self._sent.pop(index, None)

    def check_unwritten(self, may_be_gone: bool = False) -> None:
        """Refuse gradients and parameters that were written to while being sent: the ranks would differ.

        They are checked once: after that, ``adopt`` may write to them, again if Ctrl-C interrupted that.
        ``may_be_gone``: whether gradients may have been set to None.
        """
        for index, (gradient, version, of_parameter) in self._sent.items():
            parameter = self.parameters[index]
            if parameter._version != of_parameter:
                raise InvalidArgumentError(
                    f"{self.named(parameter)} was changed between backward and the await of its gradients, "
                    "as by an optimizer step with this rank's gradients alone: await first, then step (an "
                    "optimizer that steps in backward hooks is always too early)"
                )
            now = parameter.grad
            if now is None and not may_be_gone:
                raise InvalidArgumentError(
                    f"the .grad of {self.named(parameter)} was set to None between backward and the await, "
                    "while it was being sent, and this rank's step would leave it out: await first, then zero"
                )
            if now is not None and (
                now is not gradient or now._version != version or self._is_converted(index)
            ):
                raise InvalidArgumentError(
                    f"the .grad of {self.named(parameter)} was changed between backward and the await, while "
                    "it was being sent: await first, then clip, scale, convert or replace gradients (where "
                    "an optimizer is sharded or asynchronous, clip by `await optimizer.clip_grad_norm_(...)`)"
                )
        self._sent.clear()


class Bucket(Gradients):
    """Gradients that are sent together, followed by ``tail`` further elements.

    The gradients are padded to a multiple of ``parts``, not counting the tail. ``dtype`` is that of the
    reduction. If it is not the parameters' own, each ``.grad`` keeps its own memory, and the result is
    rounded to its dtype once.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        tail: int = 0,
        dtype: torch.dtype | None = None,
        parts: int = 1,
    ) -> None:
        super().__init__(parameters, dtype)
        sizes, device = [parameter.numel() for parameter in parameters], parameters[0].device
        self.layout: Layout = Layout(sizes, self.held.itemsize, parts)
        self.flat: torch.Tensor = torch.zeros(self.layout.elements + tail, dtype=self.held, device=device)
        self.views: list[torch.Tensor] = self._views()
        self._strides = [parameter.stride() for parameter in parameters]
        self._offsets = [start * self.held.itemsize for start in self.layout.starts]
        #: the index of the gradient that ``put`` scales, and the version that its view had before
        self._scaling: tuple[int, int] = -1, 0

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view for each parameter, in its shape and strides, of a tensor laid out as the bucket."""
        places = self.layout.cut(flat)
        return [shaped(place, like) for place, like in zip(places, self.parameters, strict=True)]

    def _views(self) -> list[torch.Tensor]:
        """Return the gradients' views of the bucket. Each has its own version counter, for writes to it."""
        return [view.data for view in self.cut(self.flat)]

    def put(self, index: int, scale: float) -> None:
        """Put the gradient of the parameter at ``index``, times ``scale``, into the bucket.

        The parameter's ``.grad`` is the view of the bucket afterwards, unless the dtypes differ. Run again
        after Ctrl-C, this scales a gradient that is the view already no second time.
        """
        parameter = self.parameters[index]
        gradient = self.check(index)
        self.divide(index)
        if self.flat.dtype is self.dtype:
            if not self._is_scaled(index):
                gradient, view = self._laid_out(index, gradient)
                self._scaling = index, view._version
                torch.mul(gradient, scale, out=view)
            parameter.grad = self.views[index]
        else:
            self._laid_out(index, gradient)[1].copy_(gradient).mul_(scale)
        self.took(index)
        self._scaling = -1, 0

    def _is_scaled(self, index: int) -> bool:
        """Whether the last ``put`` has scaled that gradient, which is the view, but was cut off by Ctrl-C."""
        view = self.views[index]
        return self.parameters[index].grad is view and self._scaling == (index, view._version - 1)

    def check(self, index: int) -> torch.Tensor:
        return self.checked(index, self.views[index].shape)

    def _laid_out(self, index: int, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient and its view, laid out as the parameter is now."""
        mine = gradient is self.views[index]  # no local name for the view: ``_vacate`` counts references
        if self._follow(index) and mine:
            gradient = gradient.clone()  # it is read in the old layout while the new one is written
        if gradient is not self.views[index]:
            self._vacate(index)
        return gradient, self.views[index]

    def _follow(self, index: int) -> bool:
        """Replace the view, and return True, if ``model.to(...)`` has changed strides or memory."""
        strides = self.parameters[index].stride()
        if strides == self._strides[index] and not self._is_converted(index):
            return False
        self._strides[index] = strides
        self.views[index] = self._views()[index]
        return True

    def _is_converted(self, index: int) -> bool:
        view = self.views[index]
        if view.dtype is not self.held or view.device != self.flat.device:
            return True
        if not view.numel() or not has_memory(view):
            return False
        return view.data_ptr() - self.flat.data_ptr() != self._offsets[index]

    def _vacate(self, index: int) -> None:
        """Make room for another gradient. A view of the last one that other code kept keeps its values."""
        view = self.views[index]
        if sys.getrefcount(view) > _REFERENCES:
            view.data = view.clone()
            self.views[index] = self._views()[index]

    def fill(self, scale: float) -> None:
        if not self.waiting:
            return
        for index, parameter in enumerate(self.parameters):
            if self.has[index]:
                continue
            if parameter.grad is not None:
                self.put(index, scale)
            else:
                self._follow(index)
                self._vacate(index)
                self.views[index].zero_()

    def adopt(self) -> None:
        """Copy the reduced gradients to each ``.grad`` that is not a view of the bucket; note sums."""
        if self.flat.dtype is not self.dtype:
            for index in range(len(self.parameters)):
                if self.has[index]:
                    self._give(index)
        if self.summed_over > 1:
            self.summed([parameter.grad for parameter in self.parameters])

    def _give(self, index: int) -> None:
        """Make the reduced gradient the ``.grad`` of the parameter at ``index``."""
        parameter, view = self.parameters[index], self.views[index]
        if self.flat.dtype is self.dtype:
            parameter.grad = view
        elif parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(view)
        else:
            parameter.grad.copy_(view)


class FlaggedBucket(Bucket):
    """Gradients, and a flag for each that says whether this rank has one.

    The flags are summed with the gradients, so a rank without a gradient learns whether another had one.
    ``marks`` further elements after the flags are summed, too: the owner sets ``own_marks``, and reads the
    sums in ``marks``.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], dtype: torch.dtype | None = None, marks: int = 0
    ) -> None:
        super().__init__(parameters, tail=len(parameters) + marks, dtype=dtype)
        self.flags: torch.Tensor
        self.marks: torch.Tensor
        self.flags, self.marks = torch.split(self.flat[-len(parameters) - marks :], [len(parameters), marks])
        self.own_marks: list[float] = [0.0] * marks

    def fill(self, scale: float) -> None:
        super().fill(scale)
        if self.own_marks:
            self.marks.copy_(torch.tensor(self.own_marks, device="cpu"))
        self.flags.fill_(1)
        if self.waiting:
            self.flags.copy_(torch.tensor(self.has, device="cpu"))

    def adopt(self) -> None:
        """Do what ``Bucket.adopt`` does; also give parameters a gradient that only other ranks have.

        That includes one that was sent and then set to None here, so that all ranks make the same step.
        """
        counts = self.flags.tolist() if self.waiting else []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None if self.has[index] else counts[index] != 0:
                self._give(index)
        super().adopt()


def _is_another(gradient: torch.Tensor, summed: torch.Tensor) -> bool:
    """Whether ``gradient`` is not zero, and unrelated to the one that was ``summed``."""
    if gradient is summed:
        return False
    if gradient.is_sparse or summed.is_sparse:
        return not gradient.is_sparse or gradient._nnz() > 0
    return not may_overlap(gradient, summed) and bool(gradient.any())


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of ``flat`` in the shape of ``like``, and in its strides if ``like`` is dense.

    Fused optimizers walk through the memory of a parameter and of its gradient in step, so both have to be
    laid out alike. A tensor with gaps has no counterpart in flat memory, and its view is contiguous.
    """
    if _dense(like):
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat.view(like.shape)


def _dense(x: torch.Tensor) -> bool:
    """Whether the elements of ``x`` fill a range of memory without gaps, with dimensions in another order.

    False for contiguous tensors, whose view needs no strides of its own.
    """
    if x.is_contiguous() and x.stride() == x.view(-1).view(x.shape).stride():
        return False
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return x.numel() > 0


def _checked_gradient(
    parameter: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    named: Callable[[torch.Tensor], str],
    *,
    may_be_sparse: bool,
) -> torch.Tensor:
    """Return the gradient of ``parameter``; refuse one that cannot be sent."""
    gradient = parameter.grad
    if gradient is None:
        raise InvalidArgumentError(
            f"the .grad of {named(parameter)} was gone right after backward had made it: a hook removed it "
            "(an optimizer that steps in backward hooks runs before the gradients are reduced)"
        )
    if gradient.layout is not torch.strided and not may_be_sparse:
        raise PayloadTypeError(
            f"the gradient of {named(parameter)} is sparse, which is not expected here: give "
            "overlap_gradients the module, with torch's Embedding or EmbeddingBag in it; elsewhere build the "
            "layer with sparse=False"
        )
    if gradient.requires_grad:
        parameter.grad = gradient.detach()  # so that the step can be completed without its graph
        raise InvalidArgumentError(
            f"the gradient of {named(parameter)} carries a graph (backward(create_graph=True)), which an "
            "in-place reduction would cut off: take gradients to be differentiated again with "
            "torch.autograd.grad(loss, parameters, create_graph=True), and call backward on the result"
        )
    if gradient.shape != shape:
        raise InvalidArgumentError(
            f"{named(parameter)} was of shape {list(shape)} when its bucket was made (was its .data "
            "replaced?): change the model first, then make the reducer (or close() it, make another)"
        )
    for now, what in ((gradient.dtype, "its gradient is"), (parameter.dtype, "it is")):
        if now is not dtype:
            raise InvalidArgumentError(
                f"{named(parameter)} was of {dtype} when its bucket was made, and {what} of {now}: "
                "convert the model first, then make the reducer (or close() it, make another)"
            )
    return gradient


def assign(
    parameters: Sequence[torch.Tensor],
    first_bytes: int,
    limit_bytes: int,
    apart: Callable[[torch.Tensor], object] = lambda _: None,
) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters of each bucket: neighbors of one dtype and device, until they have enough bytes.

    That is ``first_bytes`` for the first bucket, and ``limit_bytes`` for others. Parameters for which
    ``apart`` returns different values are in different buckets.
    """
    filling: dict[object, list[torch.Tensor]] = {}
    sizes: Counter[object] = Counter()
    limit = first_bytes
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, apart(parameter))
        filling.setdefault(kind, []).append(parameter)
        sizes[kind] += parameter.numel() * parameter.element_size()
        if sizes[kind] >= limit:
            yield filling.pop(kind)
            sizes[kind], limit = 0, limit_bytes
    yield from filling.values()
