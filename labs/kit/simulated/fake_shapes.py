"""A cache of the shapes that operators return, by their arguments: each of PyTorch's fake kernels runs once per shape.

PyTorch's FakeTensorMode has a cache, too, but finding a result there took more than half of the time of a dry run.  The
cache of this file holds results that have memory of their own, are a view of one argument, or are that argument itself.
The fake kernel of an operator runs each time if it may return any other result, or if an argument has numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

VALUES = int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
Given = Mapping[int | str, Any]  # the arguments of an operator, by index or name
Way = Callable[["Fakes", Given], Any]  # a function that makes an operator's result from new arguments of equal shapes


class Fakes(FakeTensorMode):
    """A FakeTensorMode with a cache in front of the kernels that compute shapes.

    The dry run never activates this mode: PyTorch would take an active FakeTensorMode for a compilation.
    """

    stands_for_memory = True  # labs.kit.record counts the bytes of these fake tensors
    avoid_device_init = True  # no tensor is created on the device before it is faked
    known: ClassVar[dict[Hashable, Way]] = {}  # shared by all dry runs of this process

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False

    def answer(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():  # a default device must not affect an operator
            given = {**dict(enumerate(args)), **kwargs}
            try:
                key = func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), described(given)
            except HasMore:
                return self.__torch_dispatch__(func, types, args, kwargs)
            if way := self.known.get(key):
                return way(self, given)
            answer = self.__torch_dispatch__(func, types, args, kwargs)
            # An operator that changes the shape of its argument, or the size of the argument's memory, is not cached.
            if described(given) == key[-1] and (way := way_to(answer, given)):
                self.known[key] = way
            return answer


class HasMore(Exception):
    """The error of an argument whose shape alone may not determine an operator's result."""


def described(x: Any) -> Hashable:
    if type(x) is FakeTensor and x.constant is None and x.layout is torch.strided:
        memory = x.untyped_storage().nbytes(), x.storage_offset(), x.stride()
        return x.shape, memory, x.dtype, x.fake_device, x.requires_grad, x.is_conj(), x.is_neg()
    if isinstance(x, VALUES):
        return type(x), x  # 1 and 1.0 are equal, and make tensors of different dtypes
    if isinstance(x, (list, tuple)):
        return type(x), *map(described, x)
    if isinstance(x, dict):
        return tuple((name, described(value)) for name, value in x.items())
    raise HasMore


def way_to(answer: Any, given: Given) -> Way | None:
    if isinstance(answer, (list, tuple)):
        ways = [way_to(each, given) for each in answer]
        return None if None in ways else partial(each_of, list if isinstance(answer, list) else tuple, ways)
    if type(answer) is not FakeTensor or answer.constant is not None or answer.layout is not torch.strided:
        return None
    if answer.requires_grad or answer.is_conj() or answer.is_neg():
        return None
    places = [place for place, x in given.items() if any(is_in_memory_of(answer, each) for each in tree_leaves(x))]
    if len(places) > 1 or (places and not isinstance(given[places[0]], FakeTensor)):
        return None
    if places and given[places[0]] is answer:
        return partial(the_argument, places[0])
    way = Likewise(answer, *places)
    return way if way.fits(answer) else None


def is_in_memory_of(x: Tensor, y: Any) -> bool:
    return isinstance(y, Tensor) and x.untyped_storage()._cdata == y.untyped_storage()._cdata


def each_of(kind: type, ways: Sequence[Way], fakes: Fakes, given: Given) -> Any:
    return kind(way(fakes, given) for way in ways)


def the_argument(place: int | str, fakes: Fakes, given: Given) -> Any:
    return given[place]


class Likewise:
    """A function that creates a fake tensor like `x`, in new memory, or in the memory of the argument at `place`."""

    def __init__(self, x: FakeTensor, place: int | str | None = None) -> None:
        self.place, self.offset, self.shape, self.stride = place, x.storage_offset(), x.shape, x.stride()
        self.dtype, self.device = x.dtype, x.fake_device
        self.attributes = {name: value for name, value in vars(x).items() if name != "fake_mode"}

    def fits(self, x: Tensor) -> bool:
        """Return whether a new tensor takes as many bytes as `x`, or fits into the argument's memory as it is."""
        need, have = self.new().untyped_storage().nbytes(), x.untyped_storage().nbytes()
        if self.place is None:
            return self.offset == 0 and need == have
        return self.offset * x.itemsize + need <= have

    def new(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def __call__(self, fakes: Fakes, given: Given) -> FakeTensor:
        memory = self.new()
        if self.place is not None:
            memory.set_(given[self.place].untyped_storage(), self.offset, self.shape, self.stride)
        # FakeTensor's constructor would take longer than everything else in a dry run's operator.
        answer = Tensor._make_subclass(
            FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        torch._C._set_throw_on_mutable_data_ptr(answer)
        vars(answer).update(self.attributes, fake_mode=fakes)
        return answer
