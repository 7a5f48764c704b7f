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
from collections.abc import Callable, Iterable, Sequence
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
from labs.kit.checks.launching import noted
from labs.kit.checks.left import Aftermath
from labs.kit.checks.pipeline.cases import DIM, SEQUENCES, TOKENS, Obeyed, Size, Stage, flat, mean_loss
from labs.kit.record import mark
from labs.pp.instructions import KINDS, needs, reader

MOST = 300  # instructions of a rank that are read; no right list has more than 200
Key = tuple[int, int]  # stage and micro-batch

# ---- lists -----------------------------------------------------------------------------------------------


@dataclass
class Asked(Outcome):
    """`returned`: lists of instructions; something that is none of these is told in a few words."""

    again: bool = True  # a second call says the same


def ask(fn: Callable[..., Any], sizes: list[Size]) -> list[Asked]:
    """Another process asks in the opposite order, so what is kept from size to size shows."""
    mark("step")
    back = -1 if dist.get_rank() else 1
    several = sizes[0].stages_per_rank > 1
    return [ask_one(fn, size, several) for size in sizes[::back]][::back]


def ask_one(fn: Callable[..., Any], size: Size, several: bool) -> Asked:
    found, args = Asked(), (size.ranks, size.microbatches, size.stages_per_rank)[: 2 + several]
    with Aftermath() as aftermath:
        try:
            found.returned = plain(noted(size, fn, *args))
        except Exception:  # where no schedule is asked for, any error is an answer; elsewhere it is raised again
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
    pipeline = pp.Pipeline(case.model(), case.lists, mean_loss)
    pipeline.forward_backward(*map(torch.cat, case.batch(0)))
    return [(flat(stage), case.due(number, 0)) for number, stage in pipeline.stages.items()]


# ---- a list that is obeyed -------------------------------------------------------------------------------


class Disobeyed(RuntimeError):
    """What cannot go on: somebody would wait for ever, or get what is no use."""


@dataclass
class Followed(Outcome):
    """Of two batches: the losses, the gradients by stage, and both on one process; and what was kept."""

    losses: list[Any] = field(default_factory=list)
    gradients: list[dict[int, Tensor]] = field(default_factory=list)
    due: list[dict[int, Tensor]] = field(default_factory=list)
    due_losses: list[list[float]] = field(default_factory=list)
    stale: int = 0  # micro-batches of which something was there when others began, though their backward was over
    retained: bool = False  # so was a graph
    kept: bool = False  # activations are there when all is done


def obey(fn: Callable[..., Any], cases: list[Obeyed]) -> list[Followed]:
    mark("step")
    return [obey_one(fn, case) for case in cases]


def obey_one(fn: Callable[..., Any], case: Obeyed) -> Followed:
    me = dist.get_rank() if len(case.lists) > 1 else 0
    orders = [list(case.lists[me]) for _ in range(2)]  # of two batches: one may empty its own
    model, found = case.model(), Followed()
    mine = {number: model[number] for number in sorted({x.stage for x in orders[0]})}
    has_last = case.stages - 1 in mine
    found.due = [{number: case.due(number, step) for number in mine} for step in range(2)]
    found.due_losses = [[loss.item() for loss, _ in batch] if has_last else [] for batch in case.by_itself]
    given = [(xs if 0 in mine else [], ys if has_last else []) for xs, ys in map(case.batch, range(2))]
    before = condition(orders, mine, given)
    with Aftermath() as aftermath:
        for order, (xs, ys) in zip(orders, given, strict=True):
            desk = Desk(case, me, mine)
            with saved_tensors_hooks(desk.pack, lambda box: box.tensor):
                losses = noted(case, fn, order, mine, mean_loss, xs, ys, desk.take, desk.put)
            desk.finish()
            found.losses.append(numbers(losses))
            del losses
            found.kept |= bool(desk.left())
            found.stale, found.retained = max(found.stale, desk.stale), found.retained or desk.retained
            found.gradients.append({number: flat(stage) for number, stage in mine.items()})
    aftermath.tell(found)
    after = condition(orders, mine, given)
    found.left = next((name for name, value in before.items() if value != after[name]), found.left)
    return found


STEPPED, WITH_GRAPH = "a parameter", "one with its graph"


def condition(orders: list[list[pp.Instruction]], stages: dict[int, Stage], given: list[Any]) -> dict[str, Any]:
    """By name, what is nobody's business to change."""
    modules = [module for stage in stages.values() for module in stage.modules()]
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    return {
        STEPPED: [p.tolist() for p in parameters],
        "the list of instructions": [list(order) for order in orders],
        "the dict of stages": dict(stages),
        "xs or ys": [[[x.tolist() for x in each] for each in pair] for pair in given],
        "whether xs need a gradient": [[x.requires_grad for x in xs] for xs, _ in given],
        "the training mode of a stage": [module.training for module in modules],
        "which parameters are trained": [p.requires_grad for p in parameters],
        "the gradient of a frozen parameter": [p.grad is None for p in parameters if not p.requires_grad],
        "the number of hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
    }


def numbers(losses: Any) -> Any:
    """What is no tensor without dims and without a graph is told in a few words."""
    losses = list(losses) if isinstance(losses, Tensor) and losses.ndim else losses
    return [number(x) for x in losses] if isinstance(losses, Sequence) else show(losses)


def number(x: Any) -> float | str:
    if not isinstance(x, Tensor) or x.ndim:
        return show(x)
    return WITH_GRAPH if x.requires_grad else x.item()


@dataclass(eq=False)
class Box:
    """What autograd keeps for a backward, until it lets go of it."""

    tensor: Tensor


class Desk:
    """Where a rank takes and puts; it notes what the stages do, and what of it is still there.

    A message has a tag of its own, so that those that stay away or come in another order harm no other.
    """

    def __init__(self, case: Obeyed, rank: int, stages: dict[int, Stage]):
        self.case, self.rank, self.order = case, rank, list(case.lists[rank])
        self.done: set[pp.Instruction] = set()
        self.here: dict[pp.Instruction, Tensor] = {}
        self.taken: set[pp.Instruction] = set()
        self.sent: dict[pp.Instruction, tuple[dist.Work | None, Tensor, int]] = {}
        self.boxes: dict[Key, weakref.WeakSet[Box]] = defaultdict(weakref.WeakSet)
        self.storages: dict[Key, list[StorageWeakRef]] = defaultdict(list)
        self.now: Key | None = None
        self.stale, self.retained = 0, False
        self.hooks = [hook for number, stage in stages.items() for hook in self.watch(number, stage)]

    # ---- what goes through it ----------------------------------------------------------------------------

    def take(self, made: pp.Instruction) -> Tensor:
        require_instruction(made, "take")
        use = reader(made, self.case.stages)
        if made.stage >= self.case.stages or use not in self.order:
            raise Disobeyed(f"take({made!r}), which none of this rank's instructions needs")
        self.begin(use)
        if made in self.taken:
            raise Disobeyed(f"take({made!r}) for the second time: it is no longer here")
        if self.case.rank_of(made.stage) == self.rank:
            x = self.here.pop(made)
        else:
            arriving = torch.empty(SEQUENCES, TOKENS, DIM, dtype=self.case.dtype)
            dist.recv(arriving, self.case.rank_of(made.stage), tag=tag(made))
            x = arriving.clone()  # now and then a thread of the backend keeps what it has received for a moment
        self.taken.add(made)
        self.note(use, x)
        return x

    def put(self, made: pp.Instruction, x: Tensor) -> None:
        require_instruction(made, "put")
        if made not in self.order:
            raise Disobeyed(f"put({made!r}, ...), which is not in this rank's list")
        if not (use := reader(made, self.case.stages)):
            raise Disobeyed(f"put({made!r}, ...), for which nobody waits")
        if made not in self.done:
            raise Disobeyed(f"put({made!r}, ...) before it was done")
        if made in self.sent:
            raise Disobeyed(f"put({made!r}, ...) for the second time")
        require_form(made, x, self.case.dtype)
        self.note(made, x)
        sent, to = x.clone(), self.case.rank_of(use.stage)
        if to == self.rank:
            self.here[made] = sent
        # Whatever changes x is counted in its alias, too, which need not hold the numbers for that.
        alias, version = x.detach(), x._version
        alias.data = torch.empty(0, dtype=x.dtype)
        self.sent[made] = None if to == self.rank else dist.isend(sent, to, tag=tag(made)), alias, version

    def begin(self, x: pp.Instruction) -> None:
        """What the list has before it is done, and was put."""
        self.look()
        for before in self.order[: self.order.index(x)]:
            if before not in self.done:
                raise Disobeyed(f"{x!r} was begun before {before!r}, which the list has first")
            self.require_put(before)

    def finish(self) -> None:
        """What others wait for was put, and what they sent was taken."""
        for x in self.order:
            if x not in self.done:
                raise Disobeyed(f"{x!r} was not done")
            self.require_put(x)
            for need in needs(x, self.case.stages):
                if reader(need, self.case.stages) == x and need not in self.taken:
                    raise Disobeyed(f"{need!r}, which {x!r} needs, was never taken")
        for made, (work, alias, version) in self.sent.items():
            if alias._version != version:
                raise Disobeyed(f"what was put for {made!r} was changed afterwards, and it may not have left yet")
            if work:
                work.wait()
        for hook in self.hooks:
            hook.remove()

    def require_put(self, x: pp.Instruction) -> None:
        if (use := reader(x, self.case.stages)) and x not in self.sent:
            raise Disobeyed(f"{x!r} was never put, and rank {self.case.rank_of(use.stage)} waits for it")

    # ---- what it sees ------------------------------------------------------------------------------------

    def watch(self, number: int, stage: Stage) -> tuple[RemovableHandle, RemovableHandle]:
        turn = iter([x for x in self.order if x.stage == number and isinstance(x, pp.F)])

        def before(module: Any, inputs: Any) -> None:
            if not (x := next(turn, None)):
                raise Disobeyed(f"stage {number} was run more often than the list says")
            self.begin(x)
            self.now = number, x.microbatch

        def behind(module: Any, inputs: Any, y: Tensor) -> None:
            self.done.add(pp.F(*self.now))
            self.note(pp.F(*self.now), y)
            if y.requires_grad:
                y.register_hook(partial(self.goes_back, pp.B(*self.now)))

        return stage.register_forward_pre_hook(before), stage.register_forward_hook(behind)

    def goes_back(self, x: pp.Instruction, gradient: Tensor) -> None:
        if x not in self.done:  # once for the input's gradient, and once for the weights'
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
    if x is None:
        raise Disobeyed(f"put({made!r}, None): there is no gradient")
    if not isinstance(x, Tensor) or tuple(x.shape) != due or x.dtype != dtype:
        raise Disobeyed(f"put({made!r}, ...) was given {show(x)}; what crosses here is {dtype}, {due}")
    if x.requires_grad:
        raise Disobeyed(f"put({made!r}, ...) was given a tensor that requires a gradient")
