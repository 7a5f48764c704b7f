"""The `take` and `put` that a check hands to a learner's pipeline executor, and that record all that a rank does."""

import gc
import weakref
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from labs import pp
from labs.exercises.engine.answer import show
from labs.exercises.pipeline._stages_run_by_lists import DIM, SEQUENCES, TOKENS, Stacked
from labs.pp.instructions import needs, reader

CROSSES = SEQUENCES, TOKENS, DIM
Key = tuple[int, int]  # stage and micro-batch


class Disobeyed(RuntimeError):
    """An error about an instruction, take or put that breaks the list: a rank would hang, or get a wrong tensor."""


def require(fine: Any, otherwise: str) -> None:
    if not fine:
        raise Disobeyed(otherwise)


@dataclass(eq=False)
class Box:
    """A tensor that autograd holds for a backward, in a box that lives as long as autograd holds it."""

    tensor: Tensor


class Desk:
    """The functions `take` and `put` of one rank, and a record of their calls and of the stages' work.

    Each message has a tag of its own, so that a missing or early message is never mistaken for another one.

    stale: the most micro-batches whose tensors were held when an instruction began, though their backward was over.
    retained: whether autograd's graph of such micro-batches was held, too.
    """

    def __init__(self, world: Stacked, rank: int, stages: dict[int, nn.Module]):
        self.rank, self.dtype, self.order = rank, world.dtype, list(world.lists[rank])
        self.done: set[pp.Instruction] = set()
        needed = [(need, x) for x in self.order for need in needs(x, world.stages) if reader(need, world.stages) == x]
        self.takes = {need: (x, world.rank_of(need.stage)) for need, x in needed}
        self.taken: set[pp.Instruction] = set()
        read = [(x, use) for x in self.order if (use := reader(x, world.stages))]
        self.puts = {x: world.rank_of(use.stage) for x, use in read}
        self.sent: dict[pp.Instruction, tuple[dist.Work | None, Tensor, int]] = {}
        self.here: dict[pp.Instruction, Tensor] = {}
        self.boxes: dict[Key, weakref.WeakSet[Box]] = defaultdict(weakref.WeakSet)
        self.storages: dict[Key, list[StorageWeakRef]] = defaultdict(list)
        self.now: Key | None = None
        self.stale, self.retained = 0, False
        self.hooks = [hook for number, stage in stages.items() for hook in self.watch(number, stage)]

    def take(self, made: pp.Instruction) -> Tensor:
        told = named(made, "take")
        require(made in self.takes, f"{told}), which none of this rank's instructions needs")
        use, of = self.takes[made]
        self.begin(use)
        require(made not in self.taken, f"{told}) for the second time: it is no longer here")
        if of == self.rank:
            x = self.here.pop(made)
        else:
            arriving = torch.empty(CROSSES, dtype=self.dtype)
            dist.recv(arriving, of, tag=tag(made))
            x = arriving.clone()  # a thread of the backend may hold what it has received for a moment longer
        self.taken.add(made)
        self.note(use, x)
        return x

    def put(self, made: pp.Instruction, x: Tensor) -> None:
        told = named(made, "put")
        require(made in self.order, f"{told}, ...), which is not in this rank's list")
        require(made in self.puts, f"{told}, ...), for which nobody waits")
        require(made in self.done, f"{told}, ...) before it was done")
        require(made not in self.sent, f"{told}, ...) for the second time")
        require(x is not None, f"{told}, None): there is no gradient")
        matches = isinstance(x, Tensor) and tuple(x.shape) == CROSSES and x.dtype == self.dtype
        require(matches, f"{told}, ...) was given {show(x)}; what crosses here is {self.dtype}, {CROSSES}")
        require(not x.requires_grad, f"{told}, ...) was given a tensor that requires a gradient")
        self.note(made, x)
        sent, to, work = x.clone(), self.puts[made], None
        if to == self.rank:
            self.here[made] = sent
        else:
            work = dist.isend(sent, to, tag=tag(made))
        # A change of x raises the version of its alias, too, and the alias need not hold the numbers for that.
        alias, version = x.detach(), x._version
        alias.data = torch.empty(0, dtype=x.dtype)
        self.sent[made] = work, alias, version

    def begin(self, x: pp.Instruction) -> None:
        kept = self.kept()
        self.stale = max(self.stale, len(kept))
        self.retained |= any(self.boxes[at] for at in kept)
        self.require_done(self.order[: self.order.index(x)], f"{x!r} was begun before {{!r}}, which the list has first")

    def require_done(self, order: list[pp.Instruction], otherwise: str) -> None:
        """Raise Disobeyed unless these instructions are done, and each output that another instruction reads is put."""
        for x in order:
            require(x in self.done, otherwise.format(x))
            waits = x in self.puts and x not in self.sent
            require(not waits, f"{x!r} was never put, and rank {self.puts.get(x)} waits for it")

    def finish(self) -> None:
        """Raise Disobeyed unless all of the list is done, put and taken; wait for the sends, and remove the hooks."""
        self.require_done(self.order, "{!r} was not done")
        for need, (x, _) in self.takes.items():
            require(need in self.taken, f"{need!r}, which {x!r} needs, was never taken")
        for made, (work, alias, version) in self.sent.items():
            same = alias._version == version
            require(same, f"what was put for {made!r} was changed afterwards, and it may not have left yet")
            if work:
                work.wait()
        for hook in self.hooks:
            hook.remove()

    # ---- what the hooks see ------------------------------------------------------------------------------

    def watch(self, number: int, stage: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        turn = iter([x for x in self.order if x.stage == number and isinstance(x, pp.F)])

        def before(module: Any, inputs: Any) -> None:
            x = next(turn, None)
            require(x, f"stage {number} was run more often than the list says")
            self.begin(x)
            self.now = number, x.microbatch

        def behind(module: Any, inputs: Any, y: Tensor) -> None:
            self.done.add(pp.F(*self.now))
            self.note(pp.F(*self.now), y)
            if y.requires_grad:
                y.register_hook(partial(self.goes_back, pp.B(*self.now)))

        return stage.register_forward_pre_hook(before), stage.register_forward_hook(behind)

    def goes_back(self, x: pp.Instruction, gradient: Tensor) -> None:
        if x not in self.done:  # this hook may fire twice: for the input's gradient, and for the weights'
            self.begin(x)
            self.done.add(x)

    def pack(self, x: Tensor) -> Box:
        box = Box(x)
        if self.now:
            self.boxes[self.now].add(box)
        return box

    def note(self, of: pp.Instruction, x: Tensor) -> None:
        self.storages[of.stage, of.microbatch].append(StorageWeakRef(x.untyped_storage()))

    def kept(self) -> list[Key]:
        """Return the micro-batches whose tensors are held, though their backward is over."""
        over = [(x.stage, x.microbatch) for x in self.done if isinstance(x, pp.B)]
        return [at for at in over if self.boxes[at] or not all(ref.expired() for ref in self.storages[at])]

    def left(self) -> bool:
        """Return whether a tensor is still held after a run of the garbage collector, though its backward is over."""
        return bool(self.kept() and (gc.collect(), self.kept())[1])


def tag(made: pp.Instruction) -> int:
    return 2 * (1000 * made.stage + made.microbatch) + isinstance(made, pp.B)


def named(made: Any, verb: str) -> str:
    goes = f"{verb}({show(made)}): it goes by an instruction, F or B of a stage and a micro-batch"
    require(isinstance(made, pp.F | pp.B), goes)
    return f"{verb}({made!r}"
