"""Checks of arguments: one table of the values that make sense for each argument name in `labs.cost`.

    cost.all_reduce(7, ranks=3, rank=3)       rank is 3: of 3 ranks it must be one of 0 to 2

A name means the same everywhere.  Strings are checked where they are looked up.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache, wraps
from inspect import signature
from math import inf
from numbers import Integral, Real
from typing import Any


def is_real(x: Any, kind: type = Real) -> bool:
    """Return whether x is a number of this kind; True and False do not count as numbers."""
    return is_number(type(x), kind)


@lru_cache(256)  # a search asks a million times
def is_number(type_of_x: type, kind: type) -> bool:
    return issubclass(type_of_x, kind) and type_of_x is not bool


def is_whole(x: Any, least: float = -inf) -> bool:
    return is_real(x, Integral) and x >= least


def are_whole(xs: Any) -> bool:
    return isinstance(xs, Collection) and all(is_whole(x, 0) for x in xs)


def are_shapes(xs: Any) -> bool:
    return isinstance(xs, Collection) and all(map(are_whole, xs))


def are_axes(xs: Any) -> bool:
    is_complete = isinstance(xs, Mapping) and {*xs} - {"cp"} == {"pp", "replicate", "shard", "tp"}
    return is_complete and all(is_whole(x, 1) for x in xs.values())


COUNTS = (
    "batch context accumulation ranks replicas edp ep tp experts dim itemsize bucket bucket_bytes uses s b h a t "
    "microbatches stages_per_rank"
)
AMOUNTS = "n tokens past buffer_bytes moments counter P S A G comm"
FLAGS = "reshard_after_forward sequence_parallel find_unused offload fused_norms masters"
RULES = {  # the wording of a rule: (its test, the names of the arguments that it holds for)
    "a whole number, and at least 1": (lambda x: is_whole(x, 1), COUNTS),
    "a whole number, and at least 0": (lambda x: is_whole(x, 0), AMOUNTS),
    "a whole number": (is_whole, "rank src dst index kept"),
    "whole numbers, each at least 0": (are_whole, "sizes"),
    "whole numbers above 0 of pp, replicate, shard and tp, and of cp if sequences are cut": (are_axes, "axes"),
    "shapes of whole numbers": (are_shapes, "trained frozen"),
    "a number, and at least 0": (lambda x: is_real(x) and 0 <= x < inf, "size psi others latency begin card_bytes"),
    "a number above 0": (lambda x: is_real(x) and x > 0, "bandwidth reach memory flops"),
    "0, 1, 2 or 3: plain data parallelism, or a stage of ZeRO": (lambda x: is_whole(x, 0) and x <= 3, "stage"),
    "True or False": (lambda x: isinstance(x, bool), FLAGS),
    "a labs.model.Config, such as PRESETS['tiny']": (lambda x: hasattr(x, "kv_heads"), "config"),
    "a cost.Job": (lambda x: hasattr(x, "accumulation"), "job"),
    "a cost.LinkClass, such as cost.LINKS['PCIe 5']": (lambda x: hasattr(x, "bandwidth"), "link"),
}
ANYTHING = (lambda x: True), "anything"
BY_NAME = {name: (is_right, rule) for rule, (is_right, names) in RULES.items() for name in names.split()}


def checked(called: Any) -> Any:
    """Wrap a function or a dataclass so that it raises ValueError for its first argument that makes no sense."""
    if isinstance(called, type):
        called.__init__ = checked(called.__init__)
        return called
    parameters = signature(called).parameters.values()
    names = [each.name for each in parameters]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

    @wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name, value in given.items():
            is_right, rule = BY_NAME.get(name, ANYTHING)
            if value is not defaults.get(name, given) and not is_right(value):
                raise ValueError(f"{name} is {value!r:.60}: it must be {rule}")
        require_fit(defaults | given)
        return called(*args, **kwargs)

    return call


def require_fit(given: dict[str, Any]) -> None:
    """Raise ValueError if a rank does not exist, or if a part's size does not divide the number of ranks."""
    ranks = given.get("ranks", getattr(given.get("job"), "ranks", None))
    for name in ("rank", "src", "dst") if ranks else ():
        if name in given and given[name] not in range(ranks):
            raise ValueError(f"{name} is {given[name]}: of {ranks} ranks it must be one of 0 to {ranks - 1}")
    for name in ("replicas", "tp") if ranks else ():
        if name in given and ranks % given[name]:
            raise ValueError(f"{name} is {given[name]}: it must divide the number of ranks, {ranks}")
