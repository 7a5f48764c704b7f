"""The executor, which runs any schedule.  PyTorch calls its executors schedules, too: Schedule1F1B, for example.

    pipeline = Pipeline(cut(model, 4), one_f_one_b(4, 8), model.loss)
    optimizer = AdamW(pipeline.parameters())
    losses = pipeline.forward_backward(x, y)
    optimizer.step()

The rank that has an instruction's stage carries out the instruction:

    F    takes the output of the stage before, or a micro-batch of x in the first stage; computes the stage's output and
         puts it, or the loss in the last stage; keeps both ends of the graph between them
    B    takes the gradient of its output, goes back through the graph, and puts the gradient of its input
    I    does the same as B, but leaves the gradients of the matrices for later (labs.pp.split_backward)
    W    computes the gradients of the matrices

A tensor that a stage puts for a stage on another rank is sent as a message (labs.pp.messages); a tensor for another
stage of the same rank is not.

The last stage divides each micro-batch's loss by the number of micro-batches, and nothing else is divided.  So the
gradients of the micro-batches add up to those of the batch's mean loss, in `.grad`, as in any backward.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from labs.clip import global_norm, shorten
from labs.hooks import weakly
from labs.optimizer_probe import require_no_scaler
from labs.pp.batches import GivenBatches, require_weighed
from labs.pp.checker import microbatches_of, ranks_of, validate
from labs.pp.fitting import require_fitting, require_known, require_same_lists, require_same_stages
from labs.pp.instructions import B, F, I, Instruction, Lists, W
from labs.pp.messages import Mail, Receive, Send, Sent, Step, plan
from labs.pp.split_backward import Deferred
from labs.pp.stages import Initial, Stage, materialise
from labs.pp.tied import Tied


class Pipeline:
    """One rank's part of a pipeline: its stages, and the instructions of a schedule that it runs.

    stages: all stages, the same on every rank, which keeps only its own; each module takes and returns one tensor.
    lists: a schedule; list r is for rank r of the group.
    loss: a function (output of the last stage, targets) -> the mean loss of a micro-batch (0-dim).
    group: the ranks of the pipeline; all ranks by default.
    initial: a function (name, shape) -> the initial numbers of a parameter that is on the meta device, so that no rank
        ever holds the whole model.

    Raises ValueError, on every rank, if stages, lists and group do not fit together, and WrongSchedule for lists that
    cannot be run.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        lists: Lists,
        loss: Callable[[Tensor, Tensor], Tensor],
        group: ProcessGroup | None = None,
        initial: Initial | None = None,
    ):
        validate(lists)
        require_same_lists(lists, group)
        require_same_stages(stages, group)
        require_fitting(stages, lists, group)
        self.group, self.ranks = group, ranks_of(lists)
        self.stages = {s: stage for s, stage in enumerate(stages) if self.ranks[s] == dist.get_rank(group)}
        self.loss, self.last = loss, len(stages) - 1
        self.first_trained = next((s for s, stage in enumerate(stages) if is_trained(stage)), len(stages))
        self.tied = Tied(stages, self.ranks, group)
        materialise(stages, self.stages.values(), initial)
        # The full parameters that FSDP gathers are not among these: their gradients are reduced before a W runs.
        self.may_wait = set(self.parameters())
        self.obey(lists)
        self.alive: dict[tuple[int, int], tuple[Tensor, GradientEdge | None, Deferred | None]] = {}
        self.later: dict[tuple[int, int], Deferred] = {}
        self.xs = self.ys = ()  # the micro-batches of a step
        self.losses: dict[int, Tensor] = {}  # the losses of a step, by micro-batch
        self.under_way = False
        if len(lists) > 1:
            finalize(self, register_optimizer_step_pre_hook(weakly(self.before_optimizer)).remove)

    def before_optimizer(self, optimizer: Optimizer, *others: Any) -> None:
        if any(p in self.may_wait for group in optimizer.param_groups for p in group["params"]):
            require_no_scaler(optimizer)

    def obey(self, lists: Lists) -> None:
        mine = dist.get_rank(self.group)
        self.microbatches, self.plan = microbatches_of(lists), plan(lists)[mine]
        self.split = {(x.stage, x.microbatch) for x in lists[mine] if isinstance(x, I)}
        # Ranks must agree on sizes and shapes again.
        self.batches = GivenBatches(self.microbatches, (self.ranks[0], self.ranks[self.last]), self.group)
        self.mail = Mail(self.group, device_of(self.parameters()))

    def follow(self, lists: Lists) -> None:
        """Run another schedule from now on, with more or fewer micro-batches; every stage must stay on its rank."""
        validate(lists)
        require_same_lists(lists, self.group)
        if (ranks := ranks_of(lists)) != self.ranks:
            theirs, ours = ([of[stage] for stage in sorted(of)] for of in (ranks, self.ranks))
            raise ValueError(
                f"the schedule has its stages on ranks {theirs}, and here they are on {ours}: make a new Pipeline"
            )
        self.obey(lists)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's stages; a tied parameter is on every rank that has a stage with it."""
        return list(dict.fromkeys(p for stage in self.stages.values() for p in stage.parameters()))

    def forward_backward(
        self, x: Tensor | None, y: Tensor | None, over: float | None = None, **others: Any
    ) -> list[Tensor]:
        """Run the schedule; return each micro-batch's loss (0-dim) on the last stage's rank, an empty list elsewhere.

        x, y: [batch, ...], inputs and targets.  The first stage's rank reads x, the last one's y; others may pass None.
            If all ranks pass x and y, the first step raises an error if their batches differ (labs.pp.batches).
        over: if targets are ignored, and the pipelines of several ranks read parts of one batch: the number of targets
            that count in the whole batch, divided by the number of parts.
        """
        if others:
            raise TypeError(f"{', '.join(others)}: stages get x alone, so make it a part of x, or of y for the loss")
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "forward_backward was called under torch.no_grad(), where nothing has a gradient: call evaluate there"
            )
        self.take(x, y, over)
        self.tied.begin()
        self.run(self.plan)
        self.tied.add_up()
        return [self.losses[m] for m in sorted(self.losses)]

    @torch.no_grad()
    def evaluate(self, x: Tensor | None, y: Tensor | None = None, over: float | None = None) -> list[Tensor]:
        """Run the schedule's forwards alone, in evaluation mode; return losses as forward_backward does.

        If the last stage's rank passes no y, that rank returns the stage's output for each micro-batch instead of
        losses.
        """
        modes = {module: module.training for stage in self.stages.values() for module in stage.modules()}
        kept = self.batches, self.mail  # a batch may have another size in evaluation
        self.batches, self.mail = self.batches.anew(needs_y=False), Mail(self.group, self.mail.device)
        try:
            self.take(x, y, over)
            for module in modes:
                module.training = False
            self.run([step for step in self.plan if isinstance(getattr(step, "message", step), F)])
        finally:
            self.batches, self.mail = kept
            for module, mode in modes.items():
                module.training = mode
        return [self.losses[m] for m in sorted(self.losses)]

    def take(self, x: Tensor | None, y: Tensor | None, over: float | None) -> None:
        if self.under_way:
            raise RuntimeError(
                "the last forward_backward failed, and messages of it may be in flight: make a new Pipeline"
            )

        def look() -> None:
            for stage in self.stages.values():
                if isinstance(stage, Stage):
                    stage.require_current()
            total = require_weighed(y, self.loss, over, self.group)
            self.weighed = {} if total is None else {"over": total / self.microbatches}

        self.xs, self.ys = self.batches.cut(x, y, look)

    def run(self, plan: list[Step]) -> None:
        self.under_way, self.losses = True, {}
        for step in plan:
            match step:
                case Send():
                    self.mail.send(step)
                case Receive():
                    self.mail.receive(step)
                case Sent():
                    self.mail.sent(step)
                case _:
                    self.compute(step)
        self.mail.end()
        self.under_way, self.xs, self.ys = False, (), ()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip by the norm of the whole model, in which a tied gradient counts once; return the norm before (0-dim).

        Every rank must call this method after its last forward_backward.  nn.utils.clip_grad_norm_ would use the norm
        of this rank's stages alone.  Arguments are those of `labs.clip.clip_gradients`.
        """
        norm = global_norm([p for p in self.parameters() if self.tied.is_counted(p)], (self.group,))
        shorten(self.parameters(), norm, max_norm)
        return norm

    # ---- instructions ------------------------------------------------------------------------------------

    def compute(self, x: Instruction) -> None:
        does = DOES[type(x)]
        try:
            getattr(self, does)(x.stage, x.microbatch)
        except Exception as error:
            error.add_note(f"in {x!r}, the {does} of micro-batch {x.microbatch} in stage {x.stage}")
            raise

    def forward(self, s: int, m: int) -> None:
        x = self.xs[m] if s == 0 else self.mail.take(F(s - 1, m)).requires_grad_()
        with Deferred(self.may_wait) if (s, m) in self.split else nullcontext() as later:
            y = self.stages[s](Given.apply(x) if s > 0 else x)
            if s == self.last:
                loss = self.loss(y, self.ys[m], **self.weighed) if self.ys else y
                self.losses[m], y = loss.detach(), loss / self.microbatches
        if s < self.last:
            self.mail.put(F(s, m), y)
        if not torch.is_grad_enabled():  # evaluation
            return
        if s == self.last and y.numel() != 1:
            raise ValueError(f"the loss has shape {tuple(y.shape)}: let it return one number, the micro-batch's mean")
        if m == 0 and not any(hasattr(p, "to_local") for p in (*self.may_wait, *self.parameters())):
            require_known(F(s, m), y, self.may_wait)
        # All stages before it may have been frozen since.
        trained = s >= self.first_trained and (x.requires_grad or is_trained(self.stages[s]))
        if trained and not y.requires_grad:
            raise self.cut_off(s, m, "requires no gradient, though parameters before it are to be trained")
        # Keep only y's edge of the graph: the memory of y can be freed when it has been sent.
        self.alive[s, m] = x, get_gradient_edge(y) if y.requires_grad else None, later

    def backward(self, s: int, m: int) -> None:
        x, edge, later = self.alive.pop((s, m))
        gradient = None if s == self.last else self.mail.take(B(s + 1, m))
        if edge is not None:  # a stage of frozen layers may have no graph
            torch.autograd.backward(edge, gradient)
        if s > self.first_trained and x.grad is None:
            raise self.cut_off(s, m, "passes no gradient to its input, though stages before are to be trained")
        if s > 0:  # the stages before may all be frozen
            self.mail.put(B(s, m), torch.zeros_like(x) if x.grad is None else x.grad)
        if later:
            self.later[s, m] = later

    def cut_off(self, s: int, m: int, why: str) -> ValueError:
        return ValueError(
            f"{F(s, m)!r} has made a {'tensor' if s < self.last else 'loss'} that {why}: neither detach it nor compute "
            "it under torch.no_grad(), and freeze with requires_grad_(False) what is not to be trained"
        )

    def weights(self, s: int, m: int) -> None:
        self.later.pop((s, m)).backward()


class Given(torch.autograd.Function):
    """A stage's input as an inner node of its graph, so that an in-place operation may change it, unlike a leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


DOES = {F: "forward", B: "backward", I: "backward", W: "weights"}


def is_trained(stage: nn.Module) -> bool:
    return any(p.requires_grad for p in stage.parameters())


def device_of(parameters: list[nn.Parameter]) -> torch.device:
    return parameters[0].device if parameters else torch.get_default_device()
