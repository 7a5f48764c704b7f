"""Three dimensions on one mesh: bytes that a rank sends and holds in a step, as `labs.parallel` composes them.

The rank has one place on each axis.  Along each axis it sends what the strategy of that axis sends, for the part of
the model and of the batch that the other axes leave it, and the total is the sum.  There are p stages, m micro-batches
of M tokens, t ranks along tp and s along shard.  A rank has l layers with Ψ_l parameters, and 1/t of each matrix.  In
a step it sends

    along pp          per micro-batch and cut    M D forward, M D backward; once V D / t of a tied gradient
    along tp          per micro-batch            (4 l + ends) all_reduces of M D: one after the embedding, on the first
                                                 stage; one before the head, and 3 M for the loss, on the last
    along shard       once                       all_gather Ψ_l / t, reduce_scatter Ψ_l / t
    along replicate   once                       all_reduce Ψ_l / (t s)

So m multiplies the bytes along pp and tp, but not those along shard and replicate; t divides the bytes along shard and
replicate, but not those along pp.

If sequences are cut along cp, M counts the tokens of the rank's piece, and parameters are sharded over shard × cp.  In
every layer and micro-batch, a ring sends the keys and values of the rank's heads (`context_parallel`).

    cost.parallel(job, plans, {"pp": 2, "replicate": 1, "shard": 2, "tp": 2})

Sources: Narayanan et al. 2021, arXiv 2104.04473, section 3; and those of `pipeline`, `tensor_parallel` and
`fully_sharded`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import prod

from labs.cost.context_parallel import attention_sent, calls, textbook, zigzag_places
from labs.cost.fully_sharded import fully_shard_sent, rows
from labs.cost.job import Job
from labs.cost.model_states import (
    FLOAT,
    INDEX,
    HeldBytes,
    LayerShapes,
    Prediction,
    Shape,
    gpt_layers,
    held,
    optimizer_state,
    optimizer_step,
)
from labs.cost.pipeline import Plan, count, numbers_of, pp_moments
from labs.cost.pipeline_stages import Stage, stages_of
from labs.cost.split import chunk, share
from labs.cost.tensor_parallel import tp_calls

AXES = "pp", "replicate", "shard", "tp"


def parallel(job: Job, plans: Sequence[Plan], axes: Mapping[str, int], sequence_parallel: bool = False) -> Prediction:
    """Predict a step in float32 on CPU: bytes sent, P, G and S exactly, A and the peak to 5 %; no peak with cp.

    job: its batch is the sequences of a micro-batch, its accumulation the number of micro-batches
    plans: the plans of `cost.pp`, one for each rank along pp
    axes: the size of each of AXES, and of cp if sequences are cut
    """
    own = on_mesh(job, plans, axes, sequence_parallel)
    steps = [along_pp(own, plans), along_tp(own, sequence_parallel), along_data(own), along_cp(own, job)]
    counts = sum((Counter(counts) for _, counts, _ in steps), Counter())
    sent, limits = (sum(step[which] for step in steps) for which in (0, 2))
    most = parallel_held(own)
    return Prediction(sent, dict(counts), Fraction(limits), most if own.pieces == 1 else replace(most, peak=None))


@dataclass(frozen=True)
class Own:
    """A rank's part: its place on each axis, all stages with 1/t of each matrix, and the plan of its own stages.

    job: the job on the rank's piece of each sequence
    axes: the size of each axis, shard and cp being one
    pieces: the number of ranks along cp
    """

    job: Job
    pieces: int
    axes: Mapping[str, int]
    at: Mapping[str, int]
    stages: Sequence[Stage]
    plan: Plan

    @property
    def numbers(self) -> list[int]:
        return numbers_of(self.plan)

    @property
    def units(self) -> list[list[LayerShapes]]:
        """Return the groups of parameters that are gathered at once, for each stage of the rank.

        The first group is embedding, last norm and head, as far as the stage has them; each layer is another one.
        """
        is_tied = self.job.config.tied and len(self.stages) == 1
        return [units_of(self.stages[number], is_tied) for number in self.numbers]

    @property
    def shards_data(self) -> bool:
        return self.axes["replicate"] * self.axes["shard"] > 1

    @property
    def shapes(self) -> list[Shape]:
        return [shape for units in self.units for unit in units for shape in unit.trained]

    @property
    def padded(self) -> int:
        """Return the elements of all parameters, each padded to equal chunks."""
        return sum(rows(shape, self.axes["shard"]) for shape in self.shapes)

    @property
    def chunks(self) -> list[int]:
        """Return the elements of the rank's chunk of each parameter, without padding."""
        shards, at = self.axes["shard"], self.at["shard"]
        return [chunk(first, shards, at) * prod(others) for first, *others in self.shapes]


def on_mesh(job: Job, plans: Sequence[Plan], axes: Mapping[str, int], sequence_parallel: bool = False) -> Own:
    job.require("cost.parallel", precision=("float32",), recompute=("none",))
    pieces = axes.get("cp", 1)
    axes = {axis: axes[axis] * (pieces if axis == "shard" else 1) for axis in AXES}
    require_same_ranks(job, plans, axes)
    at, last = place(job.rank, axes), max(number for plan in plans for number in numbers_of(plan))
    config = share(job.config, axes["tp"], at["tp"], sequence_parallel) if axes["tp"] > 1 else job.config
    column = replace(job, ranks=pieces, rank=at["shard"] % pieces)
    job = replace(job, context=len(zigzag_places(column)[column.rank]))
    return Own(job, pieces, axes, at, stages_of(replace(job, config=config), last + 1), plans[at["pp"]])


def require_same_ranks(job: Job, plans: Sequence[Plan], axes: Mapping[str, int]) -> None:
    if prod(axes[axis] for axis in AXES) != job.ranks or len(plans) != axes["pp"]:
        sizes = " × ".join(f"{axis} {axes[axis]}" for axis in AXES)
        raise ValueError(f"{job.ranks} ranks and plans for {len(plans)} are not {sizes}")


def place(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the rank's place on each axis; neighbours differ in their place on the last axis."""
    found = {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, axes[axis])
    return found


def units_of(stage: Stage, is_tied: bool) -> list[LayerShapes]:
    embedding, *layers, norm, head = gpt_layers(stage.job.config)
    ends = [*[embedding] * stage.is_first, *[norm] * stage.is_last, *[head] * (stage.is_last and not is_tied)]
    return [LayerShapes(tuple(chain(*(end.trained for end in ends)))), *layers]


# ---- sent ------------------------------------------------------------------------------------------------

Step = tuple[int, Mapping[str, int], Fraction]  # bytes; collectives, by name; the textbook's limit


def along_pp(own: Own, plans: Sequence[Plan]) -> Step:
    sends, receives = ([count(plan, kind) for plan in plans] for kind in ("Send", "Receive"))
    D, number, tied = own.job.config.dim, own.at["pp"], own.job.config.tied
    x = FLOAT * own.stages[0].job.between * D
    # A tied gradient has two parts: this rank has one, and the rank of another stage has the other.
    has_one = (0 in own.numbers) != (len(own.stages) - 1 in own.numbers)
    once = int(tied and has_one)
    table = FLOAT * D * once * chunk(own.stages[0].job.config.vocab, own.axes["shard"], own.at["shard"])
    counts = {"send": sends[number] + once, "recv": receives[number] + once}
    return x * sends[number] + table, counts, Fraction(x * sum(sends), len(plans))


def along_tp(own: Own, sequence_parallel: bool) -> Step:
    """Return the step along tp: each stage has the calls of its layers, and of embedding and head if it has them."""
    sent, counts, limit = 0, Counter(), Fraction(0)
    row = replace(own.job, ranks=own.axes["tp"], rank=own.at["tp"])
    for call in tp_calls(row, sequence_parallel) if row.ranks > 1 else ():
        times = row.accumulation * call.times * sum(own.stages[number].times(call.part) for number in own.numbers)
        sent += times * call.sent
        counts[call.op] += times
        if call.part != "loss":
            limit += times * call.sent
    return sent, counts, limit


def along_cp(own: Own, job: Job) -> Step:
    """Return the step along cp: the ring of every layer; job: the job on whole sequences."""
    config, times = (
        own.stages[0].job.config,
        job.accumulation * sum(own.stages[n].job.config.depth for n in own.numbers),
    )
    row = replace(job, config=config, ranks=own.pieces, rank=own.at["shard"] % own.pieces)
    counts = {op: number * times for op, number in calls(row, "ring").items()}
    return times * sum(attention_sent(row, "ring").values()), counts, times * textbook(row, "ring")


def along_data(own: Own) -> Step:
    """Return the step along shard and replicate: one gather and one reduction, however many micro-batches there are."""
    replicas, shards = own.axes["replicate"], own.axes["shard"]
    if not own.shards_data:
        return 0, {}, Fraction(0)
    rank = own.at["replicate"] * shards + own.at["shard"]
    sent = sum(
        fully_shard_sent(root, layers, replicas * shards, False, 1, rank, replicas) for root, *layers in own.units
    )
    groups = [unit for stage in own.units for unit in stage if unit.trained]
    counts = dict.fromkeys(["all_gather", "reduce_scatter", *["all_reduce"] * (replicas > 1)], len(groups))
    psi = sum(size for unit in groups for size in unit.sizes)
    limit = Fraction(2 * (shards - 1) * psi, shards) + Fraction(2 * (replicas - 1) * psi, replicas * shards)
    return sent, counts, FLOAT * limit


# ---- held ------------------------------------------------------------------------------------------------


def parallel_held(own: Own) -> HeldBytes:
    """Return the bytes held in a step.

    P and S are the rank's chunks without padding; G has the padding.  While the stages compute, all their parameters
    are gathered, and their whole gradients are held until they are reduced.
    """
    whole, G = FLOAT * own.padded, FLOAT * own.padded // own.axes["shard"]
    job = replace(own.job, config=own.stages[0].job.config)
    moments = [*pp_moments(job, own.stages, own.plan, own.shards_data)]
    if own.shards_data:
        moments = [replace(now, G=0, comm=now.comm + now.G + whole) for now in moments]
    end = moments[-1]
    moments.append(optimizer_step(end.A, G, 0, own.chunks))
    most = held(FLOAT * sum(own.chunks), optimizer_state(own.chunks), moments)
    mesh = INDEX * (job.ranks + own.axes["replicate"] * own.axes["shard"])  # the ranks' numbers
    return replace(most, G=G, comm=None, temporary=None, peak=most.peak + mesh)
