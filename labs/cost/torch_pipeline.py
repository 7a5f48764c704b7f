"""PyTorch's own pipelines: what a rank sends and holds in a step, in the layouts of `labs.native.pp` and `.parallel`.

They send what `labs.cost.pp` and `.parallel` say, and hold stages as `labs.cost.torch_stages` has them.  Besides:

    logits      of all micro-batches stay until the next step; as the schedule ends, they are put together besides
    what comes  has a buffer for each micro-batch and each cut, all of them there from the first step on
    what goes   stays until the step is over; under 1F1B mostly until its backward is done, a gradient until the next
                one is
    shards      are gathered at the first micro-batch, and gradients are whole until the last one is through; at rest
                they have padding

Tied weights are left to the caller.

Read in PyTorch 2.13: torch/distributed/pipelining.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from labs.cost.job import Job
from labs.cost.model_states import FLOAT, INDEX, Held, Moment, Prediction, held, optimizer_state, optimizer_step
from labs.cost.on_a_mesh import Own, on_mesh, parallel
from labs.cost.pipeline import Plan, beside, checked_stages, kind_of, numbers_of, step_of
from labs.cost.pipeline_stages import StageMemory
from labs.cost.split import share
from labs.cost.torch_stages import TorchStage
from labs.cost.traffic import all_reduce


def pipelining(job: Job, plans: Sequence[Plan], layers: Sequence[int] | None = None) -> Prediction:
    """A step in float32 on CPU: bytes sent, P, G, S and A exactly, the peak within 5 %."""
    stages = torch_stages(checked_stages(job, plans, layers), job.config.vocab)
    sizes = [size for n in numbers_of(plans[job.rank]) for size in stages[n].sizes]
    P = FLOAT * sum(sizes)
    moments = [*torch_moments(job, stages, plans, job.rank)]
    moments += at_the_end(job, stages, plans[job.rank], P, sizes)
    return step_of(job, plans, held(P, optimizer_state(sizes), moments))


def torch_stages(stages: Sequence[StageMemory], words: int) -> list[TorchStage]:
    return [TorchStage(stage.job, stage.is_first, stage.is_last, words=words) for stage in stages]


# ---- held ------------------------------------------------------------------------------------------------


def torch_moments(job: Job, stages: Sequence[TorchStage], plans: Sequence[Plan], rank: int) -> Iterator[Moment]:
    """Bytes beside P and S while the schedule runs, step by step."""
    here, last, x = numbers_of(plans[rank]), len(stages) - 1, stages[0].x
    all_stay, now, seen = not any(map(is_one_f_one_b, plans)), buffers(job, stages, plans[rank]), Counter()
    for step in plans[rank]:
        if kind_of(step) not in "FBIW" or not (kind := stages[step.stage].does(kind_of(step))):
            continue
        stage, seen[step.stage, kind] = stages[step.stage], seen[step.stage, kind] + 1
        from_afar, to_afar = (0 <= n <= last and n not in here for n in (step.stage - 1, step.stage + 1))
        is_first = seen[step.stage, kind] == 1
        yield from (beside(now, at) for at in stage.during(kind, is_first))
        now = beside(now, stage.after(kind))
        if kind in "BW" and is_first:
            now = now.plus(G=FLOAT * stage.made)
        if kind == "F":
            yield replace(now, A=now.A + x * (step.stage + 1 in here))  # the buffer that it takes the place of
            now = now.plus(comm=x * to_afar)
        elif kind in "BI":
            yield now.plus(comm=x * from_afar)
            go = 0 if all_stay else let_go(plans[rank], seen[step.stage, kind] - 1)
            now = now.plus(comm=x * from_afar * (all_stay or is_first) - x * to_afar * go)
        yield now


def buffers(job: Job, stages: Sequence[TorchStage], plan: Plan) -> Moment:
    """What is there before the first micro-batch: the batch, and room for all messages."""
    here, last, x = numbers_of(plan), len(stages) - 1, stages[0].x * job.accumulation
    batch = INDEX * job.tokens * job.accumulation * ((0 in here) + (last in here))
    afar, near = (sum(n < last and (n + 1 in here) == is_near for n in here) for is_near in (False, True))
    return Moment("batch", A=batch + x * sum(n > 0 for n in here), comm=x * afar, temporary=x * near)


def at_the_end(job: Job, stages: Sequence[TorchStage], plan: Plan, G: int, sizes: Sequence[int]) -> Iterator[Moment]:
    """Logits are put together; the optimizer steps."""
    has_end = len(stages) - 1 in numbers_of(plan)
    logits, losses = (n * job.accumulation * has_end for n in (stages[-1].logits, FLOAT))
    now = buffers(job, stages, plan).plus(G=G, temporary=logits + losses)
    yield now.plus(temporary=logits)
    yield optimizer_step(now.A, G, now.comm, sizes).plus(temporary=now.temporary - FLOAT)


def is_one_f_one_b(plan: Plan) -> bool:
    """Whether a rank of one stage goes back before it has gone forward with all micro-batches."""
    kinds = [kind_of(step) for step in plan if kind_of(step) in "FBIW"]
    return len(numbers_of(plan)) == 1 and kinds != sorted(kinds, reverse=True)


def let_go(plan: Plan, number: int) -> int:
    """How many outputs go with a backward of 1F1B: its own; but the last one that was sent by itself before there was a
    backward is waited for only when all have gone forward."""
    kinds = [kind_of(step) for step in plan if kind_of(step) in "FB"]
    late, waited = kinds.index("B") - 2, kinds.count("F") - kinds.index("B")
    return 1 + (number == waited) - (number == late) if 0 <= late < waited else 1


# ---- on a mesh -------------------------------------------------------------------------------------------


def pipelining_on_a_mesh(job: Job, plans: Sequence[Plan], axes: Mapping[str, int]) -> Prediction:
    """`labs.native.parallel`: bytes sent, P, G, S and A exactly, the peak within 5 %."""
    step, own = parallel(job, plans, axes), on_mesh(job, plans, axes)
    row, ends = replace(job, ranks=axes["tp"], rank=own.at["tp"]), len(own.stages) - 1 in own.numbers
    one, two = (FLOAT * all_reduce(n, row.ranks, row.rank).elements for n in (job.tokens, 2 * job.tokens))
    times = job.accumulation * (ends and axes["tp"] > 1)
    counts = Counter(step.collectives) + Counter({"all_reduce": times})
    sent = step.sent + times * (2 * one - two)
    return replace(step, sent=sent, collectives=dict(counts), held=on_a_mesh_held(own, plans))


def on_a_mesh_held(own: Own, plans: Sequence[Plan]) -> Held:
    """Sharded, P and G are chunks with padding, and what is whole counts as comm.  Split and not sharded, parts are as
    long as the longest one, and the embedding's gradient is that of all words."""
    stages, at, tp = torch_stages(own.stages, own.job.config.vocab), own.at["pp"], own.axes["tp"]
    job, mine = replace(own.job, config=stages[0].job.config), [stages[number] for number in own.numbers]
    moments, P = [*torch_moments(job, stages, plans, at)], FLOAT * own.padded // own.axes["shard"]
    G = P
    if own.shards_data:
        moments = [replace(now, G=0).plus(comm=FLOAT * own.padded + now.G) for now in moments]
    elif tp > 1:
        P = FLOAT * sum(sum(widest(stage, own.job, tp).sizes) for stage in mine)
        G = FLOAT * sum(stage.made for stage in mine)
    moments += at_the_end(job, stages, plans[at], G, own.chunks)
    most = held(P, optimizer_state(own.chunks), moments)
    mesh = (INDEX + FLOAT) * job.ranks  # the ranks' numbers, ours and its own
    return replace(most, temporary=most.temporary + mesh, peak=most.peak + mesh)


def widest(stage: TorchStage, job: Job, tp: int) -> TorchStage:
    """The same stage of the rank that has the longest parts."""
    config = replace(share(job.config, tp), depth=stage.job.config.depth, tied=False)
    return replace(stage, job=replace(stage.job, config=config))
