"""Three dimensions on one mesh: what a rank sends and holds in a step, as `labs.parallel` composes them.

The rank is at one place on each axis, and what it sends is a sum: along each axis it does what the strategy of that
axis does, with what the others have left it.  Of p stages and m micro-batches of M tokens, a rank with l layers, Ψ_l
their parameters, 1/t of each matrix, sends in a step

    along pp          per micro-batch and cut    M D forward, M D backward; once V D / t of a tied gradient
    along tp          per micro-batch            (4 l + ends) all_reduces of M D: one behind the embedding, on the first
                                                 stage; one before the head, and 3 M of the loss, on the last
    along shard       once                       all_gather Ψ_l / t, reduce_scatter Ψ_l / t
    along replicate   once                       all_reduce Ψ_l / (t s)

So m multiplies what goes along pp and tp, and leaves alone what goes along the data's axes; t divides what goes along
these, and not what goes along pp.

    cost.parallel(job, plans, {"pp": 2, "replicate": 1, "shard": 2, "tp": 2})

Sources: Narayanan et al. 2021, arXiv 2104.04473, section 3; and those of `pipeline`, `tensor_parallel` and
`fully_sharded`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from math import prod

from labs.cost.fully_sharded import fully_shard_sent, rows
from labs.cost.job import Job
from labs.cost.kinds_held import (
    FLOAT,
    INDEX,
    Held,
    Layer,
    Prediction,
    gpt_layers,
    held,
    optimizer_state,
    optimizer_step,
)
from labs.cost.pipeline import Plan, count, numbers_of, pp_moments
from labs.cost.pipeline_stages import StageMemory, stages_of
from labs.cost.split import chunk, share
from labs.cost.tensor_parallel import tp_calls

AXES = "pp", "replicate", "shard", "tp"


def parallel(job: Job, plans: Sequence[Plan], axes: Mapping[str, int], sequence_parallel: bool = False) -> Prediction:
    """A step in float32 on CPU: bytes sent, P, G and S exactly, A and the peak within 5 %.

    job.batch: the sequences of a micro-batch; job.accumulation: how many there are.  plans: as `cost.pp` has them.
    axes: the size of each of AXES.
    """
    job.require("cost.parallel", precision=("float32",), recompute=("none",))
    require_theirs(job, plans, axes)
    at, last = place(job.rank, axes), max(numbers_of(plans[-1]) + numbers_of(plans[0]))
    own = share(job.config, axes["tp"], at["tp"], sequence_parallel) if axes["tp"] > 1 else job.config
    stages, plan = stages_of(replace(job, config=own), last + 1), plans[at["pp"]]
    mine = [units(stages[number], tied=job.config.tied and last == 0) for number in numbers_of(plan)]
    steps = [
        along_pp(job, plans, axes, stages),
        along_tp(job, axes, stages, numbers_of(plan), sequence_parallel),
        along_data(axes, at, mine),
    ]
    counts = sum((Counter(counts) for _, counts, _ in steps), Counter())
    sent, limits = (sum(step[which] for step in steps) for which in (0, 2))
    return Prediction(sent, dict(counts), Fraction(limits), parallel_held(job, axes, at, stages, plan, mine))


def require_theirs(job: Job, plans: Sequence[Plan], axes: Mapping[str, int]) -> None:
    if prod(axes[axis] for axis in AXES) != job.ranks or len(plans) != axes["pp"]:
        sizes = " × ".join(f"{axis} {axes[axis]}" for axis in AXES)
        raise ValueError(f"{job.ranks} ranks and plans for {len(plans)} are not {sizes}")


def place(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """On each axis, the last of which is made of neighbours."""
    found = {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, axes[axis])
    return found


def units(stage: StageMemory, tied: bool) -> list[Layer]:
    """What is gathered at once: embedding, last norm and head, as far as the stage has them; and each of its layers."""
    embedding, *layers, norm, head = gpt_layers(stage.job.config)
    ends = [*[embedding] * stage.is_first, *[norm] * stage.is_last, *[head] * (stage.is_last and not tied)]
    return [Layer(tuple(chain(*(end.trained for end in ends)))), *layers]


# ---- sent ------------------------------------------------------------------------------------------------

Step = tuple[int, Mapping[str, int], Fraction]  # bytes; collectives, by name; the textbook's limit


def along_pp(job: Job, plans: Sequence[Plan], axes: Mapping[str, int], stages: Sequence[StageMemory]) -> Step:
    at = place(job.rank, axes)
    sends, receives = ([count(plan, kind) for plan in plans] for kind in ("Send", "Receive"))
    x, number = FLOAT * stages[0].job.between * job.config.dim, at["pp"]
    table, shards = tied_table(job, plans, axes, stages), axes["shard"]
    part = FLOAT * chunk(table, shards, at["shard"]) * job.config.dim
    once = int(table > 0)
    counts = {"send": sends[number] + once, "recv": receives[number] + once}
    return x * sends[number] + part, counts, Fraction(x * sum(sends), axes["pp"])


def tied_table(job: Job, plans: Sequence[Plan], axes: Mapping[str, int], stages: Sequence[StageMemory]) -> int:
    """Rows of a tied gradient, of which the other part is another stage's rank's."""
    numbers = numbers_of(plans[place(job.rank, axes)["pp"]])
    has_one = (0 in numbers) != (len(stages) - 1 in numbers)
    return stages[0].job.config.vocab * (job.config.tied and has_one)


def along_tp(
    job: Job, axes: Mapping[str, int], stages: Sequence[StageMemory], numbers: Sequence[int], sequence_parallel: bool
) -> Step:
    """Each stage has its layers' calls, and those of the ends that it has."""
    sent, counts, limit = 0, Counter(), Fraction(0)
    row = replace(job, ranks=axes["tp"], rank=job.rank % axes["tp"])
    for call in tp_calls(row, sequence_parallel) if axes["tp"] > 1 else ():
        times = job.accumulation * call.times * sum(stages[number].times(call.part) for number in numbers)
        sent += times * call.sent
        counts[call.op] += times
        if call.part != "loss":
            limit += times * call.sent
    return sent, counts, limit


def along_data(axes: Mapping[str, int], at: Mapping[str, int], mine: Sequence[Sequence[Layer]]) -> Step:
    """Gathered once and reduced once, whatever the number of micro-batches."""
    replicas, shards = axes["replicate"], axes["shard"]
    if replicas * shards == 1:
        return 0, {}, Fraction(0)
    rank = at["replicate"] * shards + at["shard"]
    sent = sum(fully_shard_sent(root, layers, replicas * shards, False, 1, rank, replicas) for root, *layers in mine)
    groups = sum(bool(unit.trained) for stage in mine for unit in stage)
    counts = {"all_gather": groups, "reduce_scatter": groups} | ({"all_reduce": groups} if replicas > 1 else {})
    psi = sum(size for stage in mine for unit in stage for size in unit.sizes)
    limit = Fraction(2 * (shards - 1) * psi, shards) + Fraction(2 * (replicas - 1) * psi, replicas * shards)
    return sent, counts, FLOAT * limit


# ---- held ------------------------------------------------------------------------------------------------


def parallel_held(
    job: Job,
    axes: Mapping[str, int],
    at: Mapping[str, int],
    stages: Sequence[StageMemory],
    plan: Plan,
    mine: Sequence[Sequence[Layer]],
) -> Held:
    """P and S are the rank's chunks, without padding; G has it.  While the stages compute, all they have is whole."""
    shapes, shards = [shape for stage in mine for unit in stage for shape in unit.trained], axes["shard"]
    padded = sum(rows(shape, shards) for shape in shapes)
    chunks = [chunk(first, shards, at["shard"]) * prod(others) for first, *others in shapes]
    whole = FLOAT * padded * (axes["replicate"] * shards > 1)
    moments = [now.plus(comm=whole) for now in pp_moments(replace(job, config=stages[0].job.config), stages, plan)]
    G, besides = FLOAT * padded // shards, moments[-1]
    moments.append(optimizer_step(besides.A, G, 0, chunks).plus(temporary=besides.temporary - FLOAT))
    most = held(FLOAT * sum(chunks), optimizer_state(chunks), moments)
    mesh = INDEX * (job.ranks + axes["replicate"] * shards)  # the ranks' numbers
    return replace(most, G=G, temporary=most.temporary + mesh, peak=most.peak + mesh)
