"""Data parallelism: copies of a model that stay equal.

Every rank holds the whole model and reads its own part of the batch.  After backward the ranks' gradients differ.
Their average is the gradient of the whole batch, so with it every copy takes the same step.  There are three ways to
average, which differ in what they do at two events of a training step:

                 a gradient is ready                 sync(), before optimizer.step()
    Naive        -                                   one all-reduce for each gradient
    Bucketed     -                                   one for each bucket: copy in, all-reduce, copy out
    Overlapped   copy it into its bucket; start      wait
                 the all-reduces of full buckets

Each sends the same bytes, be it Naive, Bucketed or Overlapped: per rank and step, 2 (N-1)/N times those of the
gradients.  Buckets save messages, since every all-reduce costs its latency however small it is.  Overlapping hides the
time of the all-reduces behind the rest of backward: backward works from the last layer to the first, and the buckets
are filled in that order.  PyTorch calls `Overlapped` DistributedDataParallel.  Source: Li et al., VLDB 2020, "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training".

    model = Overlapped(model)
    for micro_batch in micro_batches[:-1]:
        with model.no_sync():
            model(*micro_batch).backward()
    model(*micro_batches[-1]).backward()
    model.sync()
    optimizer.step()

In this example the model returns its loss divided by the number of micro-batches, since gradients add up, and the step
needs their mean.

`all_reduce=` is the function that adds up gradients over the ranks: `torch.distributed.all_reduce` by default, or
`labs.collectives.all_reduce`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from labs.agree import require_equal_replicas
from labs.group import divisor_before, send_buffers
from labs.hooks import require_counted, require_dense, weakly
from labs.unaveraged import require_all_averaged

MiB = 2**20


class DataParallel(nn.Module):
    """A replica in data parallelism: the base class of the three ways to average, which keeps all replicas equal.

    The base class handles `no_sync`, buffers and unused parameters.  A subclass implements `average`, which replaces
    every `.grad` by its mean over the ranks.

    model: the module to train, equal on all ranks.
    group: the ranks that average their gradients; all ranks by default.
    all_reduce: the function that adds up gradients over the ranks, like torch.distributed.all_reduce.
    find_unused: whether backward may leave parameters without a gradient on some ranks; these gradients count as zero.
        A parameter with a gradient on no rank keeps `grad = None`, so that the optimizer skips it as it would on one
        process.

    Buffers, such as running statistics, take rank 0's values when the model is wrapped, at the end of each `sync()`,
    and before a second training forward of a step.  With equal buffers all ranks evaluate the same model, and rank 0
    may evaluate alone.
    """

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup | None = None,
        all_reduce: Callable = dist.all_reduce,
        find_unused: bool = False,
        **others: Any,
    ):
        super().__init__()
        for name in others:
            raise TypeError(f"{type(self).__name__} has no {name}=: {LACKING.get(name, 'see labs.ddp')}")
        if getattr(model, "_ddp_params_and_buffers_to_ignore", ()):
            raise ValueError(f"the model names parameters that DDP is to ignore: {LACKING['ignored_params']}")
        self.module, self.group, self.all_reduce, self.find_unused = model, group, all_reduce, find_unused
        self.ranks = dist.get_world_size(group)
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.syncing, self.forwarded = True, False
        if not self.trainable:
            raise ValueError(f"{type(model).__name__} has no trainable parameters: there is nothing to average")
        require_dense(model)
        require_equal_replicas(model, group)
        send_buffers(model, group)
        require_all_averaged(self, {*self.trainable.values()}.__contains__, [group])

    def forward(self, *args, **kwargs):
        if self.syncing and self.module.training and torch.is_grad_enabled():
            if self.forwarded:
                send_buffers(self.module, self.group)
            self.forwarded = True
        require_counted(self, args, kwargs)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on their own rank, without an all-reduce: for all micro-batches of a step but the last.

        `backward()` must run inside this context; in PyTorch's version the forward must.
        """
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def sync(self) -> None:
        """Make every gradient its mean over the ranks; call it between `backward()` and `optimizer.step()`.

        Raises RuntimeError if there is no gradient at all, if a parameter has no gradient and `find_unused` is not set,
        if a parameter was unfrozen after the model was wrapped, or if a gradient has an autograd graph of its own.
        """
        if not self.syncing:
            return
        self.require_as_wrapped()
        missing = self.without_gradient()
        for p in missing.values():
            p.grad = torch.zeros_like(p)
        for p in self.trainable.values():
            require_without_graph(p)
        self.average()
        if self.find_unused:
            self.forget_unused(missing)
            self.require_gradients()
        send_buffers(self.module, self.group)
        self.forwarded = False

    def average(self) -> None:
        raise NotImplementedError

    def require_as_wrapped(self) -> None:
        known = set(self.trainable.values())
        for name, p in self.module.named_parameters():
            if p.requires_grad and p not in known:
                raise RuntimeError(
                    f"parameter {name!r} was unfrozen, or added, after the model was wrapped: wrap it anew"
                )

    def without_gradient(self) -> dict[str, nn.Parameter]:
        missing = {name: p for name, p in self.trainable.items() if p.grad is None}
        if missing and not self.find_unused:
            self.require_gradients()
            names = ", ".join(repr(name) for name in missing)
            raise RuntimeError(
                f"rank {dist.get_rank()} has no gradient for {names}: "
                "if the loss need not depend on every parameter, wrap the model with find_unused=True"
            )
        return missing

    def require_gradients(self) -> None:
        if all(p.grad is None for p in self.trainable.values()):
            raise RuntimeError(
                "sync() found no gradient at all: call loss.backward() before sync(), the optimizer's step() after it, "
                "and the wrapped model with its own parameters, as those that functional_call lends are not averaged"
            )

    def forget_unused(self, missing: dict[str, nn.Parameter]) -> None:
        """Set `.grad` back to None for parameters that have a gradient on no rank; all-reduce a flag per parameter."""
        device = next(iter(self.trainable.values())).device
        used = torch.tensor([name not in missing for name in self.trainable], dtype=torch.int32, device=device)
        self.all_reduce(used, group=self.group)
        for p, ranks in zip(self.trainable.values(), used.tolist(), strict=True):
            if ranks == 0:
                p.grad = None

    def __getattr__(self, name: str) -> Any:
        if name in LACKING:
            raise AttributeError(f"{type(self).__name__} has no {name}: {LACKING[name]}")
        return super().__getattr__(name)


LACKING = {  # options of PyTorch that are missing here: what to do instead
    "register_comm_hook": "give all_reduce=, a function like torch.distributed.all_reduce, which gets each bucket",
    "join": "give all ranks the same number of batches (labs.data does), or end an epoch when one rank has no more",
    "ignored_params": "all parameters are averaged: freeze these, or keep them out of the model",
    "broadcast_buffers": "buffers always become rank 0's at the end of sync()",
    "bucket_cap_mb": "give bucket_bytes=",
    "device_ids": "move the model to its device before you wrap it",
    "find_unused_parameters": "give find_unused=",
    "gradient_as_bucket_view": "a gradient is always a view of its bucket in Overlapped",
    "mixed_precision": "run the forward under torch.autocast",
    "process_group": "give group=",
    "static_graph": "no step depends on the graph of an earlier one: leave it out",
}

# ---- one all-reduce per gradient, per bucket, and per bucket during backward ------------------------------


class Naive(DataParallel):
    """Data parallelism with one all-reduce for each gradient, after backward."""

    def average(self) -> None:
        for p in self.trainable.values():
            p.grad = p.grad.contiguous()  # a backend adds up elements in the order of memory
            after = divide_before(p.grad, self.ranks)
            self.all_reduce(p.grad, group=self.group)
            p.grad /= after


class Bucketed(DataParallel):
    """Data parallelism with one all-reduce for each bucket of gradients, after backward."""

    def __init__(self, model: nn.Module, bucket_bytes: int = 25 * MiB, **options):
        super().__init__(model, **options)
        self.buckets = in_buckets(self.trainable.values(), bucket_bytes)

    def average(self) -> None:
        # All buckets share one buffer, since a backend may hold the memory that it reduced last a little longer.
        largest = max(nbytes(bucket) for bucket in self.buckets)
        buffer = torch.empty(largest, dtype=torch.uint8, device=self.buckets[0][0].device)
        for bucket in self.buckets:
            flat = buffer[: nbytes(bucket)].view(bucket[0].dtype)
            torch.cat([p.grad.flatten() for p in bucket], out=flat)
            after = divide_before(flat, self.ranks)
            self.all_reduce(flat, group=self.group)
            flat /= after
            for p, mean in zip(bucket, unflatten(flat, bucket), strict=True):
                p.grad.copy_(mean)


class Overlapped(DataParallel):
    """Data parallelism that starts a bucket's all-reduce during backward, as soon as its last gradient is computed.

    Every `.grad` is a view of its bucket, so no gradient has to be copied back.  Do not change a `.grad` before sync(),
    since the all-reduce of its bucket may be in flight.  After zero_grad() has removed all gradients of a bucket, the
    next backward allocates new memory for the bucket, since the user may have kept one of the old gradients.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = 25 * MiB, **options):
        super().__init__(model, **options)
        self.buckets = [Bucket(parameters) for parameters in in_buckets(self.trainable.values(), bucket_bytes)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self.works = []
        for p in self.trainable.values():
            p.register_post_accumulate_grad_hook(weakly(self.gradient_ready))

    def gradient_ready(self, p: nn.Parameter) -> None:
        """Copy `p.grad` to its bucket; autograd calls this when all uses of the parameter have been added up."""
        if p.grad is None:  # the parameter was frozen after the forward
            return
        require_without_graph(p)
        bucket = self.bucket_of[p]
        if p not in bucket.waiting_for:
            raise RuntimeError(
                "backward computed a second gradient of one parameter before sync(): run every backward() but the last "
                "within no_sync(), give checkpoint() use_reentrant=False, and after a backward() that failed wrap the "
                "model anew"
            )
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()

    def start_full_buckets(self) -> None:
        """Start the all-reduces of full buckets, strictly in order, since all ranks must start the same all-reduces.

        A bucket that is full before an earlier bucket waits for it.
        """
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            bucket.divided = self.ranks / divide_before(bucket.flat, self.ranks)
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))

    def average(self) -> None:
        for bucket in self.buckets:
            for p in list(bucket.waiting_for):
                self.gradient_ready(p)
        for bucket, work in zip(self.buckets, self.works, strict=True):
            work.wait()
            bucket.flat /= self.ranks / bucket.divided
            bucket.waiting_for = set(bucket.views)
        self.works = []


class Bucket:
    """A bucket of gradients, side by side in one vector, `flat`; `views[p]` is the gradient of p, in p's shape.

    divided: the number by which the gradients were divided before the all-reduce.
    """

    divided = 1.0

    def __init__(self, parameters: list[nn.Parameter]):
        self.waiting_for = set(parameters)
        self.take_memory(parameters)

    def take_memory(self, parameters: list[nn.Parameter]) -> None:
        self.flat, self.views = None, {}  # free the old memory first
        self.flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
        self.views = dict(zip(parameters, unflatten(self.flat, parameters), strict=True))

    def collect(self, p: nn.Parameter) -> None:
        if not any(q.grad is view for q, view in self.views.items()):
            self.take_memory(list(self.views))
        self.views[p].copy_(p.grad)
        p.grad = self.views[p]


def require_without_graph(p: nn.Parameter) -> None:
    if p.grad.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True): a mean over the ranks has no graph; for a loss of gradients, make them with "
            "torch.autograd.grad(..., create_graph=True), and call backward() without create_graph"
        )


def divide_before(x: Tensor, ranks: int) -> float:
    """Divide float16 numbers in place, so that their sum stays in range; return the divisor left for the sum."""
    before = divisor_before(x.dtype, ranks)
    if before > 1:
        x /= before
    return ranks / before


def in_buckets(parameters, bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Split the parameters into buckets, last parameter first; a bucket is closed when it reaches `bucket_bytes`."""
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}: a bucket must hold at least 1 byte")
    buckets, room = [], 0
    for p in reversed(list(parameters)):
        if room <= 0 or p.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(p)
        room -= p.nbytes
    return buckets


def nbytes(tensors: list[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Split a vector into views with the shapes of the tensors in `like`."""
    pieces = flat.split([x.numel() for x in like])
    return [piece.view(x.shape) for piece, x in zip(pieces, like, strict=True)]
