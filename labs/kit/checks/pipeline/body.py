"""What each rank does in a check of pipelines, and notes.

ask     the learner's function, for the lists of all sizes
play    lists that are right, by the course's executor
obey    the learner's function, in the executor's place
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from labs import pp
from labs.kit.checks.answer import show
from labs.kit.checks.case import Outcome
from labs.kit.checks.job import noted
from labs.kit.checks.left import Aftermath
from labs.kit.checks.pipeline.cases import DIM, SEQUENCES, TOKENS, Obeyed, Size, Stage, flat, mean_loss
from labs.kit.record import mark
from labs.pp.instructions import KINDS, needs, reader

MOST = 300  # instructions of a rank that are read; no right list has more than 100
Key = tuple[int, int]  # stage and micro-batch

# ---- lists -----------------------------------------------------------------------------------------------


@dataclass
class Asked(Outcome):
    """`returned`: lists of instructions; something that is none of these is told in a few words."""

    again: bool = True  # a second call says the same


def ask(fn: Callable[..., Any], sizes: list[Size], several: bool) -> list[Asked]:
    """Another process asks the other way round: what is kept from size to size shows."""
    mark("step")
    back = -1 if dist.get_rank() else 1
    return [ask_one(fn, size, several) for size in sizes[::back]][::back]


def ask_one(fn: Callable[..., Any], size: Size, several: bool) -> Asked:
    args = (size.ranks, size.microbatches, size.stages_per_rank)[: 2 + several]
    found = Asked()
    with Aftermath() as aftermath:
        try:
            found.returned = plain(noted(size, fn, *args))
        except ValueError:
            if not size.refusable:
                raise
            found.refused = True
    aftermath.tell(found)
    found.again = found.refused or plain(noted(size, fn, *args)) == found.returned
    return found


def plain(value: Any) -> Any:
    """Lists, of whatever can be gone through; of numbers that stand for whole ones, these."""
    if isinstance(value, pp.Instruction):
        return exact(value)
    if isinstance(value, Iterable) and not isinstance(value, str | dict | set | Tensor):
        return [plain(item) for item in islice(value, MOST)]
    return show(value)


def exact(x: pp.Instruction) -> Any:
    try:
        return KINDS[type(x).__name__](operator.index(x.stage), operator.index(x.microbatch))
    except (KeyError, TypeError):
        return f"{x!r}, of {type(x.stage).__name__} and {type(x.microbatch).__name__}"


def play(case: Obeyed) -> list[tuple[Tensor, Tensor]]:
    """Of this rank's stages: the gradients, and one process's."""
    stages = case.model()
    pipeline = pp.Pipeline(stages, case.lists, mean_loss)
    pipeline.forward_backward(*case.batch(0))
    due = case.model()
    one_process(case, due, 0)
    return [(flat(stage), flat(due[number])) for number, stage in pipeline.stages.items()]


def one_process(case: Obeyed, stages: list[Stage], step: int) -> list[float]:
    """A batch forward and backward, in the order in which the list has its backwards; the losses by micro-batch."""
    order = [x.microbatch for x in case.lists[case.rank_of(0)] if x.stage == 0 and isinstance(x, pp.B | pp.I)]
    xs, ys = (each.chunk(case.microbatches) for each in case.batch(step))
    losses = {m: mean_loss(torch.nn.Sequential(*stages)(xs[m]), ys[m]) for m in order}
    for loss in losses.values():
        (loss / case.microbatches).backward()
    return [losses[m].item() for m in sorted(losses)]


# ---- a list that is obeyed -------------------------------------------------------------------------------


class Disobeyed(RuntimeError):
    """What cannot go on: somebody would wait for ever, or get what is no use."""


@dataclass
class Followed(Outcome):
    """Of two batches: what was done, the losses, the gradients by stage; and what was kept."""

    done: list[list[pp.Instruction]] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    gradients: list[dict[int, Tensor]] = field(default_factory=list)
    due: list[dict[int, Tensor]] = field(default_factory=list)  # on one process
    due_losses: list[list[float]] = field(default_factory=list)
    stepped: bool = False  # the parameters have changed
    idle: bool = False  # a stage is no longer in training mode
    stale: int = 0  # micro-batches whose activations were there when others began, though their backward was over
    retained: bool = False  # so was a graph
    kept: str = ""  # what is there when all is done


def obey(fn: Callable[..., Any], cases: list[Obeyed]) -> list[Followed]:
    mark("step")
    return [obey_one(fn, case) for case in cases]


def obey_one(fn: Callable[..., Any], case: Obeyed) -> Followed:
    me = dist.get_rank() if len(case.lists) > 1 else 0
    order, found, stages, whole, before = case.lists[me], Followed(), case.model(), case.model(), case.model()
    for step in range(2):
        desk = Desk(case, me)
        mine = {number: desk.watched(number, stages[number]) for number in sorted({x.stage for x in order})}
        xs, ys = (list(each.chunk(case.microbatches)) for each in case.batch(step))
        xs, ys = xs if 0 in mine else [], ys if case.stages - 1 in mine else []
        with Aftermath() as aftermath, saved_tensors_hooks(desk.pack, lambda box: box.tensor):
            losses = noted(case, fn, list(order), dict(mine), mean_loss, xs, ys, desk.take, desk.put)
        aftermath.tell(found)
        desk.finish()
        kept = desk.left()
        found.losses.append(numbers(losses))
        del losses
        if kept:
            found.kept = "activations" if desk.left() else "losses"
        found.done.append(desk.done)
        found.stale, found.retained = max(found.stale, desk.stale), found.retained or desk.retained
        due_losses = one_process(case, whole, step)
        found.due_losses.append(due_losses if ys else [])
        found.gradients.append({number: flat(stage) for number, stage in mine.items()})
        found.due.append({number: flat(whole[number]) for number in mine})
        found.idle |= not all(module.training for stage in mine.values() for module in stage.modules())
        found.stepped |= not all(same_parameters(mine[number], before[number]) for number in mine)
    return found


def same_parameters(one: Stage, other: Stage) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def numbers(losses: Any) -> Any:
    """By micro-batch; [] for None."""
    try:
        losses = [losses[m] for m in sorted(losses)] if isinstance(losses, dict) else losses
        return [] if losses is None else [torch.as_tensor(loss).detach().item() for loss in losses]
    except (TypeError, ValueError, RuntimeError):
        return show(losses)


@dataclass(eq=False)
class Box:
    """What autograd keeps for a backward, until it lets go of it."""

    tensor: Tensor


class Desk:
    """Where a rank takes and puts; it notes what the stages do, and what of it is still there.

    A message has a tag of its own, so that those that stay away or come in another order harm no other.
    """

    def __init__(self, case: Obeyed, rank: int):
        self.case, self.rank, self.order = case, rank, list(case.lists[rank])
        self.done: list[pp.Instruction] = []
        self.here: dict[pp.Instruction, Tensor] = {}
        self.given: dict[pp.Instruction, weakref.ref[Tensor]] = {}  # for a forward or backward
        self.taken: dict[pp.Instruction, Tensor | None] = {}
        self.sent: dict[pp.Instruction, dist.Work | None] = {}
        self.boxes: dict[Key, weakref.WeakSet[Box]] = defaultdict(weakref.WeakSet)
        self.storages: dict[Key, list[StorageWeakRef]] = defaultdict(list)
        self.now: Key | None = None
        self.stale, self.retained = 0, False
        self.hooks: list[RemovableHandle] = []

    # ---- what goes through it ----------------------------------------------------------------------------

    def take(self, made: pp.Instruction) -> Tensor:
        self.look()
        use = self.use_of(made)
        for before in self.order[: self.order.index(use)]:
            if before not in self.done:
                raise Disobeyed(f"take({made!r}) for {use!r} before {before!r}, which the list has first")
            self.require_put(before)
        if made in self.taken:
            raise Disobeyed(f"take({made!r}) for the second time: it is here no more")
        if self.case.rank_of(made.stage) == self.rank:
            x = self.here.pop(made)
        else:
            arriving = torch.empty(SEQUENCES, TOKENS, DIM, dtype=self.case.dtype)
            dist.recv(arriving, self.case.rank_of(made.stage), tag=tag(made))
            x = arriving.clone()  # now and then a thread of the backend keeps what it has received for a moment
        self.taken[made] = x.clone() if isinstance(made, pp.B) else None
        self.given[use] = weakref.ref(x)
        self.note(use, x)
        return x

    def put(self, made: pp.Instruction, x: Tensor) -> None:
        require_instruction(made, "put")
        if made not in self.order:
            raise Disobeyed(f"put({made!r}, ...), which is not in this rank's list")
        if not (use := reader(made, self.case.stages)):
            return  # nobody needs it, and it does no harm
        if made not in self.done:
            raise Disobeyed(f"put({made!r}, ...) before it was done")
        if made in self.sent:
            raise Disobeyed(f"put({made!r}, ...) for the second time")
        if x is None:
            input = self.given[pp.F(made.stage, made.microbatch)]()
            has = input is not None and input.grad is not None
            raise Disobeyed(
                f"put({made!r}, None){', though its input has a gradient' if has else ': its input has none'}"
            )
        require_form(made, x, self.case.dtype)
        if self.taken.get(pp.B(made.stage + 1, made.microbatch)) is not None and isinstance(made, pp.B):
            self.require_own_gradient(made, x)
        x, to = x.detach().clone(), self.case.rank_of(use.stage)
        self.sent[made] = None if to == self.rank else dist.isend(x, to, tag=tag(made))
        if to == self.rank:
            self.here[made] = x

    def finish(self) -> None:
        """What others wait for was put, and what they sent was taken."""
        for x in self.order:
            if x not in self.done:
                raise Disobeyed(f"{x!r} was not done")
            self.require_put(x)
            for need in needs(x, self.case.stages):
                if reader(need, self.case.stages) == x and need not in self.taken:
                    raise Disobeyed(f"{need!r}, which {x!r} needs, was never taken")
        for work in self.sent.values():
            if work:
                work.wait()
        for hook in self.hooks:
            hook.remove()

    def use_of(self, made: Any) -> pp.Instruction:
        require_instruction(made, "take")
        use = reader(made, self.case.stages)
        if made.stage >= self.case.stages:
            raise Disobeyed(f"take({made!r}): the last stage is {self.case.stages - 1}, behind which is nothing")
        if use not in self.order:
            raise Disobeyed(f"take({made!r}), which none of this rank's instructions needs")
        return use

    def require_put(self, x: pp.Instruction) -> None:
        if (use := reader(x, self.case.stages)) and x not in self.sent:
            raise Disobeyed(f"{x!r} was never put, and rank {self.case.rank_of(use.stage)} waits for it")

    def require_own_gradient(self, made: pp.Instruction, x: Tensor) -> None:
        if torch.equal(x, self.taken[pp.B(made.stage + 1, made.microbatch)]):
            raise Disobeyed(f"put({made!r}, ...) is the gradient that it took: that of its output, not of its input")

    # ---- what it sees ------------------------------------------------------------------------------------

    def watched(self, number: int, stage: Stage) -> Stage:
        turn = iter([x for x in self.order if x.stage == number and isinstance(x, pp.F)])

        def before(module: Any, inputs: Any) -> None:
            self.look()
            if not (x := next(turn, None)):
                raise Disobeyed(f"stage {number} was run more often than the list says")
            self.now = number, x.microbatch

        def behind(module: Any, inputs: Any, y: Tensor) -> None:
            done = pp.F(*self.now)
            self.done.append(done)
            self.note(done, y)
            if y.requires_grad:
                y.register_hook(partial(self.goes_back, pp.B(*self.now)))

        self.hooks += [stage.register_forward_pre_hook(before), stage.register_forward_hook(behind)]
        return stage

    def goes_back(self, done: pp.Instruction, gradient: Tensor) -> None:
        if done not in self.done:  # once for the input's gradient, and once for the weights'
            self.done.append(done)

    def pack(self, x: Tensor) -> Box:
        box = Box(x)
        if self.now:
            self.boxes[self.now].add(box)
        return box

    def note(self, of: pp.Instruction, x: Tensor) -> None:
        self.storages[of.stage, of.microbatch].append(StorageWeakRef(x.untyped_storage()))

    def kept(self) -> list[Key]:
        """The micro-batches of which something is there, though their backward is over."""
        over = [(x.stage, x.microbatch) for x in self.done if isinstance(x, pp.B)]
        return [at for at in over if self.boxes[at] or not all(ref.expired() for ref in self.storages[at])]

    def left(self) -> list[Key]:
        """The same, but what only waits for the collector has gone."""
        return self.kept() and (gc.collect(), self.kept())[1]

    def look(self) -> None:
        kept = self.kept()
        self.stale = max(self.stale, len(kept))
        self.retained |= any(self.boxes[at] for at in kept)


def tag(made: pp.Instruction) -> int:
    return 2 * (1000 * made.stage + made.microbatch) + isinstance(made, pp.B)


def require_instruction(made: Any, verb: str) -> None:
    if not isinstance(made, pp.F | pp.B):
        raise Disobeyed(f"{verb}({show(made)}): it goes by an instruction, F or B of a stage and a micro-batch")


def require_form(made: pp.Instruction, x: Any, dtype: torch.dtype) -> None:
    due = SEQUENCES, TOKENS, DIM
    if not isinstance(x, Tensor) or tuple(x.shape) != due or x.dtype != dtype:
        raise Disobeyed(f"put({made!r}, ...) was given {show(x)}; what crosses here is {dtype}, {due}")
