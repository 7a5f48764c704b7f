"""Three dimensions on one mesh, or four: pipeline, data, context and tensor parallelism, in the order that works.

    mesh = Mesh((2, 1, 2, 2), AXES)                                      # in a job of 8 ranks
    lists = pp.one_f_one_b(ranks=2, microbatches=4)
    parallel = Parallel(pp.cut(model, 2), lists, mesh, tp.gpt_plan(model.config))
    optimizer = AdamW(parallel.parameters())
    losses = parallel.forward_backward(x, y)                             # this rank's part of the batch
    parallel.clip_gradients(1.0)
    optimizer.step()

    axis         its ranks differ in               what is sent along it, and when
    pp           the stages that they have         x and its gradient: for each micro-batch, at each cut
    replicate    the part of the batch             gradients of the shards: once a step
    shard        the part of the batch, and the    parameters: gathered once a step; gradients: reduced once a step
                 piece of each parameter
    cp           the piece of each sequence, and   keys and values: for each micro-batch, in every layer; and the same
                 the piece of each parameter       as along shard
    tp           the part of each matrix           x and its gradient: for each micro-batch, at every split layer

The axis that sends the most bytes stands last, so that its ranks are neighbours: tp inside of a node, pp and replicate
between nodes.  A mesh without cp leaves sequences whole.  The strategies are applied in this order:

    1  tp       splits the matrices of every stage.  It comes first, since pp and fsdp take a rank's part for a
                parameter.
    2  cp       lets the queries of every stage meet the keys of all pieces, in a ring.
    3  pp       leaves each rank its own stages.  It comes before fsdp, since tied parameters are recognised as the same
                object.
    4  fsdp     shards the remaining parameters, layer by layer, over replicate, and over shard and cp together: to a
                parameter, a piece of a sequence is a part of the batch.

**Ranks that differ in cp alone read the same whole sequences.**  Each rank cuts its own piece of them, and passes it on
along pp.  Each divides its losses by the mean number of targets per piece, so that their mean is the batch's loss.

**Sharded parameters stay gathered from a stage's first micro-batch to its last**, and gradients wait on their rank
until the last micro-batch.  So each layer's parameters are gathered, and its gradients reduced, once per step and not
once per micro-batch.  Sharding in this way saves the memory of the optimizer's state, and of parameters and gradients
between steps, as stage 2 of ZeRO does.

**The norm of the gradients is a sum over all axes but `replicate`.**  A gradient that several ranks hold counts once:
along tp, the gradient of a parameter that is not split; along pp, the gradient of a tied parameter.

Sources: Narayanan et al. 2021, arXiv 2104.04473, section 3, which calls the combination PTD-P; torchtitan, arXiv
    2410.06511, section 2.1.4, for sharded data parallelism.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from labs import tp
from labs.agree import fingerprint, on_all_ranks
from labs.clip import global_norm, shorten
from labs.cp import ring_attention, zigzag
from labs.cp.cp import CutSequences, let_meet
from labs.fsdp import fully_shard
from labs.mesh import Mesh
from labs.pp import B, I, Lists, Pipeline, Stage
from labs.pp.batches import described, require_weighed
from labs.pp.checker import microbatches_of, ranks_of
from labs.tp.styles import Style

AXES = "pp", "replicate", "shard", "tp"


class Parallel(Pipeline):
    """One rank's part of a model in three dimensions: a Pipeline whose stages are split and sharded.

    stages: all stages, as `labs.pp.cut` returns them, the same on every rank.
    lists: a schedule for the ranks along pp.
    mesh: device mesh with the four AXES, in any order in which replicate comes before shard, and cp right after shard
        if you want it; give an axis that you do not want the size 1.
    plan: tensor parallelism's plan of the whole model.

    Raises ValueError, on every rank, if stages, lists and mesh do not fit together, or a stage cannot be sharded.
    """

    def __init__(self, stages: Sequence[Stage], lists: Lists, mesh: Mesh, plan: Mapping[str, Style]):
        require_fitting(stages, lists, mesh)
        self.mesh, self.data, self.sequences = mesh, data_of(mesh), None
        if mesh.size("tp") > 1:
            for stage in stages:
                tp.parallelize(stage, mesh["tp"], tp.Plan(plan).within(stage))
        if size_of_cp(mesh) > 1:
            self.sequences = CutSequences(mesh.get_group("cp"), ring_attention, zigzag)
            self.readers = mesh[tuple(axis for axis in mesh.mesh_dim_names if axis in ("pp", "cp"))]._flatten()
            for stage in stages:
                let_meet(stage, Stage, self.sequences)
        super().__init__(stages, lists, stages[-1].loss, mesh.get_group("pp"))
        self.is_sharded = self.data.size() > 1
        if self.is_sharded:
            on_all_ranks(partial(self.shard, self.data))

    def shard(self, data: Mesh) -> None:
        for stage in self.stages.values():
            for layer in stage.layers.values():
                fully_shard(layer, mesh=data, reshard_after_forward=False)
            fully_shard(stage, mesh=data, reshard_after_forward=False)

    def obey(self, lists: Lists) -> None:
        super().obey(lists)
        backwards = [x for x in lists[self.mesh.get_local_rank("pp")] if isinstance(x, B | I)]
        self.last_backward = {x.stage: x.microbatch for x in backwards}

    def take(self, x: Tensor | None, y: Tensor | None, over: float | None) -> None:
        if self.sequences is not None:
            x, y, over = self.own(x, y, over)
        super().take(x, y, over)

    def own(self, x: Tensor | None, y: Tensor | None, over: float | None) -> tuple[Any, ...]:
        """Return this rank's piece of x and of y, and the divisor of its losses.

        Ranks that have neither x nor y are told the length of the sequences, in the first step.
        """
        batches, weigh = self.batches, partial(require_weighed, y, self.loss, over, self.group)
        if batches.size is None:
            everyones = on_all_ranks(partial(described, x, y, weigh, fingerprint), self.readers.get_group())
            batches.tokens = one_length(self.readers.mesh.flatten().tolist(), everyones)
        else:
            weigh()
        if batches.tokens is None:  # no rank has x
            return x, y, over
        for name, batch in (("x", x), ("y", y)):
            if batch is not None and batch.shape[1] != batches.tokens:
                raise ValueError(
                    f"{name} has {batch.shape[1]} tokens in a sequence, and in the first step it had {batches.tokens}: "
                    "give sequences of one length, or make another Parallel"
                )
        self.sequences.begin(next(iter(self.stages.values())), batches.tokens, self.mail.device)
        if over is None and y is not None:
            over = y.numel()
        pieces = [None if batch is None else self.sequences.pick(batch) for batch in (x, y)]
        return *pieces, over and over / size_of_cp(self.mesh)

    def backward(self, s: int, m: int) -> None:
        if self.is_sharded:
            is_last = self.last_backward[s] == m
            self.stages[s].set_requires_gradient_sync(is_last)
            self.stages[s].set_reshard_after_backward(is_last)
        super().backward(s, m)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip by the norm of the whole model, as `labs.clip.clip_gradients` does; return the norm before (0-dim).

        Every rank must call this method.
        """
        counted = [p for p in self.parameters() if self.tied.is_counted(p)]
        groups = [self.mesh.get_group("pp"), self.data.get_group("shard"), self.mesh.get_group("tp")]
        norm = global_norm(counted, groups, self.copies())
        shorten(self.parameters(), norm, max_norm)
        return norm

    def copies(self) -> dict[nn.Parameter, int]:
        """Return `{parameter: number of ranks along tp that hold the same numbers}`; empty without tp."""
        if self.mesh.size("tp") == 1:
            return {}
        return {p: n for stage in self.stages.values() for p, n in tp.copies(stage).items()}

    def full_parameters(self) -> dict[str, Tensor]:
        """Return `{name in the model: full tensor}` for the parameters of this rank's stages."""
        found = {}
        for stage in self.stages.values():
            own = dict(stage.named_parameters())
            whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in own.items()}
            found |= whole if self.mesh.size("tp") == 1 else tp.full_parameters(stage)
        return found


def size_of_cp(mesh: Mesh) -> int:
    return mesh.size("cp") if "cp" in mesh.mesh_dim_names else 1


def data_of(mesh: Mesh) -> Mesh:
    """Return the mesh with the axes replicate and shard; to FSDP, shard and cp are one axis."""
    if "cp" in mesh.mesh_dim_names:
        sizes = {name: mesh.size(name) for name in mesh.mesh_dim_names}
        sizes["shard"] *= sizes.pop("cp")
        mesh = Mesh(tuple(sizes.values()), tuple(sizes))
    return mesh["replicate", "shard"]


def one_length(ranks: list[int], everyones: list[Any]) -> int | None:
    """Return the number of tokens of the sequences that the ranks were given; None if no rank has any.

    everyones: the shape and the fingerprint of each rank's x and y, or None.

    Raises ValueError if ranks were given different sequences.
    """
    found: dict[str, tuple[int, Any]] = {}
    for rank, each in zip(ranks, everyones, strict=True):
        for name, given in zip("xy", each, strict=True):
            first, other = found.setdefault(name, (rank, given)) if given else (rank, given)
            if given != other:
                raise ValueError(
                    f"{name} is {other[1]} on rank {first}, but {given[1]} on rank {rank}: ranks that differ in pp or "
                    "cp alone read the same whole sequences, of which each cuts its own piece"
                )
    lengths = {given[0][1] for _, given in found.values()}
    if len(lengths) > 1:
        words = " and ".join(map(str, sorted(lengths)))
        raise ValueError(f"x and y have sequences of {words} tokens: give the targets of the same tokens")
    return min(lengths, default=None)


def require_fitting(stages: Sequence[Stage], lists: Lists, mesh: Mesh) -> None:
    names = mesh.mesh_dim_names
    if {*names} - {"cp"} != {*AXES} or ("cp" in names and names.index("cp") != names.index("shard") + 1):
        raise ValueError(
            f"{mesh!s} has the axes {names}: give {AXES}, with size 1 where you want none, and cp right after shard if "
            "sequences are to be cut"
        )
    if (few := microbatches_of(lists)) < (ranks := mesh.size("pp")):
        raise ValueError(
            f"{few} micro-batches are fewer than the {ranks} ranks along pp, some of which would always wait: cut the "
            f"batch into {ranks} or more"
        )
    for name, p in (each for stage in stages for each in stage.named_parameters()):
        if p.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device, and has no numbers to be split: initialise it")
    rank_of, sharded = ranks_of(lists), mesh["replicate", "shard"].size() * size_of_cp(mesh) > 1
    for (a, first), (b, second) in combinations(enumerate(stages), 2):
        if sharded and rank_of.get(a) == rank_of.get(b) and shares(first, second):
            raise ValueError(
                f"stages {a} and {b} have a tied parameter, and are on one rank, where only one of them can shard it: "
                "take a schedule that has them on two ranks, or build the model with tied=False"
            )


def shares(first: Stage, second: Stage) -> bool:
    return not {*first.parameters()}.isdisjoint(second.parameters())
