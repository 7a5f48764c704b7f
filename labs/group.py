"""What a strategy asks of its process group.

    all_gather               every rank's equal part, side by side in one vector
    broadcast                the first rank's numbers, wherever in its memory they lie
    reduce_scatter           this rank's part of the sum over all ranks, with the least bytes on any backend
    start_reduce_scatter     the same, while the rank computes
    require_equal_replicas   the same parameters on every rank, or an error that names the first that differs
    Order                    what was gathered and reduced, the same on every rank, or an error that names the first
                             that differs

The backend checks none of this: whatever the ranks bring to a collective, it adds up or lays side by side.
"""

from collections.abc import Callable
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# PyTorch 2.13 gave both a new name, and warns about the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def broadcast(x: Tensor, group: ProcessGroup | None) -> None:
    """Every rank's `x` becomes that of the group's first.

    A backend sends memory.  Where `x` is a view, that may be in another order, with others' numbers in between, or, if
    it was expanded, less than `x` has.
    """
    numbers = x.contiguous()
    dist.broadcast(numbers, group=group, group_src=0)
    if numbers is not x:
        once = tuple(slice(None) if step else slice(1) for step in x.stride())
        if not torch.equal(
            x[once], numbers[once]
        ):  # a backward may still need it, and would see that it was written to
            x[once].copy_(numbers[once])


def reduce_scatter(full: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's N-th part of the sum over all ranks' `full`, 1-D."""
    return start_reduce_scatter(full, group)()


def start_reduce_scatter(full: Tensor, group: ProcessGroup | None) -> Callable[[], Tensor]:
    """The same, in flight: what is returned waits for this rank's part. Until then `full` must stay as it is.

    gloo's own reduce-scatter is an all-reduce of a copy that it makes, and sends twice as much.  There each rank sends
    every other one its part, and adds up what it gets in the order of the ranks: all of them, and every run, round
    alike.  What it gets is as large as that copy.
    """
    ranks = dist.get_world_size(group)
    if full.is_cuda and "nccl" in dist.get_backend_config(group):
        part = full.new_empty(full.numel() // ranks)
        work = reduce_scatter_single(part, full, group=group, async_op=True)

        def arrived() -> Tensor:
            work.wait()
            return part

        return arrived
    parts = torch.empty_like(full)
    work = dist.all_to_all_single(parts, full, group=group, async_op=True)

    def total() -> Tensor:
        work.wait()
        first, *others = parts.chunk(ranks)
        total = first.clone()
        for part in others:
            total += part
        free(parts)
        return total

    return total


def free(x: Tensor) -> None:
    # Letting go of it is not enough: a thread of the backend may hold it a moment longer.
    x.untyped_storage().resize_(0)


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
    ranks, replicas = everybodys({name: fingerprint(p) for name, p in parameters.items()}, group)
    for rank, replica in zip(ranks, replicas, strict=True):
        for name in replicas[0] | replica:
            first, other = replicas[0].get(name, "absent"), replica.get(name, "absent")
            if first != other:
                raise ValueError(
                    f"replicas differ from the start: parameter {name!r} is {first} on rank {ranks[0]}, "
                    f"but {other} on rank {rank}; build the same model from the same seed on every rank"
                )


def fingerprint(p: Tensor) -> str:
    """Type, shape, and a sum of the bits, mixed with their places: a changed or exchanged element changes it."""
    if p.is_meta:
        return f"{p.dtype} of shape {tuple(p.shape)}"
    numbers = p.detach().flatten()
    if p.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj()).flatten()
    bits = numbers.view(INTEGER[numbers.itemsize]).long()
    mixed = bits * torch.arange(1, 2 * len(bits) + 1, 2, device=p.device)  # odd, so that the sign, the 64th bit, counts
    checksum = (mixed ^ (mixed >> 29)).sum().item()  # and two signs do not cancel
    return f"{p.dtype} of shape {tuple(p.shape)}, checksum {checksum:x}"


INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Order:
    """What this rank gathered and reduced since the last comparison.

    Where two ranks gather or reduce different layers of equal size at the same time, nothing fails: one's numbers
    become the other's.  So they compare, once per step, a checksum of what they did: 8 bytes from each to each.
    """

    def __init__(self, group: ProcessGroup | None):
        self.group, self.done = group, []

    def add(self, what: str) -> None:
        self.done.append(what)
        if len(self.done) == 10_000:  # no step compares them where a model is only evaluated
            self.done = [f"checksum {checksum(self.done)}"]

    def compare(self, device: torch.device) -> None:
        """Raise RuntimeError, on every rank, where one did something else; nothing is sent where nothing was done."""
        if not self.done:
            return
        mine = torch.tensor([checksum(self.done)], device=device)
        everyones = mine.new_empty(dist.get_world_size(self.group))
        all_gather(everyones, mine, group=self.group)
        done, self.done = self.done, []
        if (everyones == mine).all():
            return
        ranks, (first, *others) = everybodys(done, self.group)
        for rank, other in zip(ranks[1:], others, strict=True):
            for a, b in zip([*first, "ended"], [*other, "ended"], strict=False):
                if a != b:
                    raise RuntimeError(
                        f"ranks use different layers: where rank {ranks[0]} {a}, rank {rank} {b}; what meets in one "
                        "collective must belong to one layer, so use the same layers on all ranks, in the same order"
                    )


def checksum(words: list[str]) -> int:
    return int.from_bytes(blake2b("\n".join(words).encode(), digest_size=8).digest(), "little", signed=True)


def everybodys(value: object, group: ProcessGroup | None) -> tuple[list[int], list]:
    """The global ranks of the group, and each one's value."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    values = [None] * len(ranks)
    dist.all_gather_object(values, value, group)
    return ranks, values
