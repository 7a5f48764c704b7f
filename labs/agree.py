"""Comparisons between ranks: values that must be the same on all of them, and an error on every rank if they differ.

Different values on different ranks cause no error by themselves: whatever the ranks pass to a collective, the backend
adds it up or lays it side by side.  Each caller gives the sentence that the error says.

    require_same             compares any value, and raises on every rank if one rank's differs from the first rank's
    require_equal            compares parameters, bit by bit
    require_equal_replicas   compares all parameters of a model
    Order                    compares which layers the ranks gathered and reduced: eight bytes per rank and step

    everybodys               gathers each rank's value, for callers that need more than whether the values are equal
    on_all_ranks             calls a function on each rank; if it raises on one rank, all ranks raise that error
    fingerprint              a line of text about a tensor, which differs if one bit of the tensor differs
    Some                     a sample of a tensor's numbers, which equals another sample up to rounding

`alone` is True while one process stands in for one of many ranks, with tensors that have no numbers (a dry run).  Then
every rank is taken to have this rank's value, and only the dtypes and shapes of tensors are compared.
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

Sentence = Callable[[int, Any, int, Any], str]  # arguments: the first rank and its value, another rank and its value
alone = False


def everybodys(value: Any, group: ProcessGroup | None) -> dict[int, Any]:
    """Gather one value from each rank, and return `{global rank: value}`."""
    values = [value] * dist.get_world_size(group)
    if not alone and len(values) > 1:
        dist.all_gather_object(values, value, group)
    return dict(zip(dist.get_process_group_ranks(group or dist.group.WORLD), values, strict=True))


def require_same(
    mine: Any, group: ProcessGroup | None, sentence: Sentence, error: type[Exception] = ValueError
) -> None:
    compare(everybodys(mine, group), sentence, error)


def compare(found: Mapping[int, Any], sentence: Sentence, error: type[Exception] = ValueError) -> None:
    """Raise an error if a rank's value differs from the first rank's.

    found: `{rank: value}`, the same on all ranks, so that all of them raise or none does.
    """
    (first, its), *others = sorted(found.items())
    for rank, value in others:
        if value is not its and value != its:
            raise error(sentence(first, its, rank, value))


def on_all_ranks(do: Callable[[], Any], group: ProcessGroup | None = None) -> list[Any]:
    """Call `do` on every rank and return all ranks' results, in the order of the ranks.

    Raises, on every rank, the error of the first rank on which `do` raised one.
    """
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
    """Return `found`; an error that cannot be pickled is replaced by a RuntimeError with the same text."""
    if not isinstance(found, Exception):
        return found
    words = f"rank {dist.get_rank()}: {type(found).__name__}: {found}"
    try:
        again = pickle.loads(pickle.dumps(found))
    except Exception:  # whatever its class raises while it is pickled, its text is not lost
        return RuntimeError(words)
    return found if str(again) == str(found) else RuntimeError(words)


def first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the first name under which `a` and `b` have different values, or that only one of them has."""
    return next(name for name in {**a, **b} if name not in a or name not in b or a[name] != b[name])


# ---- parameters ------------------------------------------------------------------------------------------


def require_equal_replicas(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Raise ValueError, on every rank, if a parameter differs from rank 0's; the error names both.

    Averaged gradients keep equal replicas equal, but they cannot make different replicas equal.
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
    """Return dtype, shape and a checksum as text; the checksum changes if an element changes or two change places."""
    if p.is_meta or alone:
        return f"{p.dtype} of shape {tuple(p.shape)}"
    numbers = p.detach().contiguous().flatten()
    if p.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj()).flatten()
    return f"{p.dtype} of shape {tuple(p.shape)}, checksum {checksum(sums_of(bits_of(numbers))):x}"


def bits_of(numbers: Tensor) -> Tensor:
    """Return the bits as integers.

    They are of eight bytes each if the size is a multiple of that, since fewer integers are faster to sum up.
    """
    size = numbers.itemsize
    if len(numbers) * size % 8:
        return numbers.view(INTEGER[size])
    return (numbers.clone() if numbers.storage_offset() * size % 8 else numbers).view(torch.int64)


def sums_of(bits: Tensor) -> list[int]:
    """Return one sum per block, modulo 2**64: each integer is multiplied by a random weight that belongs to its place.

    Two different blocks have the same sum with a probability of 2**-32: the weights have 64 random bits, and each is
    multiplied by 32 bits.  The high half of an integer has a second weight of its own, since the product of the whole
    integer, modulo 2**64, depends little on its high half.

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
AT_ONCE = 2**17  # integers per block: a block fits into a cache, however large the tensor is
SEED = torch.Generator("cpu").manual_seed(0)  # the same weights on every rank
WEIGHTS = torch.randint(-(2**63), 2**63 - 1, (2, AT_ONCE), generator=SEED, device="cpu")


@dataclass(frozen=True, eq=False)
class Some:
    """A sample of a tensor's numbers, which equals another sample up to rounding: ranks may sum up in different orders.

    size: number of elements of the tensor
    numbers: at most 127 of them, evenly spaced
    rounding: the difference that is allowed, as a fraction of the largest number
    """

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
            return True  # inf and nan cannot be compared
        most = self.rounding * max(map(abs, [*self.numbers, *other.numbers]), default=0)
        pairs = zip(self.numbers, other.numbers, strict=False)
        return self.size == other.size and all(math.isclose(a, b, abs_tol=most) for a, b in pairs)


def rounding(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps ** 0.5 if x.is_floating_point() else 0.0


# ---- what was done ---------------------------------------------------------------------------------------


class Order:
    """A record of the layers that this rank gathered and reduced since the last comparison with the other ranks.

    If two ranks gather or reduce different layers of equal size at the same time, no error occurs: one layer gets the
    other's numbers.  So once per step the ranks compare a checksum of their records, and each sends 8 bytes to each.
    They compare on the CPU if their group has a backend for it, so that the host need not wait for the device.
    """

    def __init__(self, group: ProcessGroup | None):
        self.group, self.done = group, []

    def add(self, what: Any) -> None:
        """Record an event: text, or an object that prints as text.

        The records themselves are compared, event by event, if their checksums differ.
        """
        self.done.append(what)
        if len(self.done) == 10_000:  # a model that is only evaluated never compares them
            self.done = [f"checksum {checksum(self.done)}"]

    def compare(self, device: torch.device) -> None:
        """Raise RuntimeError, on every rank, if one rank's record differs; an empty record is not compared."""
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
