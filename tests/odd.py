"""Trainings that a user would try, and few tests have: under every strategy of ours each is right, or refused.

    Odd         such a training, as a value: a model, what happens to it between steps, and which strategies refuse it
    ODD         all of them
    ROWS        how a strategy is applied to any such model, and on how many ranks
    REFUSED     the trainings that are refused, by which strategies, and the sentence

All models are variations of `Stack`: three layers between an embedding and a head, so that tensor parallelism can split
its matrices and a pipeline can cut it.  The reference is one process with the same micro-batches, in float64.  The
optimizer is SGD without momentum: it reveals a gradient that is twice too large, and it treats a zero gradient as none.

`python -m tests.odd` prints the table; `python -m tests.odd "frozen" zero` prints a part of it.
"""

import contextlib
import gc
import math
import re
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from labs import cp, ddp, fsdp, moe, parallel, pp, tp
from labs.agree import everybodys
from labs.dtensor import Replicate, Shard
from labs.fsdp import MixedPrecisionPolicy
from labs.kit.launch import RankError, run
from labs.mesh import Mesh
from labs.zero import Zero

WORDS, WIDTH, HIDDEN, BATCH, TIME, STEPS, RATE = 11, 6, 5, 12, 4, 4, 0.5


# ---- models ----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """A model from tokens and targets, [batch, time], to the mean loss. at: step, part of the batch, micro-batch."""

    at = (0, 0, 0)
    one_group = False  # sharded as a whole, not layer by layer

    def __init__(self, middle: Callable[[], nn.Module] = Layer, change: Callable[..., Any] = lambda model: None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({"0": Layer(), "1": middle(), "2": Layer()})
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()
        change(self)

    def forward(self, tokens, targets):
        return self.loss(self.head(self.body(self.embed(tokens))), targets)

    def body(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x

    @staticmethod
    def loss(logits, targets):
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def parts(self) -> list[nn.Module]:
        """Return the model's parts, for a pipeline."""
        return [nn.Sequential(self.embed, self.layers["0"]), self.layers["1"], self.layers["2"], self.head]


def bodied(body: Callable[[Stack, Tensor], Tensor], **others: Any) -> Callable[[], Stack]:
    """Return a Stack whose layers are used in this way, which no pipeline can do."""
    kind = type("Bodied", (Stack,), {"body": body, "parts": None})
    return partial(kind, **others)


def changed(change: Callable[[Stack], Any]) -> Callable[[], Stack]:
    return partial(Stack, change=change)


def middle(forward: Callable[..., Tensor]) -> Callable[[], Stack]:
    """Return a Stack whose middle layer computes this."""
    return partial(Stack, middle=type("Middle", (Layer,), {"forward": forward}))


# ---- between steps ---------------------------------------------------------------------------------------


def trained(path: str, value: bool) -> Callable[[nn.Module], None]:
    """Return a function that freezes or unfreezes a module, or one parameter in its place, as people do it."""

    def act(model: nn.Module) -> None:
        owner, _, last = path.rpartition(".")
        getattr(model.get_submodule(owner), last).requires_grad_(value)

    return act


# ---- a training ------------------------------------------------------------------------------------------


def backward(t: "Trainer", x: Tensor, y: Tensor, share: float = 1.0) -> None:
    (t.call(x, y) * share / t.micro_batches).backward()


Back = Callable[..., None]


@dataclass
class Trainer:
    """A model under a row, on one rank, with everything that a loop needs."""

    model: Stack
    optimizer: Any = None
    call: Callable[..., Tensor] | None = None
    finish: Callable[[], Any] = lambda: None
    no_sync: Callable[[], Any] = contextlib.nullcontext
    full: Callable[[], Mapping[str, Tensor]] | None = None
    pipeline: pp.Pipeline | None = None
    part: int = 0
    parts: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        self.call = self.call or self.model
        self.optimizer = self.optimizer or sgd(self.model.parameters())
        self.full = self.full or (lambda: dict(self.model.named_parameters()))

    def data(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of a step that this rank reads."""
        batch = math.lcm(BATCH, self.parts * self.micro_batches)  # all micro-batches have the same size
        x, y = torch.randint(WORDS, (2, batch, TIME), generator=torch.Generator().manual_seed(step))
        own = (part.chunk(self.parts)[self.part].chunk(self.micro_batches) for part in (x, y))
        return list(zip(*own, strict=True))

    def backward(self, step: int, back: Back = backward, last: bool = True) -> None:
        """Compute the gradients of a step, by micro-batches; unless it is the `last`, more will be added to them."""
        if self.pipeline:
            self.model.at = step, 0, 0
            self.pipeline.forward_backward(*map(torch.cat, zip(*self.data(step), strict=True)))
            return
        for number, (x, y) in enumerate(self.data(step)):
            self.model.at = step, self.part, number
            with contextlib.nullcontext() if last and number + 1 == self.micro_batches else self.no_sync():
                back(self, x, y)

    def update(self) -> None:
        self.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, step: int) -> None:
        self.backward(step)
        self.update()


class Whole(Trainer):
    """A trainer in one process, which reads every rank's micro-batches one after the other."""

    def backward(self, step: int, back: Back = backward, last: bool = True) -> None:
        own = Trainer(self.model, self.optimizer, parts=self.parts, micro_batches=self.micro_batches)
        for own.part in range(self.parts):
            own.backward(step, lambda t, x, y: back(t, x, y, 1 / self.parts))


sgd = partial(torch.optim.SGD, lr=RATE)


def steps(t: Trainer, odd: "Odd") -> None:
    """Take three steps: the first finds everything new, and the other two find the traces of the one before."""
    for number in range(STEPS if odd.before else 3):
        odd.before.get(number, lambda model: None)(t.model)
        t.step(number)


@dataclass(frozen=True, eq=False)
class Odd:
    """An odd training. before: what is done to the model before a step, by its number. train: replaces plain steps."""

    name: str
    make: Callable[[], Stack] = Stack
    before: Mapping[int, Callable[[Stack], Any]] = field(default_factory=dict)
    train: Callable[[Trainer, "Odd"], None] = steps
    micro_batches: int = 1
    optimizer: Callable[..., Any] = sgd


class Refused(NamedTuple):
    """A refusal: the sentence for these trainings in these rows (patterns), on every rank, or on one, which ends the
    job.
    """

    names: str
    rows: str
    sentence: str
    on_one_rank: bool = False


# ---- rows ------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    apply: Callable[[Odd, Stack], Trainer]
    ranks: int
    parts: int
    build: Callable[[Stack], Stack] = lambda model: model  # what a training's model is made into


def along(mesh: Mesh, *axes: str) -> dict[str, int]:
    """Return the part of the batch that this rank reads, if the axes cut it."""
    part, parts = 0, 1
    for axis in axes:
        part, parts = part * mesh.size(axis) + mesh.get_local_rank(axis), parts * mesh.size(axis)
    return {"part": part, "parts": parts}


def data_parallel(kind: type[ddp.DataParallel], odd: Odd, model: Stack) -> Trainer:
    wrapped = kind(model, find_unused=True)
    own = {"part": dist.get_rank(), "parts": dist.get_world_size()}
    return Trainer(model, odd.optimizer(model.parameters()), wrapped, wrapped.sync, wrapped.no_sync, **own)


def zero(stage: int, odd: Odd, model: Stack) -> Trainer:
    sharded = Zero(model, stage, odd.optimizer, layers=[model] if model.one_group else None)
    own = {"part": dist.get_rank(), "parts": dist.get_world_size()}
    return Trainer(model, sharded, finish=sharded.sync, full=sharded.full_state_dict, **own)


def fully_sharded(odd: Odd, model: Stack, mesh: Mesh | None = None, axes: tuple = ("dp",), **how: Any) -> Trainer:
    mesh = mesh or Mesh((dist.get_world_size(),), ("dp",))
    for layer in model.layers.values() if not model.one_group else ():
        fsdp.fully_shard(layer, mesh=mesh, **how)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=how.get("mp_policy", MixedPrecisionPolicy()))

    @contextlib.contextmanager
    def no_sync():
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def full() -> dict[str, Tensor]:
        return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}

    return Trainer(model, odd.optimizer(model.parameters()), no_sync=no_sync, full=full, **along(mesh, *axes))


def hybrid(odd: Odd, model: Stack) -> Trainer:
    mesh = Mesh((2, dist.get_world_size() // 2), ("replicate", "shard"))
    return fully_sharded(odd, model, mesh, ("replicate", "shard"))


def plan_of(model: Stack, sequence: bool) -> tp.Plan:
    """Return a plan for the layers that are still like `Layer`; on shards of the sequence the rest computes as a norm
    does.
    """
    x = {"input_layouts": Shard(1)} if sequence else {}
    y = {"output_layouts": Shard(1)} if sequence else {}
    plan = {"embed": tp.RowwiseParallel(**y)}
    for name, layer in model.layers.items():
        if isinstance(getattr(layer, "up", None), nn.Linear) and isinstance(getattr(layer, "down", None), nn.Linear):
            plan |= {f"layers.{name}.up": tp.ColwiseParallel(**x), f"layers.{name}.down": tp.RowwiseParallel(**y)}
        elif sequence:
            plan[f"layers.{name}"] = tp.SequenceParallel()
    return tp.Plan(plan | ({"head": tp.ColwiseParallel(**x, output_layouts=Replicate())} if sequence else {}))


def split(sequence: bool, odd: Odd, model: Stack) -> Trainer:
    mesh = Mesh((dist.get_world_size(),), ("tp",))
    tp.parallelize(model, mesh, plan_of(model, sequence))
    return Trainer(model, odd.optimizer(model.parameters()), full=partial(tp.full_parameters, model))


def sharded_and_split(odd: Odd, model: Stack) -> Trainer:
    mesh = Mesh((dist.get_world_size() // 2, 2), ("dp", "tp"))
    tp.parallelize(model, mesh["tp"], plan_of(model, False))
    trainer = fully_sharded(odd, model, mesh["dp"])
    trainer.full = partial(tp.full_parameters, model)
    return trainer


def cut(attention: Callable[..., Tensor], odd: Odd, model: Stack) -> Trainer:
    """Return a trainer on pieces of the sequence, which only a GPT of labs.model can have."""
    cp.context_parallel(model, attention=attention)
    return data_parallel(ddp.Overlapped, odd, model)


def cut_and_split(odd: Odd, model: Stack) -> Trainer:
    mesh = Mesh((dist.get_world_size() // 2, 2), ("cp", "tp"))
    cp.context_parallel(model, mesh.get_group("cp"))
    tp.parallelize(model, mesh["tp"], plan_of(model, False))
    return Trainer(model, odd.optimizer(model.parameters()), full=partial(tp.full_parameters, model))


def with_mixture(model: Stack) -> Stack:
    """Let the embedding's output pass a mixture of experts, whose ranks exchange tokens, and return the model."""
    torch.manual_seed(1)
    each = moe.Experts({str(e): nn.Linear(WIDTH, WIDTH) for e in range(3)})
    router = moe.Router(WIDTH, 3, 2, "softmax after top-k", False)
    model.embed.mixture = moe.Mixture(router, each).to(model.embed.weight)
    model.embed.register_forward_hook(lambda embed, given, x: x + embed.mixture(x))
    return model


def split_experts(odd: Odd, model: Stack) -> Trainer:
    mesh = Mesh((1, dist.get_world_size()), moe.AXES)
    wrapped = moe.ExpertParallel(model, mesh)
    own = along(mesh, *moe.AXES)
    return Trainer(model, odd.optimizer(model.parameters()), wrapped, wrapped.sync, full=wrapped.full_parameters, **own)


def sharded_experts(odd: Odd, model: Stack) -> Trainer:
    mesh = Mesh((1, dist.get_world_size()), moe.AXES)
    dp, [experts] = mesh._flatten("dp"), moe.split_experts(model, mesh)
    fsdp.fully_shard(experts, mesh=mesh["edp"]).set_gradient_divide_factor(mesh.size())
    trainer = fully_sharded(odd, model, dp)
    own = trainer.full

    def full() -> dict[str, Tensor]:
        parts = everybodys({name: p.detach() for name, p in own().items()}, mesh.get_group("ep"))
        return dict(chain.from_iterable(part.items() for part in parts.values()))

    trainer.full = full
    return trainer


def piped(schedule: str, odd: Odd, model: Stack) -> Trainer:
    parts, ranks = model.parts(), dist.get_world_size()
    if schedule in ("gpipe", "1f1b"):
        parts = [nn.Sequential(*parts[:2]), nn.Sequential(*parts[2:])]
    pipeline = pp.Pipeline(parts, pp.SCHEDULES[schedule](ranks, odd.micro_batches * ranks), model.loss)

    def full() -> dict[str, Tensor]:
        mine = set(pipeline.parameters())
        parts = everybodys({name: p.detach() for name, p in model.named_parameters() if p in mine}, None)
        return dict(chain.from_iterable(part.items() for part in parts.values()))

    return Trainer(model, odd.optimizer(pipeline.parameters()), full=full, pipeline=pipeline)


class Stage(nn.Module):
    """A part of a Stack, whose parameters keep the names that they have in it."""

    def __init__(self, model: Stack, names: tuple[str, ...], first: bool):
        super().__init__()
        self.layers = nn.ModuleDict({name: model.layers[name] for name in names})
        self.embed, self.head, self.loss = model.embed if first else None, None if first else model.head, model.loss

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def composed(split: int, odd: Odd, model: Stack) -> Trainer:
    """Return a trainer with two stages, each sharded, or split as well."""
    mesh = Mesh((2, 1, dist.get_world_size() // 2 // split, split), parallel.AXES)
    stages = [Stage(model, ("0", "1"), True), Stage(model, ("2",), False)]
    own = along(mesh, "replicate", "shard")
    pipeline = parallel.Parallel(stages, pp.one_f_one_b(2, 2 * odd.micro_batches), mesh, plan_of(model, False))

    def full() -> dict[str, Tensor]:
        mine = {name: p.detach() for name, p in pipeline.full_parameters().items()}
        parts = everybodys(mine, mesh.get_group("pp"))
        return dict(chain.from_iterable(part.items() for part in parts.values()))

    return Trainer(model, odd.optimizer(pipeline.parameters()), full=full, pipeline=pipeline, **own)


ROWS = {
    "ddp-naive": Row(partial(data_parallel, ddp.Naive), 2, 2),
    "ddp-bucketed": Row(partial(data_parallel, ddp.Bucketed), 2, 2),
    "ddp-overlapped": Row(partial(data_parallel, ddp.Overlapped), 2, 2),
    **{f"zero-{stage}": Row(partial(zero, stage), 2, 2) for stage in (1, 2, 3)},
    "fsdp": Row(fully_sharded, 2, 2),
    "fsdp-no-reshard": Row(partial(fully_sharded, reshard_after_forward=False), 2, 2),
    "hsdp": Row(hybrid, 4, 4),
    "fsdp-bf16": Row(partial(fully_sharded, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64)), 2, 2),
    "tp": Row(partial(split, False), 2, 1),
    "tp-sp": Row(partial(split, True), 2, 1),
    "fsdp-tp": Row(sharded_and_split, 4, 2),
    "cp-ring": Row(partial(cut, cp.ring_attention), 2, 1),
    "cp-gather": Row(partial(cut, cp.gathered_attention), 2, 1),
    "cp-ulysses": Row(partial(cut, cp.ulysses_attention), 2, 1),
    "cp-tp": Row(cut_and_split, 4, 1),
    **{f"pp-{name}": Row(partial(piped, name), 2, 1) for name in ("gpipe", "1f1b", "interleaved", "zbv")},
    "pp-fsdp": Row(partial(composed, 1), 4, 2),
    "pp-fsdp-tp": Row(partial(composed, 2), 8, 2),
    "ep": Row(split_experts, 2, 2, with_mixture),
    "fsdp-ep": Row(sharded_experts, 2, 2, with_mixture),
}


# ---- outcomes --------------------------------------------------------------------------------------------


def outcome(row: str, odd: Odd) -> Mapping[str, Tensor]:
    """Return the parameters after the training."""
    trainer = ROWS[row].apply(odd, ROWS[row].build(odd.make()))
    trainer.micro_batches = odd.micro_batches
    odd.train(trainer, odd)
    return {name: p.detach().clone() for name, p in trainer.full().items()}


def outcomes(row: str, odds: list[Odd]) -> list[Mapping[str, Tensor] | str]:
    """Return the parameters of each training, or the error's text."""
    found: list[Mapping[str, Tensor] | str] = []
    gc.freeze()  # freezes earlier objects, so that the collector only looks for a training's own cycles
    for odd in odds:
        try:
            found.append(outcome(row, odd))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        gc.collect()
        dist.barrier()
    return found


@cache
def reference(odd: Odd, parts: int, micro_batches: int, build: Callable[[Stack], Stack]) -> Mapping[str, Tensor]:
    model = build(odd.make())
    odd.train(Whole(model, odd.optimizer(model.parameters()), parts=parts, micro_batches=micro_batches), odd)
    return {name: p.detach() for name, p in model.named_parameters()}


def refused(row: str, odd: Odd) -> Refused | None:
    for name in (odd.name, odd.name.removeprefix("at once, ")):
        for each in REFUSED:
            if re.fullmatch(each.names, name) and re.fullmatch(each.rows, row):
                return each
    return None


def faults(row: str, odds: list[Odd], ranks: int | None = None) -> dict[str, str]:
    """Return what is neither right nor properly refused, on some rank, by the training's name."""
    alone = [odd for odd in odds if (said := refused(row, odd)) and said.on_one_rank]
    found = together(row, [odd for odd in odds if odd not in alone], ranks or ROWS[row].ranks)
    for odd in alone:
        try:
            run(outcome, row, odd, ranks=ranks or ROWS[row].ranks, device="cpu")
            found[odd.name] = "was not refused"
        except RankError as error:
            found |= judged(row, odd, str(error))
    return found


def together(row: str, odds: list[Odd], ranks: int) -> dict[str, str]:
    """Run all of them in one job; if one of them ends it, run two halves."""
    try:
        of_ranks = run(outcomes, row, odds, ranks=ranks, device="cpu")
    except RankError as error:
        if len(odds) == 1:
            return {odds[0].name: f"ended the job: {error}"}
        half = len(odds) // 2
        return together(row, odds[:half], ranks) | together(row, odds[half:], ranks)
    found = {}
    for came in of_ranks:
        for odd, of_rank in zip(odds, came, strict=True):
            found |= judged(row, odd, of_rank, ranks)
    return found


def judged(row: str, odd: Odd, came: Mapping[str, Tensor] | str, ranks: int = 0) -> dict[str, str]:
    said = refused(row, odd)
    if isinstance(came, str):
        return {} if said and re.search(said.sentence, came) else {odd.name: f"said {came!r}"}
    if said:
        return {odd.name: "was not refused"}
    parts = ROWS[row].parts * ranks // ROWS[row].ranks
    # stages multiply the micro-batches of a pipeline
    stages = 2 if row.startswith("pp-fsdp") else ranks if row.startswith("pp-") else 1
    expected = reference(odd, parts, odd.micro_batches * stages, ROWS[row].build)
    off = {name: (came[name] - p).abs().max().item() for name, p in expected.items() if p.numel()}
    worst = max(off, key=off.get)
    bound = 1e-5 if row == "fsdp-bf16" else 1e-12
    if (odd.name, row) in UNSEEN:
        return {} if off[worst] > bound else {odd.name: "is right, and in UNSEEN"}
    return {} if off[worst] <= bound else {odd.name: f"{worst} is off by {off[worst]:.1e}"}


# ---- odd layers in the middle of the stack; the others compute `plain` -----------------------------------


def plain(layer, x):
    return x + layer.down(torch.tanh(layer.up(x)))


def again(layer, x, reentrant=False):
    return checkpoint(plain, layer, x, use_reentrant=reentrant)


def once_without_gradient(layer, x):
    with torch.no_grad():
        target = plain(layer, x)
    return plain(layer, x) + 0.1 * target


def force(layer, x, **how):
    """Return the gradient of an energy, as a model of atoms does."""
    with torch.enable_grad():
        inner = x if how and x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(torch.tanh(layer.up(inner)).sum(), inner, **how)[0]


def normalises_in_place(layer, x):
    with torch.no_grad():
        layer.up.weight.div_(layer.up.weight.norm())
    return plain(layer, x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


LAYERS = {
    "plain": plain,
    "twice": lambda layer, x: plain(layer, plain(layer, x)),
    "a matrix twice": lambda layer, x: layer.down(torch.tanh(layer.up(plain(layer, x)))),
    "half of it used": lambda layer, x: x + torch.tanh(layer.up(x)).mean(-1, keepdim=True),
    "never used": lambda layer, x: x * 1.5,
    "what it was given": lambda layer, x: x,
    "in place": lambda layer, x: layer.down(layer.up(x).tanh_()).add_(x),
    "in place on its input": lambda layer, x: x.add_(layer.down(torch.tanh(layer.up(x.clone())))),
    "a view": lambda layer, x: plain(layer, x)[:, :, :],
    "transposed": lambda layer, x: plain(layer, x.transpose(0, 1)).transpose(0, 1),
    "checkpointed": again,
    "checkpointed twice": lambda layer, x: again(layer, again(layer, x)),
    "a checkpoint in a checkpoint": lambda layer, x: checkpoint(again, layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: again(layer, x, True),
    "reentrant, half of it": lambda layer, x: (
        x + layer.down(checkpoint(lambda x: torch.tanh(layer.up(x)), x, use_reentrant=True))
    ),
    "reentrant, twice": lambda layer, x: again(layer, again(layer, x, True), True),
    "reentrant, in a reentrant one": lambda layer, x: checkpoint(again, layer, x, True, use_reentrant=True),
    "reentrant, and used outside, too": lambda layer, x: plain(layer, again(layer, x, True)),
    "detached in the middle": lambda layer, x: x + layer.down(torch.tanh(layer.up(x)).detach()),
    "once without gradients": once_without_gradient,
    "a force": lambda layer, x: plain(layer, x) + 0.1 * force(layer, x),
    "a force that is trained": lambda layer, x: plain(layer, x) + 0.1 * force(layer, x, create_graph=True),
    "a function of one's own": lambda layer, x: x + layer.down(torch.tanh(Scaled.apply(x, layer.up.weight))),
    "its weight by hand": lambda layer, x: (
        x + functional.linear(torch.tanh(layer.up(x)), layer.down.weight, layer.down.bias)
    ),
    "a weight of weights": lambda layer, x: (
        x + functional.linear(torch.tanh(layer.up(x)), 2 * layer.down.weight + layer.up.weight.t())
    ),
    "a weight normalised in place": normalises_in_place,
}


class Normed(Layer):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm):
        super().__init__()
        self.norm = norm(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x.flatten(0, 1)).view_as(x))


class Holds(nn.Module):
    """A module with a parameter of its own, which scales x; `.double()` leaves it as it is."""

    def __init__(self, p: Tensor, trained: bool = True):
        super().__init__()
        self.p = nn.Parameter(p.clone(), trained)

    def forward(self, x):
        return x * (1 + 0.1 * (self.p * self.p.conj()).real.double().sum())

    def _apply(self, fn, recurse=True):
        return self


class InLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.ps = nn.ParameterList([torch.linspace(-1, 1, n) for n in (WIDTH, 1, WIDTH)])
        self.named = nn.ParameterDict({"shift": torch.zeros(WIDTH)})

    def forward(self, x):
        for p in self.ps:
            x = x + p * torch.tanh(x)
        return x + self.named["shift"]


class Inside(nn.Module):
    """A module that returns x plus the output of one of PyTorch's modules."""

    def __init__(self, make: Callable[[], nn.Module], use: Callable[..., Tensor]):
        super().__init__()
        self.inner, self.use = make(), use

    def forward(self, x):
        return x + self.use(self.inner, x)


def convolutions():
    both = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 1))
    return both.to(memory_format=torch.channels_last)


def table(**how):
    def use(inner, x):
        return inner((x.detach().sum(-1).abs() * 10).long() % 7)

    return partial(Inside, partial(nn.Embedding, 7, WIDTH, **how), use)


def changed_layer(change):
    def make():
        layer = Layer()
        change(layer)
        return layer

    return make


def transposed_weight(layer):
    layer.up.weight = nn.Parameter(torch.randn(WIDTH, HIDDEN).t())


MODULES = {
    "a norm": Normed,
    "a batch norm": partial(Normed, nn.BatchNorm1d),
    "no parameters": nn.Tanh,
    "lists of parameters": InLists,
    "convolutions, channels last": partial(Inside, convolutions, lambda inner, x: inner(x[:, None])[:, 0]),
    "a GRU": partial(Inside, partial(nn.GRU, WIDTH, WIDTH, batch_first=True), lambda inner, x: inner(x)[0]),
    "attention of PyTorch's": partial(
        Inside, partial(nn.MultiheadAttention, WIDTH, 2, batch_first=True), lambda inner, x: inner(x, x, x)[0]
    ),
    "a table": table(),
    "a table of bounded norms": table(max_norm=0.1),
    "sparse gradients": table(sparse=True),
    "a number": partial(Holds, torch.tensor(0.5, dtype=torch.float64)),
    "one element": partial(Holds, torch.ones(1, dtype=torch.float64)),
    "an empty parameter": partial(Holds, torch.ones(0, 3, dtype=torch.float64)),
    "a complex parameter": partial(Holds, torch.ones(3, dtype=torch.complex128)),
    "whole numbers": partial(Holds, torch.arange(3), trained=False),
    "a lazy layer": partial(nn.LazyLinear, WIDTH),
    "a weight that is normed": changed_layer(lambda layer: parametrizations.weight_norm(layer.up)),
    "a transposed weight": changed_layer(transposed_weight),
}


# ---- odd uses of the layers ------------------------------------------------------------------------------


@dataclass
class Output:
    hidden: Tensor
    more: Any = None


class InADict(Layer):
    def forward(self, inputs, *, scale=1.0):
        return Output(super().forward(inputs["x"][0]) * scale, {"length": 3})


def chain_of(model, x, *numbers, call=lambda layer, x: layer(x)):
    for number in numbers:
        x = call(model.layers[str(number)], x)
    return x


def if_used(model, x, used):
    return chain_of(model, x, 0, 1, 2) if used else chain_of(model, x, 0, 2)


def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def nested(model, x):
    x = model.layers["1"]({"x": [model.layers["0"](x), None]}, scale=0.5)
    return model.layers["2"](x.hidden)


def beside(model, x):
    model.layers["1"](x)
    return chain_of(model, x, 0, 2)


def weight_of_another(model, x):
    layer = model.layers["0"]
    return Stack.body(model, x) + functional.linear(x, layer.down.weight @ layer.up.weight)


BODIES = {
    "by keyword": lambda model, x: chain_of(model, x, 0, 1, 2, call=lambda layer, x: layer(x=x)),
    "the last layer first": lambda model, x: chain_of(model, x, 2, 1, 0),
    "all layers twice": lambda model, x: chain_of(model, x, 0, 1, 2, 0, 1, 2),
    "one layer again at the end": lambda model, x: chain_of(model, x, 0, 1, 2, 1),
    "in even steps": lambda model, x: if_used(model, x, model.at[0] % 2 == 0),
    "another order in each step": lambda model, x: chain_of(model, x, *((model.at[0] + n) % 3 for n in range(3))),
    "on rank 0 alone": lambda model, x: if_used(model, x, model.at[1] == 0),
    "another layer on each rank": lambda model, x: chain_of(model, x, 0, 1 + model.at[1] % 2),
    "a weight of another layer": weight_of_another,
    "checkpointed layers": lambda model, x: chain_of(
        model, x, 0, 1, 2, call=lambda layer, x: checkpoint(layer, x, use_reentrant=False)
    ),
    "reentrant layers": lambda model, x: chain_of(model, x, 0, 1, 2, call=reentrant),
    "reentrant layers, one twice": lambda model, x: chain_of(model, x, 0, 1, 1, 2, call=reentrant),
    "all in a reentrant checkpoint": lambda model, x: checkpoint(lambda x: Stack.body(model, x), x, use_reentrant=True),
    "two branches": lambda model, x: model.layers["2"](model.layers["0"](x) + model.layers["1"](x)),
    "detached between layers": lambda model, x: chain_of(model, chain_of(model, x, 0).detach(), 1, 2),
    "a layer whose output is not used": beside,
}


def experts(model, x):
    return Stack.body(model, x) + (model.a if model.at[1] % 2 == 0 else model.b)


def experts_before(model, x):
    """Use a group last at a different moment on each rank, where its gradient then arrives."""
    return Stack.body(model, x + model.a if model.at[1] % 2 == 0 else x) + model.b


def with_experts(model):
    model.a, model.b = (nn.Parameter(torch.ones(WIDTH).double()) for _ in range(2))


def with_experts_alone(model):
    with_experts(model)
    model.embed.requires_grad_(False)


def with_own(model):
    model.own = nn.ParameterList([nn.Parameter(torch.ones(WIDTH).double())])


def other_experts(model, x):
    """Use other experts of one group on each rank and in each step, of other sizes, and once none."""
    number = (model.at[0] + model.at[1]) % 3
    return Stack.body(model, x if number == 2 else x + model.experts[number](x)[..., :WIDTH])


def with_other_experts(model):
    model.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH + 2)]).double()


class Penalised(Stack):
    """A model whose loss contains the norm of its own gradient with respect to x, as a WGAN's does."""

    parts = None

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        loss = self.loss(self.head(self.body(x)), targets)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


# ---- odd changes to the model beforehand -----------------------------------------------------------------


def tie(model):
    model.head.weight = model.embed.weight


def tie_layers(model):
    model.layers["2"].up.weight = model.layers["0"].up.weight


def one_module_twice(model):
    model.layers["2"] = model.layers["0"]


def views(model):
    whole = torch.arange(24.0).view(4, 6).double()
    model.register_buffer("piece", whole[:, :2])
    model.register_buffer("repeated", torch.ones(1, dtype=torch.float64).expand(5))


def buffers(model):
    for number, buffer in enumerate((torch.tensor(True), torch.zeros(0), torch.ones(3, dtype=torch.complex64), None)):
        model.register_buffer(f"buffer{number}", buffer, persistent=number > 1)


CHANGES = {
    "tied": tie,
    "a weight of two layers": tie_layers,
    "one module twice": one_module_twice,
    "a hook on a weight": lambda model: model.layers["1"].up.weight.register_hook(lambda gradient: 2 * gradient),
    "a hook that computes with a weight": lambda model: model.layers["1"].register_forward_pre_hook(
        lambda layer, given: given[0] + layer.up.weight.sum()
    ),
    "a hook on an output": lambda model: model.layers["1"].register_forward_hook(lambda *given: 2 * given[2]),
    "a hook on an output inside": lambda model: model.layers["1"].down.register_forward_hook(
        lambda *given: 2 * given[2]
    ),
    "a hook on a module's gradients": lambda model: model.layers["1"].register_full_backward_hook(
        lambda module, inputs, outputs: tuple(2 * x for x in inputs)
    ),
    "buffers that are views": views,
    "buffers of all kinds": buffers,
}


# ---- odd ways to train -----------------------------------------------------------------------------------


def going_back(back: Back) -> Callable[[Trainer, Odd], None]:
    def train(t, odd):
        for number in range(STEPS):
            t.backward(number, back)
            t.update()

    return train


def frozen_before_it(t, x, y, share=1.0):
    loss = t.call(x, y) * share
    t.model.layers["1"].requires_grad_(False)
    loss.backward()
    t.model.layers["1"].requires_grad_(True)


def two_losses(t, x, y, share=1.0):
    ((t.call(x, y) + t.call(x.flip(1), y)) * share / 2).backward()


def twice_through_one_graph(t, x, y, share=1.0):
    loss = t.call(x, y) * share / 2
    loss.backward(retain_graph=True)
    loss.backward()


def after_one_in_vain(t, x, y, share=1.0):
    t.call(x.flip(1), y)
    backward(t, x, y, share)


def after_one_that_failed(t, x, y, share=1.0):
    with contextlib.suppress(IndexError):
        t.call(x + WORDS, y)
    backward(t, x, y, share)


def evaluated(how):
    def back(t, x, y, share=1.0):
        with how():
            t.call(x, y)
        backward(t, x, y, share)

    return back


class Fails(Exception):
    pass


def fail(gradient):
    raise Fails


def fail_in_the_last(t, layer, given, output):
    """Let the backward of the last micro-batch fail."""
    if t.model.at[2] + 1 == t.micro_batches:
        output.register_hook(fail)


def after_a_backward_that_failed(t, odd):
    for number in range(STEPS):
        handle = t.model.layers["1"].register_forward_hook(partial(fail_in_the_last, t))
        with contextlib.suppress(Fails):
            t.backward(number)
        handle.remove()
        t.optimizer.zero_grad()
        t.step(number)


def averaged(copy):
    """Train with an exponential moving average of the parameters."""

    def train(t, odd):
        averages = copy(t.model)
        for number in range(STEPS):
            t.step(number)
            with torch.no_grad():
                for mean, p in zip(averages, t.model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)

    return train


def gradients_kept_as_zeros(t, odd):
    for number in range(STEPS):
        t.backward(number)
        t.finish()
        t.optimizer.step()
        for p in t.model.parameters():
            if p.grad is not None:
                p.grad.zero_()


def every_other_time(t, odd):
    for number in range(0, STEPS, 2):
        t.backward(number, last=False)
        t.backward(number + 1)
        t.update()


def with_a_schedule(t, odd):
    schedule = torch.optim.lr_scheduler.StepLR(getattr(t.optimizer, "optimizer", t.optimizer), 1, 0.5)
    for number in range(STEPS):
        t.step(number)
        schedule.step()


def clipped_by_torchs(t, odd):
    for number in range(STEPS):
        t.backward(number)
        t.finish()
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.optimizer.step()
        t.optimizer.zero_grad()


def saved_and_loaded(t, odd):
    for number in range(STEPS):
        t.step(number)
        t.model.load_state_dict(t.model.state_dict())


WAYS = {
    "frozen between forward and backward": going_back(frozen_before_it),
    "two losses": going_back(two_losses),
    "two backwards through one graph": going_back(twice_through_one_graph),
    "a forward in vain": going_back(after_one_in_vain),
    "a forward that failed": going_back(after_one_that_failed),
    "a backward that failed": after_a_backward_that_failed,
    "evaluated without gradients": going_back(evaluated(torch.no_grad)),
    "evaluated in inference mode": going_back(evaluated(torch.inference_mode)),
    "an average by deepcopy": averaged(lambda model: list(deepcopy(model).parameters())),
    "an average of parameters": averaged(lambda model: [p.detach().clone() for p in model.parameters()]),
    "gradients kept as zeros": gradients_kept_as_zeros,
    "a step every other time": every_other_time,
    "a schedule of the rate": with_a_schedule,
    "clipped by PyTorch's norm": clipped_by_torchs,
    "saved and loaded": saved_and_loaded,
}


# ---- odd choices of parameters and optimizers ------------------------------------------------------------

FROZEN = {
    "a layer": "layers.1",
    "the first layer": "embed",
    "a bias": "layers.1.up.bias",
    "a weight": "layers.1.up.weight",
    "the head": "head",
    "half of a layer": "layers.2.down",
}


def frozen() -> list[Odd]:
    found = []
    for what, path in FROZEN.items():
        frozen, later, anew = partial(Stack, change=trained(path, False)), trained(path, False), trained(path, True)
        found += [
            Odd(f"{what} frozen", frozen),
            Odd(f"{what} unfrozen later", frozen, before={2: anew}),
            Odd(f"{what} frozen for a while", before={1: later, 2: anew}),
        ]
    return found


def only_the_head(model):
    model.requires_grad_(False)
    model.head.requires_grad_(True)


def in_one_group(make):
    model = make()
    model.one_group = True
    return model


def turn(number, model):
    """Train in turns, as a generator and a critic are trained."""
    model.layers["1"].requires_grad_(number % 2 == 0)
    model.layers["2"].requires_grad_(number % 2 == 1)


def data_replaced(model):
    for p in model.parameters():
        p.data = p.data * 0.5


def a_layer_beside(model):
    model.layers["1"].beside = nn.Linear(WIDTH, WIDTH).double()


def data_changed(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def a_new_parameter(model):
    model.layers["1"].up.weight = nn.Parameter(torch.ones(HIDDEN, WIDTH).double())


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "Adafactor": torch.optim.Adafactor,
}

ODD = [
    *(Odd(name, middle(forward)) for name, forward in LAYERS.items()),
    *(Odd(name, partial(Stack, make)) for name, make in MODULES.items()),
    *(Odd(name, bodied(body)) for name, body in BODIES.items()),
    Odd("a dict and a dataclass", bodied(nested, middle=InADict)),
    Odd("experts in one group", bodied(experts, change=with_experts)),
    Odd("experts before the layers", bodied(experts_before, change=with_experts)),
    Odd("experts before the layers, the first frozen", bodied(experts_before, change=with_experts_alone)),
    Odd("a list of the model's own", bodied(lambda model, x: Stack.body(model, x * model.own[0]), change=with_own)),
    Odd("other experts in each step", bodied(other_experts, change=with_other_experts)),
    Odd("a gradient penalty", Penalised),
    *(Odd(name, partial(Stack, change=change)) for name, change in CHANGES.items()),
    *(Odd(name, train=train) for name, train in WAYS.items()),
    *frozen(),
    Odd(
        "unfrozen from the top",
        partial(Stack, change=only_the_head),
        before={number: trained(f"layers.{3 - number}", True) for number in range(1, STEPS)},
    ),
    Odd("trained by turns", before={number: partial(turn, number) for number in range(STEPS)}),
    Odd("micro-batches", micro_batches=3),
    Odd("micro-batches, a layer frozen later", before={1: trained("layers.1", False)}, micro_batches=3),
    Odd("not in the last micro-batch", bodied(lambda model, x: if_used(model, x, model.at[2] < 2)), micro_batches=3),
    Odd("in the last micro-batch alone", bodied(lambda model, x: if_used(model, x, model.at[2] == 2)), micro_batches=3),
    Odd("micro-batches, reentrant twice", middle(LAYERS["reentrant, twice"]), micro_batches=3),
    Odd("data replaced", before={2: data_replaced}),
    Odd("data changed in place", before={2: data_changed}),
    Odd("a new parameter later", before={2: a_new_parameter}),
    Odd("a new layer later", bodied(Stack.body), before={2: a_layer_beside}),
    *(Odd(f"stepped by {name}", optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()),
]

ZERO, FSDP = "zero-.", ".*fsdp.*|hsdp"  # patterns of row names
REFUSED = [
    # another model may mix tokens anywhere
    Refused(".*", "cp-.*", "is not a GPT of labs.model with its own attention"),
    # one stage fails in a step, while the others wait for its output
    Refused("a weight normalised in place", "pp-fsdp.*", "was written to in a forward", on_one_rank=True),
    Refused("a table of bounded norms", "pp-fsdp.*", "was written to in a forward", on_one_rank=True),
    Refused("a new parameter later", "pp-fsdp.*", "was sharded as a DTensor of .* stands there now", on_one_rank=True),
    Refused("half of it used|its weight by hand|a weight of weights", "pp-fsdp-tp", "differs on ranks", True),
    Refused("a function of one's own", "pp-fsdp-tp", "an operation takes them for all", on_one_rank=True),
    Refused("a hook that computes with a weight", "pp-fsdp-tp", "must be whole there", on_one_rank=True),
    # parameters that were split with another stage
    Refused("tied", "pp-fsdp-tp", "is tied to a parameter of an earlier part, which was split differently"),
    Refused("one module twice", "pp-fsdp-tp", "has been split by an earlier"),
    # trainings that no data parallelism can do
    Refused("a lazy layer", "ddp.*|zero.*|.*fsdp.*|hsdp|tp.*|ep", "is lazy"),
    Refused("sparse gradients", "ddp.*|zero.*|.*fsdp.*|hsdp|ep", "makes sparse gradients"),
    Refused("a table of bounded norms", "ddp.*|zero.*|.*ep", "has a max_norm, and would shorten the rows"),
    # decisions made when the model was wrapped, cut or split
    Refused(".*unfrozen.*|a new parameter later", "ddp.*", "was unfrozen, or added, after the model was wrapped"),
    Refused("a new layer later", "ddp.*", "was unfrozen, or added, after the model was wrapped"),
    Refused("a new layer later", f"{ZERO}|{FSDP}", "was added after the model was sharded"),
    Refused("a new parameter later", ZERO, "was replaced after its model was sharded"),
    Refused("a new parameter later", FSDP, "was sharded as a DTensor of .* stands there now"),
    Refused("a new parameter later", "tp.*", "was replaced by one of shape"),
    Refused("data replaced", ZERO, "was given other memory"),
    # one gradient per parameter and step
    Refused(
        "reentrant,? .*(twice|outside).*|reentrant layers, one twice|two backwards.*", "ddp-overlapped", "a second gr"
    ),
    Refused("micro-batches, reentrant twice|a backward that failed", "ddp-overlapped", "a second gradient of one"),
    # a gradient for each parameter, on every rank
    Refused(
        "half of it used|never used|what it was given|detached.*|a function of one's own|a weight of weights|in even "
        "steps|another layer on.*|a layer whose output.*|experts in one.*|other experts.*|frozen between.*|a new la.*",
        "ep",
        "has no gradient for .*: call loss.backward",
    ),
    Refused("on rank 0 alone|experts before.*", "ep", "has no gradient for|do not agree", on_one_rank=True),
    Refused("clipped by PyTorch's norm", "ep", "differs on ranks . and .: call sync.*clip with clip_gradients"),
    Refused("an average by deepcopy", "ep", "cannot pickle"),
    # a layer is one vector
    Refused(
        "(a bias|a weight|half of a layer) (un)?frozen (later|for a while)", "zero-[12]", "lies in one vector with"
    ),
    Refused("at once, .*frozen (later|for a while)", ZERO, "lies in one vector with the others|is dropped: rank"),
    Refused("half of a layer (un)?frozen (later|for a while)", "zero-3", "lies in one vector with the others"),
    Refused("(a bias|a weight) (un)?frozen (later|for a while)", "zero-3", "is dropped: rank . of . holds a shard"),
    Refused(".*unfrozen.*", ZERO, "was unfrozen after it was sharded, and no optimizer has it"),
    Refused("a weight normalised in place", ZERO, "modified inplace"),
    Refused("a weight of another layer", "zero-3", "is dropped: rank . of . holds a shard of its layer"),
    # a gradient that is never whole
    Refused("a hook on a weight", ZERO, "has a hook, which would not be called"),
    Refused("stepped by Adafactor", ZERO, "looks at matrices or norms"),
    Refused("stepped by Adafactor", "(?!.*tp).*fsdp.*|hsdp", "has no rule"),
    Refused("clipped by PyTorch's norm", FSDP, "has no rule"),
    # parameters that come and go
    Refused("a gradient penalty", f"zero-3|{FSDP}", "create_graph=True"),
    Refused("an average by deepcopy", ZERO, "cannot be copied or pickled"),
    Refused("an average by deepcopy", FSDP, "copy.deepcopy of a FSDP"),
    Refused("a weight normalised in place", FSDP, "was written to in a forward"),
    Refused("a table of bounded norms", FSDP, "was written to in a forward"),
    Refused("a number", FSDP, "has no dim to cut along"),
    Refused("a transposed weight", "(?!.*tp).*fsdp.*|hsdp", "has the strides"),
    Refused(
        "a weight of another layer", "fsdp|fsdp-no-reshard|fsdp-bf16|hsdp|fsdp-tp|fsdp-ep", "of a DTensor and a plain"
    ),
    Refused("a weight of two layers", "(?!pp).*fsdp.*|hsdp", "is shared with a module that was sharded before"),
    Refused("one module twice", "(?!pp).*fsdp.*|hsdp", "fully_shard twice"),
    # ranks that differ
    Refused("on rank 0 alone|other experts in each step", "zero-1", "ranks use different layers"),
    Refused("another layer on each rank", "zero-[12]", "ranks use different layers"),
    Refused("other experts in each step", "zero-[23]", "do not agree|use different layers", on_one_rank=True),
    Refused("on rank 0 alone", f"zero-[23]|{FSDP}", "the ranks do not agree on collective", on_one_rank=True),
    Refused("another layer on each rank", f"zero-3|{FSDP}", "ranks use different layers"),
    # dtypes
    Refused("a batch norm", "fsdp-bf16", "expected scalar type Float but found Double"),
    Refused("a complex parameter|whole numbers", "fsdp-bf16", "without a param_dtype"),
    # a rank's part of a matrix
    Refused("a function of one's own", "tp.*|fsdp-tp", "an operation takes them for all"),
    Refused("its weight by hand|a weight of weights|a hook that computes.*", "tp|fsdp-tp", "must be whole there"),
    Refused("a weight of another layer", "tp", "the loss differs"),
    Refused("a weight of another layer", "tp-sp", "was used outside of its module"),
    Refused("a hook that computes with a weight", "tp-sp", "is not what the whole model has there"),
    Refused("a weight normalised in place", "tp.*", "modified by an inplace operation"),
    Refused("a weight that is normed", ".*tp.*", "ColwiseParallel fits Linear"),
    Refused("tied", "tp|fsdp-tp", "the plan splits them differently"),
    Refused("stepped by Adafactor", ".*tp.*", "looks at a whole matrix or at norms"),
    Refused("clipped by PyTorch's norm", "tp.*", "clip with labs.tp.clip_gradients"),
    Refused("clipped by PyTorch's norm", "zero-[123]", "where it would differ from rank to rank"),
    Refused("half of it used", "tp|fsdp-tp", "must be whole there"),
    # a rank's part of the sequence
    Refused("half of it used|its weight by hand|a weight of weights", "tp-sp", "must match the size of tensor"),
    Refused(
        "a norm|a batch norm|experts (in one|before).*|other experts.*|a list of the model's own",
        "tp-sp",
        "used inside a split layer, or on shards|an operation takes them for all",
    ),
    Refused("lists of parameters|convolutions.*|a GRU|attention.*|a table.*|sparse.*", "tp-sp", "has modules in it"),
    Refused("a gradient penalty", "tp-sp", "or its own tokens"),
    # several micro-batches at once
    Refused("a weight normalised in place", "pp-.*", "modified by an inplace operation", on_one_rank=True),
    Refused("a new parameter later", "pp-.*", "that no stage of this rank had when the Pipeline", on_one_rank=True),
]
# Faults that nobody can see, as the docstring of labs.zero says: an ordinary function of ordinary tensors, each a
# rank's part.
UNSEEN = {("clipped by PyTorch's norm", row) for row in ("zero-1", "zero-2")}


# The same trainings, with all parameters gathered, and reduced, at once.
AT_ONCE = "twice|(?!one module).* twice|reentrant.*|a checkpoint.*|another order.*|.*(frozen later|for a while)"
AT_ONCE += "|not in the last micro-batch|experts.*"
ODD += [
    replace(odd, name=f"at once, {odd.name}", make=partial(in_one_group, odd.make))
    for odd in ODD
    if re.fullmatch(AT_ONCE, odd.name)
]


def takes(row: str, odd: Odd) -> bool:
    """Return whether a row takes a training.

    A pipeline drives itself, and needs a model that can be cut into stages.
    """
    if odd.name.startswith("at once") and not re.fullmatch(f"{ZERO}|fsdp|hsdp", row):
        return False
    return not row.startswith("pp-") or (can_be_cut(odd) and odd.name not in WAYS)


@cache
def can_be_cut(odd: Odd) -> bool:
    return odd.make().parts is not None


def main(words: str = "", rows: str = "") -> None:
    for row in ROWS:
        if row.startswith(rows):
            found = faults(row, [odd for odd in ODD if words in odd.name and takes(row, odd)])
            print(f"{row}: {len(found)} faults")
            for name, what in found.items():
                print(f"    {name:40} {what:.300}")


if __name__ == "__main__":
    main(*sys.argv[1:])
