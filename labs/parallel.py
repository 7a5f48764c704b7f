"""Three dimensions on one mesh: pipeline, data, tensor.  Nothing is new here but the order in which they are applied.

    mesh = Mesh((2, 1, 2, 2), AXES)                                      # in a job of 8 ranks
    lists = pp.one_f_one_b(ranks=2, microbatches=4)
    parallel = Parallel(pp.cut(model, 2), lists, mesh, tp.gpt_plan(model.config))
    optimizer = AdamW(parallel.parameters())
    losses = parallel.forward_backward(x, y)                             # this rank's part of the batch
    parallel.clip_gradients(1.0)
    optimizer.step()

    axis         its ranks differ in               which of them travel, and when
    pp           the stages that they have         x, and its gradient: for each micro-batch, over each cut
    replicate    the part of the batch             gradients, of what shards have: once a step
    shard        that, and the piece of            parameters: gathered once a step; gradients: reduced once a step
                 each parameter
    tp           the part of each matrix           x, and its gradient: for each micro-batch, at every split layer

What talks most stands last, among neighbours: tp inside of a node, pp and replicas between them.

    1  tp       splits the matrices of every stage.  First, since what follows takes a rank's part for a parameter.
    2  pp       leaves each rank its own stages.  Before anything is sharded: what is tied is known by being the same
                parameter.
    3  fsdp     shards what is left, layer by layer, over replicate and shard.

**Sharded parameters stay gathered from a stage's first micro-batch to its last**, and gradients wait on their rank
until then: each layer is gathered and reduced once a step, and not once a micro-batch, of which a pipeline needs many.
What a rank saves by sharding is the state of the optimizer, then, and what it holds between steps: ZeRO's stage 2.

**The norm of the gradients is a sum over all axes but `replicate`**, in which what several ranks have counts once: of
tp, what is not split; of pp, what is tied.

Source: Narayanan et al. 2021, arXiv 2104.04473, section 3, which calls it PTD-P; with data parallelism sharded, as in
torchtitan (arXiv 2410.06511, section 2.1.4).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations

from torch import Tensor, nn

from labs import tp
from labs.agree import on_all_ranks
from labs.clip import global_norm, shorten
from labs.fsdp import fully_shard
from labs.mesh import Mesh
from labs.pp import B, I, Lists, Pipeline, Stage
from labs.pp.checker import microbatches_of, ranks_of
from labs.tp.styles import Style

AXES = "pp", "replicate", "shard", "tp"


class Parallel(Pipeline):
    """This rank's part of a model in three dimensions: a Pipeline whose stages are split and sharded.

    stages: all of them, as `labs.pp.cut` makes them, the same on every rank.  lists: a schedule for the ranks along pp.
    mesh: of the four AXES, in any order in which replicate comes before shard; an axis that is not wanted has size 1.
    plan: of the whole model, for tp.

    Raises ValueError, on every rank, for what does not fit together; what one stage cannot have sharded, all ranks say.
    """

    def __init__(self, stages: Sequence[Stage], lists: Lists, mesh: Mesh, plan: Mapping[str, Style]):
        require_fitting(stages, lists, mesh)
        self.mesh, data = mesh, mesh["replicate", "shard"]
        if mesh.size("tp") > 1:
            for stage in stages:
                tp.parallelize(stage, mesh["tp"], tp.Plan(plan).within(stage))
        super().__init__(stages, lists, stages[-1].loss, mesh.get_group("pp"))
        self.is_sharded = data.size() > 1
        if self.is_sharded:
            on_all_ranks(partial(self.shard, data))

    def shard(self, data: Mesh) -> None:
        for stage in self.stages.values():
            for layer in stage.layers.values():
                fully_shard(layer, mesh=data, reshard_after_forward=False)
            fully_shard(stage, mesh=data, reshard_after_forward=False)

    def obey(self, lists: Lists) -> None:
        super().obey(lists)
        backwards = [x for x in lists[self.mesh.get_local_rank("pp")] if isinstance(x, B | I)]
        self.last_backward = {x.stage: x.microbatch for x in backwards}

    def backward(self, s: int, m: int) -> None:
        if self.is_sharded:
            is_last = self.last_backward[s] == m
            self.stages[s].set_requires_gradient_sync(is_last)
            self.stages[s].set_reshard_after_backward(is_last)
        super().backward(s, m)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """As `labs.clip.clip_gradients`, by the norm of the whole model; every rank must call it."""
        counted = [p for p in self.parameters() if self.tied.is_counted(p)]
        norm = global_norm(counted, [self.mesh.get_group(axis) for axis in ("pp", "shard", "tp")], self.copies())
        shorten(self.parameters(), norm, max_norm)
        return norm

    def copies(self) -> dict[nn.Parameter, int]:
        """On how many ranks along tp each parameter is the same."""
        if self.mesh.size("tp") == 1:
            return {}
        return {p: n for stage in self.stages.values() for p, n in tp.copies(stage).items()}

    def full_parameters(self) -> dict[str, Tensor]:
        """Of this rank's stages, whole, by their names in the model."""
        found = {}
        for stage in self.stages.values():
            own = dict(stage.named_parameters())
            whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in own.items()}
            found |= whole if self.mesh.size("tp") == 1 else tp.full_parameters(stage)
        return found


def require_fitting(stages: Sequence[Stage], lists: Lists, mesh: Mesh) -> None:
    if {*mesh.mesh_dim_names} != {*AXES}:
        raise ValueError(f"{mesh!s} has the axes {mesh.mesh_dim_names}: give {AXES}, of size 1 where one is not wanted")
    if (few := microbatches_of(lists)) < (ranks := mesh.size("pp")):
        raise ValueError(
            f"{few} micro-batches are fewer than the {ranks} ranks along pp, some of which would always wait: cut the "
            f"batch into {ranks} or more"
        )
    for name, p in (each for stage in stages for each in stage.named_parameters()):
        if p.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device, and has no numbers to be split: give it some")
    rank_of = ranks_of(lists)
    for (a, first), (b, second) in combinations(enumerate(stages), 2):
        if mesh["replicate", "shard"].size() > 1 and rank_of.get(a) == rank_of.get(b) and shares(first, second):
            raise ValueError(
                f"stages {a} and {b} have a tied parameter, and are on one rank, where only one of them can have it "
                "sharded: take a schedule that has them on two ranks, or give the model tied=False"
            )


def shares(first: Stage, second: Stage) -> bool:
    return not {*first.parameters()}.isdisjoint(second.parameters())
