"""Pipeline parallelism: bytes that a rank sends and holds in a step, as `labs.pp` runs a schedule on the course's GPT.

Each micro-batch of M tokens sends M D numbers forward and M D backward over each cut between two ranks, and nothing
else.  If embedding and head are tied and on two ranks, these send each other their parts of the gradient once per step.
A rank holds P, G and S of its stages, and the saved activations of each micro-batch that is in flight there.

    plans = pp.plan(pp.one_f_one_b(ranks=4, microbatches=8))       # each rank's instructions, and messages in between
    cost.pp(Job(config, batch=1, ranks=4, rank=2, accumulation=8), plans)

Source: Narayanan et al. 2021, arXiv 2104.04473, section 3.2: the volume of a cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from labs.cost.job import Job
from labs.cost.model_states import (
    FLOAT,
    INDEX,
    HeldBytes,
    Moment,
    Prediction,
    held,
    optimizer_state,
    optimizer_step,
)
from labs.cost.pipeline_stages import Stage, stages_of

Plan = Sequence[Any]  # a rank's instructions, and messages between them


def pp(job: Job, plans: Sequence[Plan], layers: Sequence[int] | None = None) -> Prediction:
    """Predict a step in float32 on CPU.

    job: its batch is the sequences of a micro-batch, its accumulation the number of micro-batches
    plans: each rank's plan, from `labs.pp.plan`
    layers: number of layers of each stage; by default as equal as possible

    Raises ValueError if the plans are for another number of ranks or micro-batches.
    """
    stages, table = checked_stages(job, plans, layers), exchanged(job, plans)
    return step_of(job, plans, pp_held(job, stages, plans[job.rank], table), table)


def step_of(job: Job, plans: Sequence[Plan], most: HeldBytes, table: int = 0) -> Prediction:
    """Return the prediction of a step; table: bytes of a tied gradient that the rank exchanges with another."""
    sends, receives = ([count(plan, kind) for plan in plans] for kind in ("Send", "Receive"))
    x, once = FLOAT * job.tokens * job.config.dim, int(table > 0)
    return Prediction(
        sent=x * sends[job.rank] + table,
        collectives={"send": sends[job.rank] + once, "recv": receives[job.rank] + once},
        textbook=Fraction(x * sum(sends), job.ranks),
        held=most,
    )


def checked_stages(job: Job, plans: Sequence[Plan], layers: Sequence[int] | None) -> list[Stage]:
    job.require("cost.pp", precision=("float32",), recompute=("none",))
    work = [step for plan in plans for step in plan if kind_of(step) in "FBIW"]
    micro_batches = 1 + max(step.microbatch for step in work)
    if (len(plans), micro_batches) != (job.ranks, job.accumulation):
        raise ValueError(
            f"the plans are for {len(plans)} ranks and {micro_batches} micro-batches: a job of {job.ranks} ranks and "
            f"accumulation={job.accumulation} is not theirs"
        )
    return stages_of(job, layers or 1 + max(step.stage for step in work))


def kind_of(step: Any) -> str:
    """Return "F", "B", "I", "W", "Send", "Receive" or "Sent".

    The class is compared by its name, since nothing here imports what it predicts.
    """
    return type(step).__name__


def count(plan: Plan, kind: str) -> int:
    return sum(kind_of(step) == kind for step in plan)


def numbers_of(plan: Plan) -> list[int]:
    """Return the numbers of the stages that a rank has."""
    return sorted({step.stage for step in plan if kind_of(step) == "F"})


def exchanged(job: Job, plans: Sequence[Plan]) -> int:
    """Return the bytes of the rank's part of a tied gradient if another rank has the other part, else 0."""
    numbers = numbers_of(plans[job.rank])
    has_one = (0 in numbers) != (max(map(max, map(numbers_of, plans))) in numbers)
    return FLOAT * job.config.vocab * job.config.dim * (job.config.tied and has_one)


# ---- held ------------------------------------------------------------------------------------------------


def pp_held(job: Job, stages: Sequence[Stage], plan: Plan, table: int) -> HeldBytes:
    """Return the bytes held in a step; comm and temporary are in the peak alone."""
    numbers = numbers_of(plan)
    if job.config.tied and len(stages) > 1 and {0, len(stages) - 1} <= {*numbers}:  # the head's gradient comes first
        stages = [replace(stages[0], has_table=False), *stages[1:]]
    sizes = [size for n in numbers for size in stages[n].sizes]
    moments = [*pp_moments(job, stages, plan)]
    A, G = moments[0].A, FLOAT * sum(sizes)
    moments.append(Moment("tied", G, A, table, 2 * table))  # the two parts and their sum
    moments.append(optimizer_step(A, G, 0, sizes))
    most = held(FLOAT * sum(sizes), optimizer_state(sizes), moments)
    return replace(most, comm=None, temporary=None)


def pp_moments(job: Job, stages: Sequence[Stage], plan: Plan, adds_later: bool = False) -> Iterator[Moment]:
    """Yield the bytes besides P and S, step by step of the plan.

    F leaves the stage's activations, and its output until it is sent. B frees the activations, and leaves the
    gradients, and that of the stage's input until it is sent. The instruction I leaves what W needs, and W leaves the
    gradients of the matrices.
    """
    x, here, last = FLOAT * job.tokens * job.config.dim, numbers_of(plan), len(stages) - 1
    batch = INDEX * job.tokens * job.accumulation * ((0 in here) + (last in here))
    now, there = Moment("batch", A=batch), set()
    yield now
    for step in plan:
        kind = kind_of(step)
        if kind == "Receive":  # a stage's input is saved for backward
            now = replace(now, A=now.A + x) if kind_of(step.message) == "F" else now.plus(comm=x)
        elif kind == "Sent":
            now = now.plus(comm=-x)
        elif kind != "Send":
            stage, new = stages[step.stage], {(step.stage, part) for part in ENDS[kind]} - there
            there |= new
            yield from (beside(now, at) for at in stage.during(kind, bool(new), adds_later))
            inputs, gradients = stage.for_W(stage.job.config.depth)
            # The input came in before F, and the gradient of the output before B; those of others go out.
            came, goes = x * (not stage.is_first), x * (not stage.is_last)
            stays = goes if step.stage + 1 in here else 0  # the next stage is on this rank, and saves it as its input
            A = {"F": stage.kept - came + stays, "B": -stage.kept, "I": inputs - stage.kept, "W": -inputs}[kind]
            comm = {"F": goes - stays, "B": came - goes, "I": gradients + came - goes, "W": -gradients}[kind]
            now = replace(now, A=now.A + A).plus(FLOAT * sum(getattr(stage, part) for _, part in new), comm)
        yield now


# The parameters whose gradients each instruction computes.
ENDS = {"F": (), "B": ("vectors", "matrices"), "I": ("vectors",), "W": ("matrices",)}


def beside(now: Moment, at: Moment) -> Moment:
    return replace(now.plus(at.G, at.comm, at.temporary), name=at.name, A=now.A + at.A)
