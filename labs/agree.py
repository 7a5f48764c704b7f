"""What must be the same on all ranks, compared; each caller brings the sentence that is said where it differs.

Nothing fails by itself where ranks differ: whatever they bring to a collective, the backend adds it up or lays it side
by side.

    require_same             any value; raises, on every rank, where one's differs from the first's
    require_equal            parameters, bit by bit
    require_equal_replicas   a model's
    Order                    what was gathered and reduced since the last comparison: a number of eight bytes per rank

    everybodys               each rank's value: where more is asked than whether they are equal
    on_all_ranks             what each rank finds when it looks; what one of them raises, all of them raise
    fingerprint              of a tensor: a line that differs where one bit does
    Some                     of a tensor: some of its numbers, equal to others that differ by rounding alone

Where one process stands in for one of many ranks, on tensors without numbers, `alone` says so: then everybody has what
this rank has, and of a tensor the type and the shape are all there is.
"""

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from labs.group import all_gather, meeting_place

Sentence = Callable[[int, Any, int, Any], str]  # of the first rank and its value, and another one and its
alone = False


def everybodys(value: Any, group: ProcessGroup | None) -> dict[int, Any]:
    """By the global ranks of the group, each one's value."""
    values = [value] * dist.get_world_size(group)
    if not alone and len(values) > 1:
        dist.all_gather_object(values, value, group)
    return dict(zip(dist.get_process_group_ranks(group or dist.group.WORLD), values, strict=True))


def require_same(
    mine: Any, group: ProcessGroup | None, sentence: Sentence, error: type[Exception] = ValueError
) -> None:
    compare(everybodys(mine, group), sentence, error)


def compare(found: Mapping[int, Any], sentence: Sentence, error: type[Exception] = ValueError) -> None:
    """Raise an error where a rank's value is not the first one's; all ranks must compare the same."""
    (first, its), *others = sorted(found.items())
    for rank, value in others:
        if value is not its and value != its:
            raise error(sentence(first, its, rank, value))


def on_all_ranks(do: Callable[[], Any], group: ProcessGroup | None = None) -> list[Any]:
    """What each rank finds, in the order of the ranks; what the first of them raises, all of them raise."""
    try:
        found = do()
    except Exception as error:
        found = error
    mine, everyones = 0, [found]
    if dist.is_initialized():
        mine, everyones = dist.get_rank(group), list(everybodys(can_be_sent(found), group).values())
    for rank, each in enumerate(everyones):
        if isinstance(each, Exception):
            raise found if rank == mine else each
    return everyones


def can_be_sent(found: Any) -> Any:
    """An error that another rank could not make again becomes one that says the same."""
    if not isinstance(found, Exception):
        return found
    words = f"rank {dist.get_rank()}: {type(found).__name__}: {found}"
    try:
        again = pickle.loads(pickle.dumps(found))
    except Exception:  # whatever its class does there: what it says is not lost
        return RuntimeError(words)
    return found if str(again) == str(found) else RuntimeError(words)


def first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The first name under which they have different values, or that only one of them has."""
    return next(name for name in {**a, **b} if name not in a or name not in b or a[name] != b[name])


# ---- parameters ------------------------------------------------------------------------------------------


def require_equal_replicas(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Raise ValueError, on every rank, where a parameter is not rank 0's; name the first one and the rank.

    Averaged gradients keep equal replicas equal.  They cannot make them so.
    """
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"{name!r} has a max_norm, and would shorten the rows of its own rank's tokens in the forward: "
                "give it max_norm=None, and shorten all rows after the step"
            )
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ValueError(f"parameter {name!r} is lazy: run a forward before, so that it has a shape")
    require_equal(dict(model.named_parameters()), group)


def require_equal(parameters: dict[str, Tensor], group: ProcessGroup | None = None) -> None:
    def sentence(rank: int, its: dict[str, str], other: int, others: dict[str, str]) -> str:
        name = first_difference(its, others)
        return (
            f"replicas differ from the start: parameter {name!r} is {its.get(name, 'absent')} on rank {rank}, "
            f"but {others.get(name, 'absent')} on rank {other}; build the same model from the same seed on every rank"
        )

    require_same({name: fingerprint(p) for name, p in parameters.items()}, group, sentence)


def fingerprint(p: Tensor) -> str:
    """Type, shape, and sums of the bits by their places: a changed or exchanged element changes them."""
    if p.is_meta or alone:
        return f"{p.dtype} of shape {tuple(p.shape)}"
    numbers = p.detach().contiguous().flatten()
    if p.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj()).flatten()
    return f"{p.dtype} of shape {tuple(p.shape)}, checksum {checksum(sums_of(bits_of(numbers))):x}"


def bits_of(numbers: Tensor) -> Tensor:
    """As integers, of eight bytes each where that comes out even: the fewer, the sooner they are summed up."""
    size = numbers.itemsize
    if len(numbers) * size % 8:
        return numbers.view(INTEGER[size])
    return (numbers.clone() if numbers.storage_offset() * size % 8 else numbers).view(torch.int64)


def sums_of(bits: Tensor) -> list[int]:
    """Of each block the sum of its integers, each times a number that belongs to its place, modulo 2**64.

    Of two blocks that differ, one pair in 2**32 has the same sum: those numbers are random, of 64 bits, and what they
    are multiplied by has 32.  An integer's high half is multiplied by one of its own, too: of the product of the whole
    integer, little of it is left.

    Source: Lemire and Kaser 2014, "Strongly universal string hashing is fast": MULTILINEAR.
    """
    times, high_times = WEIGHTS[:, : len(bits)].to(bits.device)
    room, found = torch.empty_like(times), []
    for block in bits.split(AT_ONCE):
        block, n = block.to(torch.int64), len(block)
        whole = dot(block, times[:n])
        high = torch.bitwise_right_shift(block, 32, out=room[:n])
        found.append(whole + dot(high, high_times[:n]))
    return torch.stack(found).tolist()


def dot(a: Tensor, b: Tensor) -> Tensor:
    return a.dot(b) if a.device.type == "cpu" else (a * b).sum()  # CUDA has no dot of integers


INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AT_ONCE = 2**17  # integers: a block of them fits into a cache, however large the tensor is
SEED = torch.Generator("cpu").manual_seed(0)  # on every rank
WEIGHTS = torch.randint(-(2**63), 2**63 - 1, (2, AT_ONCE), generator=SEED, device="cpu")


@dataclass(frozen=True, eq=False)
class Some:
    """Some of a tensor's numbers, and how much of the largest they may differ: ranks may sum up in different orders."""

    size: int
    numbers: list[float]
    rounding: float

    @classmethod
    def of(cls, x: Tensor) -> "Some":
        x = x.to_dense() if x.is_sparse else x
        x = torch.view_as_real(x) if x.is_complex() else x
        flat = x.detach().flatten()
        if alone:
            return cls(len(flat), [], 0.0)
        return cls(len(flat), flat[:: max(1, len(flat) // 64)].tolist(), rounding(x))

    @property
    def spoiled(self) -> bool:
        return not all(map(math.isfinite, self.numbers))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Some):
            return NotImplemented
        if self.spoiled or other.spoiled:
            return True  # nothing can be said about them
        most = self.rounding * max(map(abs, [*self.numbers, *other.numbers]), default=0)
        pairs = zip(self.numbers, other.numbers, strict=False)
        return self.size == other.size and all(math.isclose(a, b, abs_tol=most) for a, b in pairs)


def rounding(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps ** 0.5 if x.is_floating_point() else 0.0


# ---- what was done ---------------------------------------------------------------------------------------


class Order:
    """What this rank gathered and reduced since the last comparison.

    Where two ranks gather or reduce different layers of equal size at the same time, nothing fails: one's numbers
    become the other's.  So they compare, once per step, a checksum of what they did: 8 bytes from each to each.
    They do so where the host need not wait for the device, if their group has such a place.
    """

    def __init__(self, group: ProcessGroup | None):
        self.group, self.done = group, []

    def add(self, what: Any) -> None:
        """Words, or what prints as some, and is compared itself where those differ."""
        self.done.append(what)
        if len(self.done) == 10_000:  # no step compares them where a model is only evaluated
            self.done = [f"checksum {checksum(self.done)}"]

    def compare(self, device: torch.device) -> None:
        """Raise RuntimeError, on every rank, where one did something else; nothing is sent where nothing was done."""
        if not self.done:
            return
        mine = torch.tensor([checksum(self.done)], device=meeting_place(self.group, device))
        everyones = mine.new_empty(dist.get_world_size(self.group))
        all_gather(everyones, mine, group=self.group)
        done, self.done = self.done, []
        if not (everyones == mine).all():
            require_same(done, self.group, where_they_part, RuntimeError)


def where_they_part(rank: int, its: list[Any], other: int, others: list[Any]) -> str:
    pairs = zip([*its, "ended"], [*others, "ended"], strict=False)
    a, b = next((a, b) for a, b in pairs if a != b)
    differ, way_out = getattr(a, "where_they_part", LAYERS)
    return f"{differ}: where rank {rank} {a}, rank {other} {b}; {way_out}"


LAYERS = (
    "ranks use different layers",
    "what meets in one collective must belong to one layer, so use the same layers on all ranks, in the same order",
)


def checksum(words: list[Any]) -> int:
    return int.from_bytes(blake2b("\n".join(map(str, words)).encode(), digest_size=8).digest(), "little", signed=True)
