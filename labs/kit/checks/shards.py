"""Is each rank left with its shard?  What the stages of ZeRO must get right, for layers that are flat vectors.

    partition_optimizer    each rank's optimizer has 1/N of the vector; after its step everybody has all of it
    gradient_ready         a gradient goes to its owners as soon as it is there, and is dropped
    gather_and_drop        a layer's parameters are there while it computes, and only then

What must come out is what one process has (flat_layers.py, pieces.py).  The bytes sent are those of a reduce-scatter
and an all-gather.  The bytes held are looked at over whole steps: what is there only for a moment counts as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from labs.kit.checks.answer import Wrong, answered
from labs.kit.checks.flat_layers import Case, come_and_go, partition, passes, scatter
from labs.kit.checks.launching import blame_luck, job
from labs.kit.checks.pieces import judge_gathered, judge_partition, judge_scatter
from labs.kit.launch import Results
from labs.kit.record import Event, Recording

LAYERS, WIDE = 10, 64  # of the model whose bytes held are measured: layers, and dimensions of each
BUFFERS = 4.5  # layers: the one in flight, and its copies on the way
SLACK = 1.25  # layers: a buffer that is used again may stay
BF16, FP32 = torch.bfloat16, torch.float32


# ---- the checks ------------------------------------------------------------------------------------------


@answered
def partition_optimizer(fn: Callable[..., Any], seed: int) -> str:
    """`fn(full, make) -> step`: `make([params])` is an optimizer; `step()` updates `full`, with 1/N of its state here.

    `full` [n], an nn.Parameter, is the same on all ranks; step() is called after backward, on every rank.
    """
    draw = Draw(seed)
    cases = {
        3: [draw.case(3), draw.case(3, optimizer="AdamW", micro_batches=2, tied=True, steps=3)],
        2: [draw.case(2, micro_batches=2), draw.case(2, optimizer="AdamW", frozen=True)],
        4: [
            draw.case(4, optimizer="SGD with momentum", dtype=FP32, shards=FP32, steps=3),
            draw.case(4, optimizer="AdamW"),
            draw.case(4, tied=True, idle=True, alike=True),
        ],
    }
    for played in play(partition, fn, cases=cases):
        played.judged_by(judge_partition)
        only_its_own(played)
        sent = 2 * played.sent(2 * vectors(played.case), once_a_step=True)
    case = draw.wide(optimizer="AdamW")
    held = Held(case, job(partition, fn, [case], ranks=4, record="memory"))
    # The gradients (whole, in stage 1), and of a shard: two moments, perhaps a copy of it, and its gradient.
    held.at_most((1 + 4 / 4) * LAYERS, "parameters", KEEPS_COPIES, KEEPS_COPIES)
    state = held.peak("S") / (2 * LAYERS)
    copy = " (a copy of the shard included)" if state > 0.3 else ""
    return (
        f"you hold {state:.2f} × the optimizer's state per rank{copy}, and sent {sent:.2f} × the vector per step; "
        "the least possible is 0.25 × and 1.50 ×"
    )


@answered
def gradient_ready(fn: Callable[..., Any], seed: int) -> str:
    """`fn(full, shard)`, whenever `full.grad` is complete: `shard.grad` gains its shard of the mean; full.grad goes.

    full [n], shard [n / N]: nn.Parameters; shard.grad is None, or the sum over the micro-batches so far.
    """
    draw = Draw(seed)
    cases = {
        3: [draw.case(3), draw.case(3, micro_batches=3, tied=True)],
        2: [draw.case(2, micro_batches=2), draw.case(2, dtype=FP32, shards=FP32, frozen=True)],
        4: [
            draw.case(4, micro_batches=2, frozen=True),
            draw.case(4, dtype=BF16, shards=BF16),
            draw.case(4, tied=True, idle=True, alike=True),
        ],
    }
    for played in play(scatter, fn, cases=cases):
        played.judged_by(judge_scatter)
        sent = played.sent(vectors(played.case) * played.case.micro_batches)
    case = draw.wide(micro_batches=2)
    held = Held(case, job(scatter, fn, [case], ranks=4, record="memory"))
    kept = held.at_most(LAYERS / 4, "parameters", KEEPS_GRADIENTS, FREES_LATE)
    return (
        f"besides the layer in flight you held {kept / LAYERS:.2f} × the gradients, and sent {sent:.2f} × the "
        "gradients per rank and micro-batch; the least possible is 0.25 × and 0.75 ×"
    )


@answered
def gather_and_drop(gather: Callable[..., Any], drop: Callable[..., Any], seed: int) -> str:
    """`gather(full, shard)` fills full's storage with everybody's shards, in full's dtype; `drop(full)` empties it.

    full [n], shard [n / N]: nn.Parameters; between a drop and the next gather, full's storage has 0 bytes.
    """
    draw = Draw(seed)
    cases = {
        3: [draw.case(3), draw.case(3, tied=True, frozen=True)],
        2: [draw.case(2, shards=FP32, dtype=FP32), draw.case(2, shards=FP32, dtype=BF16)],
        4: [draw.case(4, tied=True), draw.case(4, shards=FP32, dtype=BF16, frozen=True)],
    }
    for played in play(come_and_go, gather, drop, cases=cases):
        played.judged_by(judge_gathered)
        gathered = sum(size for size, _ in passes(played.case, played.case.sizes()))
        itemsize = played.case.dtype.itemsize
        sent = played.sent(gathered * itemsize, at_least=sum(played.case.sizes()) * itemsize)
    case = draw.wide(dtype=BF16)
    held = Held(case, job(come_and_go, gather, drop, [case], ranks=4, record="memory"))
    held.at_most(0, "shards", KEEPS_PARAMETERS, MORE_THAN_A_LAYER)
    most = held.peak("P")
    return (
        f"you held {most:.2f} × a layer besides the shards, and sent {sent:.2f} × a layer for each gather; "
        "the least possible is 1.00 × and 0.75 ×"
    )


class Draw:
    """Cases by chance."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def case(self, ranks: int, alike: bool = False, **options: Any) -> Case:
        """alike: all layers have one size."""
        first, *others = (self.random.choice(sizes) for sizes in ((5, 7), (8, 9, 11), (6, 10, 13)))
        dims = (first,) * 4 if alike else (first, *others, first)
        return Case(self.random.randrange(2**40), ranks, dims, **options)

    def wide(self, **options: Any) -> Case:
        """The case whose bytes held are measured: always the same sizes, so that the line of success is."""
        options = {"dtype": FP32, "shards": FP32, "steps": 3, "held": True} | options
        return Case(self.random.randrange(2**40), 4, (WIDE,) * (LAYERS + 1), **options)


@dataclass(frozen=True)
class Played:
    """What became of one case."""

    case: Case
    runs: list[Any]  # by rank: what the body returned for this case
    recording: Recording
    steps: range  # those of the recording

    @property
    def events(self) -> list[Event]:
        return [event for event in self.recording.events if event.step in self.steps]

    def judged_by(self, judge: Callable[[Case, list[Any]], None]) -> None:
        try:
            judge(self.case, self.runs)
        except Wrong as wrong:
            raise blame_luck(wrong, self.events) from None

    def sent(self, whole: int, once_a_step: bool = False, at_least: int | None = None) -> float:
        """(N - 1) / N of `whole` bytes in each step: no rank more, all of them no less; how many × rank 0 sent.

        at_least: where one may send less than `whole`, and hold more.
        """
        case, least = self.case, whole * (self.case.ranks - 1) / self.case.ranks
        for step, rank in product(self.steps, range(case.ranks)):
            sent = self.recording.sent(rank, step)
            if sent > 1.02 * least + 8 * case.ranks:
                text = f"{case}: rank {rank} sent {sent:,} bytes in a step; {least:,.0f} are enough"
                if once_a_step and case.micro_batches > 1:  # and with one it was right
                    question = "When do the other ranks need your gradients, if the optimizer steps once?"
                    raise Wrong(text, question, "synchronised at every micro-batch")
                raise too_many(case, text, self.events)
        for step in self.steps[-case.steps :]:
            sent = sum(self.recording.sent(rank, step) for rank in range(case.ranks))
            due = (case.ranks - 1) * (at_least or whole)
            if sent < 0.98 * due:
                raise Wrong(
                    f"{case}: the ranks sent {sent:,} bytes in a step; {due:,} is the least possible",
                    "How else did the numbers get there?",
                    "less than the least possible",
                )
        return self.recording.sent(0, self.steps[-1]) / whole


def play(body: Callable[..., list[Any]], *fns: Callable[..., Any], cases: dict[int, list[Case]]) -> Iterator[Played]:
    """All cases, by number of ranks: those of one number in one job."""
    for ranks, of_one_job in cases.items():
        try:
            results = job(body, *fns, of_one_job, ranks=ranks)
        except Wrong as wrong:
            raise hinted(wrong) from None
        begin = 0
        for index, case in enumerate(of_one_job):
            steps = range(begin, begin + case.steps + (body is partition))  # the building is one, too
            yield Played(case, [results[rank][index] for rank in range(ranks)], results.recording, steps)
            begin = steps.stop


def hinted(wrong: Wrong) -> Wrong:
    """What torch says of two common slips, by their names."""
    text = wrong.answer.text
    if any(sign in text for sign in ("storage of size 0", "SIGSEGV", "SIGBUS")):
        question = "How many bytes does full's storage have when gather begins, and how many when the numbers arrive?"
        return Wrong(text, question, "there is no memory to gather into")
    if any(sign in text for sign in ("is being modified inplace", "is being used in an in-place operation")):
        question = "What on this line is still a Parameter, and which attribute of it is unseen by autograd?"
        return Wrong(text, question, "autograd sees the change")
    return wrong


def vectors(case: Case) -> int:
    """Bytes of all layers that are trained."""
    return sum(size for i, size in enumerate(case.sizes()) if not (case.frozen and i == 1)) * case.dtype.itemsize


# ---- the optimizers --------------------------------------------------------------------------------------


def only_its_own(played: Played) -> None:
    """One optimizer for each layer, of 1/N of its elements."""
    case = played.case
    due = vectors(case) // case.dtype.itemsize // case.ranks
    for rank, run in enumerate(played.runs):
        if len(run.elements) > run.first:
            raise Wrong(
                f"{case}: on rank {rank} there are {run.first} optimizers after the first step, and "
                f"{len(run.elements)} after the last",
                "Where are the moments of earlier steps?",
                "a new optimizer in every step",
            )
        if sum(run.elements) > due:
            alike = {event.op for event in played.events} <= {"all_reduce"}
            raise Wrong(
                f"{case}: rank {rank}'s optimizers have {sum(run.elements)} elements; {due} are its own",
                "Which rank needs the state of which elements, if each updates only its own?",
                "nothing is sharded" if alike else "the whole optimizer state is kept",
            )
        if sum(run.elements) < due:
            raise Wrong(
                f"{case}: rank {rank}'s optimizers have {sum(run.elements)} elements; {due} are its own",
                "Who updates the other elements?",
                "an optimizer of too few elements",
            )


# ---- bytes sent ------------------------------------------------------------------------------------------


def too_many(case: Case, text: str, events: list[Event]) -> Wrong:
    wider = {e.dtype for e in events if getattr(torch, e.dtype or "bool").itemsize > case.dtype.itemsize}
    if wider and case.shards != case.dtype:
        question = "In which dtype does the layer compute, and what do the extra digits cost on the way?"
        return Wrong(f"{text}; they travel as {' and '.join(wider)}", question, "the compute dtype is ignored")
    if wider:
        return Wrong(text, f"Who needs {' and '.join(wider)}?", "a different dtype travels")
    if any(event.op == "all_reduce" and event.bytes_in > 64 for event in events):
        question = "An all-reduce brings everything to everybody. Who needs which part?"
        return Wrong(text, question, "an all-reduce where a part is enough")
    return Wrong(text, "How often does each number travel, and who needs it?", "too many bytes")


# ---- bytes held ------------------------------------------------------------------------------------------

BYTES = ("P", "G", "S", "comm", "temporary")
KEEPS_COPIES = ("full copies are kept", "What do you keep from one step to the next, and how large is it?")
KEEPS_GRADIENTS = (
    "the whole gradient is kept elsewhere",
    "Which of your variables still refers to the whole gradient?",
)
KEEPS_PARAMETERS = ("copies of full parameters are kept", "Which of your variables still refers to what was gathered?")
FREES_LATE = ("freed only at the end of backward", "How many layers' gradients are there when the last one comes?")
MORE_THAN_A_LAYER = ("more than a layer at a time", "How many copies of the layer are there while you gather it?")


class Held:
    """Bytes that each rank held over whole steps, beyond what was there before the first; in layers.

    Without activations.  Of several steps the least, as a backend's thread may keep a tensor a moment longer.
    """

    def __init__(self, case: Case, results: Results) -> None:
        self.case, self.recording = case, results.recording
        self.layer = case.sizes()[0] * case.dtype.itemsize

    def during(self, rank: int, step: int, *kinds: str) -> list[float]:
        """What was there when a step began, and after each change."""
        base = self.recording.during(rank, 0, kinds)[0][1]
        return [(size - base) / self.layer for _, size in self.recording.during(rank, step, kinds)]

    def most(self, rank: int, *kinds: str) -> float:
        return min(max(self.during(rank, step, *kinds)) for step in range(1, self.recording.steps))

    def at_rest(self, rank: int, *kinds: str) -> float:
        """When one of the last steps is over: what is kept from step to step would have grown."""
        return min(self.during(rank, step, *kinds)[-1] for step in range(self.recording.steps)[-2:])

    def peak(self, kind: str) -> float:
        return max(self.most(rank, kind) for rank in range(self.case.ranks))

    def at_most(self, layers: float, beside: str, kept: tuple[str, str], in_between: tuple[str, str]) -> float:
        """`layers` when a step is over, and a few more in between.  Two names, each with its question.

        Returns what is held when a step is over.
        """
        rests = []
        for rank in range(self.case.ranks):
            rest, most = self.at_rest(rank, *BYTES), self.most(rank, *BYTES)
            stays = rest > layers + SLACK
            if stays or most > layers + BUFFERS:
                found, when = (rest, "when a step is over") if stays else (most, "at a moment of the step")
                mistake, question = kept if stays else in_between
                raise Wrong(
                    f"{self.case}, {LAYERS} layers: besides the {beside}, rank {rank} held {found:.2f} × a layer "
                    f"{when}; {layers:g} × {'is' if stays else 'and a layer in flight are'} enough",
                    question,
                    mistake,
                )
            rests.append(rest)
        return max(rests)
