"""Expert parallelism: each rank holds some of the experts, and a copy of everything else.

    mesh = Mesh((2, 4), AXES)                      # in a job of 8 ranks
    model = ExpertParallel(model, mesh)            # every labs.moe.Mixture in it is split
    model(*part_of_the_batch).backward()           # all 8 ranks read different parts
    model.sync()
    optimizer.step()

The mesh is folded: along `ep` ranks hold different experts, and along `edp` copies of the same.  Attention, routers and
all else see one axis, both together, along which they are replicated.

                  copies on         a rank's gradient is a sum over       sync() adds up along    and divides by
    experts       edp ranks         the tokens of all ranks along ep      edp                     edp × ep
    all else      edp × ep ranks    its own tokens                        edp and ep              edp × ep

**The scale.**  The loss is a mean over all ranks, so each sum is divided by the number of *all* ranks.  An expert's
gradient holds the tokens of its ep ranks before anybody averages it, since they have sent them.  A mean over its copies
would divide by edp alone, and be ep times too large.  AdamW hides this, since it divides by the gradient's size.  The
norm does not: it becomes too large, and clipping by it then shortens the gradients of all other parameters, too
(pytorch/pytorch#160285, NVIDIA/Megatron-LM#5956).

**FSDP** shards experts along their own axis, and everything else along both; the same scale is its divide factor:

    for layer, experts in zip(model.layers.values(), split_experts(model, mesh)):
        fully_shard(experts, mesh=mesh["edp"]).set_gradient_divide_factor(mesh.size())
        fully_shard(layer, mesh=mesh._flatten("dp"))
    fully_shard(model, mesh=mesh._flatten("dp"))

**Tensor parallelism** folds onto the same ranks: dp × tp = edp × ep.  Attention and shared experts are split along tp,
with sequence parallelism, so that each rank routes tokens of its own.  Gradients of what is no expert are then averaged
along dp, and an expert's sum is divided by dp, the number of losses:

    dense = Mesh((4, 2), ("dp", "tp"))                                    # the 8 ranks of edp × ep
    model = ExpertParallel(model, mesh, dense.get_group("dp"))            # first, since experts stay whole
    parallelize(model.module, dense["tp"], gpt_plan(config, sequence_parallel=True))

Sums go in the order of the ranks: with edp = 1 or ep = 1, the result has the bits of one process that adds up as many
micro-batches as there are ranks.
"""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from labs.agree import everybodys, first_difference, require_equal_replicas
from labs.clip import global_norm, shorten
from labs.group import all_gather, reduce_scatter, send_buffers
from labs.hooks import require_counted, require_dense
from labs.mesh import Mesh
from labs.moe.exchange import ParallelExperts
from labs.moe.mixture import Mixture
from labs.unaveraged import compare_in_first_step

AXES = "edp", "ep"


class ExpertParallel(nn.Module):
    """A model whose experts are split over the ranks along `ep`, with gradients that `sync` averages.

    model: the whole model, equal on all ranks, with a `labs.moe.Mixture` or more; it is changed.
    mesh: device mesh with the two AXES.
    group: the ranks that read different sequences, all by default; ranks along tp read the same.

    Raises ValueError, on every rank, for other axes, fewer experts than ranks along ep, no mixture, replicas that
    differ, or a parameter of several experts.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, group: ProcessGroup | None = None):
        super().__init__()
        self.module, self.mesh, self.group = model, mesh, group
        self.experts = {p for experts in split_experts(model, mesh) for p in experts.parameters()}
        require_equal_rest(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        require_counted(self, args, kwargs)
        return self.module(*args, **kwargs)

    def sync(self) -> None:
        """Make every gradient that of the mean of all losses; call it between `backward()` and `optimizer.step()`.

        Raises RuntimeError if a parameter that is trained has no gradient.
        """
        for name, p in self.module.named_parameters():
            if p.requires_grad and p.grad is None:
                raise RuntimeError(
                    f"rank {dist.get_rank()} has no gradient for {name!r}: call loss.backward() before sync(), with a "
                    "loss that depends on every parameter, or freeze it"
                )
        for p in self.module.parameters():
            if p.requires_grad:
                add_in_order(p.grad, self.mesh.get_group("edp") if p in self.experts else self.group)
                p.grad /= dist.get_world_size(self.group)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip by the norm of the whole model, as `labs.clip.clip_gradients` does; return the norm before (0-dim).

        Each expert counts once, on whichever rank it is.  Every rank must call this method, after `sync`.
        """
        parameters, alike = list(self.module.parameters()), dist.get_world_size(self.group)
        copies = dict.fromkeys(parameters, self.mesh.size()) | dict.fromkeys(self.experts, self.mesh.size("edp"))
        for p in parameters:
            if cut := getattr(p, "cut_alike", None):  # labs.tp has split it
                copies[p] = alike * cut.copies
        norm = global_norm(parameters, [None], copies)
        shorten(parameters, norm, max_norm)
        return norm

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather the experts of all ranks on the CPU, and return `{name in the whole model: tensor}`."""
        full = dict(self.module.named_parameters())
        experts = {name: p.detach().cpu() for name, p in full.items() if p in self.experts}
        for its in everybodys(experts, self.mesh.get_group("ep")).values():
            full |= its
        return full


def split_experts(model: nn.Module, mesh: Mesh) -> list[ParallelExperts]:
    """Leave each rank its experts along `ep`, and return them, of each mixture; nobody averages gradients yet.

    Raises ValueError as ExpertParallel does.
    """
    if mesh.mesh_dim_names != AXES:
        raise ValueError(f"{mesh!s} is no mesh for experts: give the axes {AXES}, with size 1 where you want none")
    if hasattr(model, "tensor_parallel"):
        raise ValueError("the model is split by labs.tp already: split its experts first, and then the rest")
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    if not mixtures:
        raise ValueError(f"{type(model).__name__} has no labs.moe.Mixture whose experts could be split: build one")
    require_dense(model)
    require_equal_replicas(model)
    require_apart(model, {p for mixture in mixtures for p in mixture.experts.parameters()})
    send_buffers(model, None)
    for mixture in mixtures:
        mixture.experts = ParallelExperts(mixture.experts, mesh.get_group("ep"))
    return [mixture.experts for mixture in mixtures]


def require_equal_rest(parallel: ExpertParallel) -> None:
    """Raise RuntimeError in an optimizer's first step if ranks differ in the gradient of what is no expert."""
    experts, names = parallel.experts, {p: name for name, p in parallel.module.named_parameters()}

    def rest(given: list[Tensor]) -> dict[str, Tensor]:
        others = enumerate(p for p in given if p not in experts)
        return {names.get(p, f"number {i}"): p for i, p in others} if names.keys() & {*given} else {}

    def sentence(rank: int, its: dict[str, Any], other: int, others: dict[str, Any]) -> str:
        return (
            f"parameter {first_difference(its, others)!r} of the optimizer is on every rank, and its gradient differs "
            f"on ranks {rank} and {other}: call sync() before the step, clip with clip_gradients(), and make it, as "
            "that of a loss, a part of the model before the model is wrapped"
        )

    compare_in_first_step(parallel, rest, [parallel.group], sentence)


def add_in_order(x: Tensor, group: ProcessGroup | None) -> None:
    """Replace `x` by its sum over the ranks, added in their order: a reduce-scatter and an all-gather."""
    if (ranks := dist.get_world_size(group)) > 1:
        flat = pad(x.flatten(), (0, -x.numel() % ranks))
        all_gather(flat, reduce_scatter(flat, group), group=group)
        x.copy_(flat[: x.numel()].view(x.shape))


def require_apart(model: nn.Module, experts: set[nn.Parameter]) -> None:
    """Raise ValueError if an expert's parameter has several names: its gradients would be on several ranks."""
    names = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    for name, p in model.named_parameters():
        if p in experts and names[p] > 1:
            raise ValueError(
                f"parameter {name!r} of an expert has {names[p]} names in the model, and could be on a rank under one "
                "of them alone: give each expert parameters of its own"
            )
