"""Are these the gradients of the whole batch?  What data parallelism must get right, on an awkward model.

    average_gradients    after one backward on every rank: each gradient becomes the mean over the ranks
    accumulation         several micro-batches, one synchronisation
    data_parallel        any wrapper, through several steps of training

A step's reference is plain: before it, each rank takes the gradient of each of its micro-batches on a copy of its own
that nobody has wrapped.  What must come out is their mean over all ranks; whatever else came out is taken apart into
those same gradients, by least squares, and the coefficients name the mistake:

    found on rank 1 = Σ c[rank, i] × (gradient of micro-batch i of that rank)

    all c equal            too large by N: summed; by k: the loss not divided; too small: divided twice
    c zero but for rank 1  nothing came from the others
    only the last column   only the last micro-batch was synchronised

The bytes are a ring's: 2 (N - 1) / N of the gradients per rank and step, however many micro-batches there are.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.ddp import Naive, Overlapped
from labs.kit.checks.answer import Wrong, answered, instead, job, show
from labs.kit.checks.wire import Cargo
from labs.kit.launch import Results
from labs.kit.record import Event, Recording, mark

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LEARNING_RATE = 0.1
WIDE = 64  # dimensions of the model whose bytes held are measured
BUFFERS = 2.5  # × the gradients
AVERAGED_PARAMETERS = "parameters averaged instead of gradients"
Gradients = dict[str, Tensor | None]
MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One model and what it is trained on."""

    seed: int
    ranks: int
    micro_batches: int = 1
    steps: int = 1
    dtype: torch.dtype = torch.float64
    sizes: tuple[int, int, int] = (11, 7, 13)  # vocabulary, dim, hidden
    spare: bool = False  # a trainable parameter that nobody uses
    equal: bool = True  # replicas start equal
    overlapped: bool = False

    def model(self, rank: int = 0) -> Awkward:
        return Awkward(self, seed=self.seed if self.equal else self.seed + rank)

    def batch(self, rank: int, step: int) -> list[MicroBatch]:
        """The micro-batches of a rank, each of 2 sequences of 5 tokens: (inputs, targets)."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * step + rank)
        tokens = torch.randint(0, self.sizes[0], (self.micro_batches, 2, 6), generator=generator)
        return [(x[:, :-1], x[:, 1:]) for x in tokens]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        times = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{self.ranks} ranks{times}, {dtype}"


class Awkward(nn.Module):
    """Tied, frozen and (on request) unused parameters, odd sizes, a parameter without dimensions.

    `model(tokens_BT, targets_BT)` is the mean cross-entropy loss, as of the course's GPT.
    """

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        self.case = case
        vocabulary, dim, hidden = case.sizes
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, dim)
        self.hidden = nn.Linear(dim, hidden)
        self.frozen = nn.Linear(hidden, hidden)
        self.square = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.ones(()))
        if case.spare:
            self.spare = nn.Linear(dim, 3)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.to(case.dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        x = x + self.scale * self.out(torch.tanh(self.frozen(self.square(torch.tanh(self.hidden(x))))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets_BT.flatten())

    def gradients(self) -> Gradients:
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.named_parameters()}

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named_parameters()}


@dataclass
class Step:
    """What one rank saw of one step."""

    plain: list[Gradients]  # by micro-batch, on the copy; unscaled
    found: Gradients = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)  # the parameters, before the optimizer moves them
    losses: list[tuple[float, float]] = field(default_factory=list)  # the wrapper's, the copy's
    complaint: str = ""
    thawed: str = ""  # a parameter whose requires_grad has changed
    parameters_sent: int = 0  # collectives that were given a parameter's own memory

    def look_at(self, model: Awkward, cargo: Cargo) -> None:
        self.found, self.after, self.parameters_sent = model.gradients(), model.values(), cargo.count
        for name, p in model.named_parameters():
            if p.requires_grad == name.startswith("frozen"):
                self.thawed = name


# ---- the checks ------------------------------------------------------------------------------------------


@answered
def average_gradients(fn: Callable[..., Any], seed: int) -> str:
    """`fn(model)`, on every rank after its backward: every gradient becomes the mean over all ranks."""
    draw = Draw(seed)
    cases = {
        3: [draw.case(3), draw.case(3, spare=True)],
        2: [draw.case(2), draw.case(2, spare=True), draw.case(2, dtype=torch.float32)],
        4: [draw.case(4), draw.case(4, spare=True), draw.budget(4)],
    }
    for ranks in cases:
        results = job(average_once, fn, cases[ranks], ranks=ranks)
        judge_all(cases[ranks], results)
    bytes_held(average_once, fn, draw.wide(4))
    return sent_line(cases[4], results.recording, "")


@answered
def accumulation(fn: Callable[..., Any], seed: int) -> str:
    """`fn(model, micro_batches)`: all backwards of a step and one synchronisation.

    `model` is one of labs.ddp's; `model(*micro_batch)` is the mean loss of a micro-batch, all of them equally large.
    Afterwards each gradient is that of the mean loss of all micro-batches of all ranks.
    """
    draw = Draw(seed)
    cases = {
        3: [draw.case(3, micro_batches=2), draw.case(3, micro_batches=4, overlapped=True)],
        2: [draw.case(2), draw.case(2, micro_batches=3), draw.case(2, micro_batches=3, overlapped=True)],
        4: [draw.case(4, micro_batches=3, dtype=torch.float32), draw.budget(4, micro_batches=4)],
    }
    for ranks in cases:
        results = job(accumulate_once, fn, cases[ranks], ranks=ranks)
        judge_all(cases[ranks], results)
    one_graph_at_a_time(fn, draw)
    return sent_line(cases[4], results.recording, " and step, for 4 micro-batches")


@answered
def data_parallel(wrap: Callable[..., Any], seed: int) -> str:
    """`wrap(model)` -> a module with `forward`, `no_sync()` and `sync()`; sync may be missing if backward waits.

    Trained for several steps, with and without accumulation; replicas that start unequal must be refused or made equal.
    """
    draw = Draw(seed)
    cases = {
        3: [draw.case(3, steps=3), draw.case(3, micro_batches=3, steps=2)],
        2: [draw.case(2, micro_batches=2, steps=3), draw.case(2, steps=2, dtype=torch.float32)],
        4: [
            draw.case(4, micro_batches=2, steps=2),
            draw.case(4, steps=2, dtype=torch.float32),
            draw.budget(4, steps=3),
        ],
    }
    for ranks in cases:
        results = job(train, wrap, cases[ranks], ranks=ranks)
        judge_all(cases[ranks], results)
    unequal_replicas(wrap, draw)
    unused_parameter(wrap, draw)
    bytes_held(train, wrap, draw.wide(4, steps=2))
    return sent_line(cases[4], results.recording, " and step")


class Draw:
    """Cases by chance."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def case(self, ranks: int, **options: Any) -> Case:
        sizes = tuple(self.random.choice(odd) for odd in ((9, 11, 13), (5, 7), (11, 13, 17)))
        return Case(self.random.randrange(2**40), ranks, sizes=sizes, **options)

    def budget(self, ranks: int, **options: Any) -> Case:
        """The case of the line of success: always the same sizes, so that the line is."""
        return Case(self.random.randrange(2**40), ranks, dtype=torch.float32, **options)

    def wide(self, ranks: int, **options: Any) -> Case:
        """The case whose bytes held are measured: parameters outweigh everything else."""
        return Case(self.random.randrange(2**40), ranks, dtype=torch.float32, sizes=(WIDE, WIDE, WIDE), **options)


# ---- what runs on each rank ------------------------------------------------------------------------------


def average_once(fn: Callable[..., Any], cases: list[Case]) -> list[list[Step]]:
    def one(case: Case) -> list[Step]:
        rank = dist.get_rank()
        model = case.model()
        batch = case.batch(rank, 0)
        step = Step(plain(model, batch), before=model.values())
        model(*batch[0]).backward()
        with Cargo(model.parameters(), case.seed + rank) as cargo:
            mark("step")
            fn(model)
            mark("end")
        step.look_at(model, cargo)
        return [step]

    return [one(case) for case in cases]


def accumulate_once(fn: Callable[..., Any], cases: list[Case]) -> list[list[Step]]:
    def one(case: Case) -> list[Step]:
        rank = dist.get_rank()
        model = case.model()
        batch = case.batch(rank, 0)
        step = Step(plain(model, batch), before=model.values())
        wrapped = Overlapped(model, bucket_bytes=500) if case.overlapped else Naive(model)
        with Cargo(model.parameters(), case.seed + rank) as cargo:
            mark("step")
            fn(wrapped, batch)
            mark("end")
        step.look_at(model, cargo)
        return [step]

    return [one(case) for case in cases]


def train(wrap: Callable[..., Any], cases: list[Case]) -> list[list[Step]]:
    def one(case: Case) -> list[Step]:
        rank = dist.get_rank()
        model = case.model(rank)
        wrapped = wrap(model)
        if complaint := not_a_wrapper(wrapped, model):
            for _ in range(case.steps):
                mark("step")
            return [Step([], complaint=complaint)] * case.steps
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
        steps = []
        for number in range(case.steps):
            batch = case.batch(rank, number)
            step = Step(plain(model, batch), before=model.values())
            expected = plain_losses(model, batch)
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            with Cargo(model.parameters(), case.seed + 64 * number + rank) as cargo:
                mark("step")
                losses = backward_of_all(wrapped, batch)
                mark("end")
            step.look_at(model, cargo)
            step.losses = list(zip(losses, expected, strict=True))
            optimizer.step()
            steps.append(step)
        return steps

    return [one(case) for case in cases]


def backward_of_all(wrapped: nn.Module, batch: list[MicroBatch]) -> list[float]:
    losses = []
    for i, micro_batch in enumerate(batch):
        last = i == len(batch) - 1
        with contextlib.nullcontext() if last else wrapped.no_sync():
            loss = wrapped(*micro_batch)
            (loss / len(batch)).backward()
        losses.append(float(loss.detach()))
    if hasattr(wrapped, "sync"):
        wrapped.sync()
    return losses


def not_a_wrapper(wrapped: Any, model: nn.Module) -> str:
    """What the wrapper lacks, in words, or ""."""
    if not isinstance(wrapped, nn.Module):
        return f"wrap(model) returned {show(wrapped)}, and not an nn.Module"
    if not hasattr(wrapped, "no_sync"):
        return f"{type(wrapped).__name__} has no no_sync()"
    missing = {id(p) for p in model.parameters()} - {id(p) for p in wrapped.parameters()}
    if missing:
        names = [name for name, p in model.named_parameters() if id(p) in missing]
        return f"{type(wrapped).__name__}.parameters() lacks {names[0]!r}: is the model one of its attributes?"
    return ""


def plain(model: Awkward, batch: list[MicroBatch]) -> list[Gradients]:
    """The gradient of each micro-batch alone, on a copy without any hook."""
    gradients = []
    for micro_batch in batch:
        copied = copy_of(model)
        copied(*micro_batch).backward()
        gradients.append(copied.gradients())
    return gradients


def plain_losses(model: Awkward, batch: list[MicroBatch]) -> list[float]:
    copied = copy_of(model)
    with torch.no_grad():
        return [float(copied(*micro_batch)) for micro_batch in batch]


def copy_of(model: Awkward) -> Awkward:
    """The same parameters in a model that nobody has hung a hook on."""
    copied = Awkward(model.case, seed=0)
    with torch.no_grad():
        for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    return copied


# ---- judgement -------------------------------------------------------------------------------------------


def judge_all(cases: list[Case], results: Results) -> None:
    recorded = itertools.count()
    for index, case in enumerate(cases):
        for number in range(case.steps):
            ranks, step = [results[rank][index][number] for rank in range(case.ranks)], next(recorded)
            events = [event for event in results.recording.events if event.step == step]
            try:
                judge(case, number, ranks, results.recording.sent(0, step))
            except Wrong as wrong:
                raise blame_luck(wrong, events) from None
            budget(case, results.recording, step, ranks)


def blame_luck(wrong: Wrong, events: list[Event]) -> Wrong:
    """Wrong values where somebody did not wait are wrong for that reason.  (What C++ waits for is not seen.)"""
    hasty = [event for event in events if not event.waited and event.op != "barrier" and "C++" not in event.issuer]
    if not hasty or wrong.answer.mistake == "not a wrapper":
        return wrong
    text = f"{wrong.answer.text}\nNobody waited for the {hasty[0].op} of {hasty[0].issuer} on rank {hasty[0].rank}."
    return Wrong(text, "When is the result of a call with async_op=True there?", "nobody waited")


def judge(case: Case, number: int, ranks: list[Step], sent: int) -> None:
    """Raise Wrong for the first thing that is not right in one step."""
    when = f"{case}" + (f", step {number}" if case.steps > 1 else "")
    for rank, step in enumerate(ranks):
        if step.complaint:
            raise Wrong(
                step.complaint, "What does a training loop call on the wrapper, besides forward?", "not a wrapper"
            )
        moved = [name for name in step.before if not torch.equal(step.before[name], step.after[name])]
        if moved:
            raise Wrong(
                f"{when}: on rank {rank} the parameter {moved[0]!r} itself has changed, before optimizer.step()",
                "What must be equal on all ranks before optimizer.step(): the parameters, or their gradients?",
                AVERAGED_PARAMETERS if step.parameters_sent else "the parameters have changed",
            )
        if step.thawed:
            raise Wrong(
                f"{when}: on rank {rank} the requires_grad of {step.thawed!r} has changed",
                "Who decides which parameters are trained?",
                "requires_grad has changed",
            )
        for found, expected in step.losses:
            if abs(found - expected) > 1e-4 * abs(expected):
                raise Wrong(
                    f"{when}: on rank {rank} the loss is {found:.6g}; the model itself gives {expected:.6g}",
                    "What should forward do besides calling the model?",
                    "another loss",
                )
    right_kind(case, when, ranks)
    for name in trained(ranks):
        mean = mean_of(ranks, name)
        for rank, step in enumerate(ranks):
            if not close(step.found[name], mean):
                raise explain(case, when, ranks, rank, name, sent)
    for name in trained(ranks):
        if not all_equal([step.found[name] for step in ranks]):
            raise Wrong(
                f"{when}: the gradient of {name!r} differs between ranks in its last bits",
                "Does every rank add up in the same order? Replicas that differ by a bit drift apart.",
                "not the same bits on every rank",
            )


def right_kind(case: Case, when: str, ranks: list[Step]) -> None:
    """Each gradient is there, or is not, and has its shape and dtype."""
    for rank, step in enumerate(ranks):
        for name, p in step.before.items():
            found, due = step.found[name], step.plain[0][name] is not None
            if due and found is None:
                raise Wrong(
                    f"{when}: on rank {rank} {name!r} has no gradient any more",
                    "Who took it away?",
                    "a gradient is gone",
                )
            if not due and found is not None:
                frozen = name.startswith("frozen")
                why = "is frozen (requires_grad is False)" if frozen else "is used by nobody"
                raise Wrong(
                    f"{when}: {name!r} {why}, but has a gradient on rank {rank}",
                    "What would AdamW with momentum and weight decay do with a gradient of zeros, and what with None?",
                    "a frozen parameter has a gradient" if frozen else "zeros where nobody has a gradient",
                )
            if due and (found.shape != p.shape or found.dtype != p.dtype):
                raise Wrong(
                    f"{when}: on rank {rank} the gradient of {name!r} is {show(found)}; the parameter is {show(p)}",
                    "What does the optimizer expect?",
                    "the dtype changed" if found.dtype != p.dtype else "the shape changed",
                )


def trained(ranks: list[Step]) -> list[str]:
    return [name for name, gradient in ranks[0].plain[0].items() if gradient is not None]


def mean_of(ranks: list[Step], name: str) -> Tensor:
    return torch.stack([micro_batch[name].double() for step in ranks for micro_batch in step.plain]).mean(0)


def close(found: Tensor, mean: Tensor) -> bool:
    tolerance = TOLERANCE[found.dtype]
    return torch.allclose(found.double(), mean, rtol=tolerance, atol=tolerance)


# ---- naming what is wrong --------------------------------------------------------------------------------


def explain(case: Case, when: str, ranks: list[Step], rank: int, name: str, sent: int) -> Wrong:
    """Where the first wrong element is, and of which gradients it is made."""
    found, mean = ranks[rank].found[name], mean_of(ranks, name)
    wrong = ~torch.isclose(found.double(), mean, rtol=1e-4, atol=TOLERANCE[found.dtype])
    at = tuple(int(i) for i in wrong.nonzero()[0]) if wrong.any() else (0,) * found.ndim
    element = f"[{', '.join(map(str, at))}]" if at else ""
    text = (
        f"{when}: on rank {rank} the gradient of {name!r} at {element or 'its only element'} "
        f"is {instead(found[at], mean[at])}"
    )
    mistake, more, question = recognised(case, ranks, rank)
    if ranks[rank].parameters_sent and mistake in ("", "nothing synchronised"):
        mistake, question = AVERAGED_PARAMETERS, "A post-accumulate hook is given p. What is p.grad?"
    elif sent and mistake == "nothing synchronised":
        mistake, question = "the mean does not reach .grad", "Into which tensor does the result go?"
    return Wrong(text + (f"\n{more}" if more else ""), question, mistake)


def recognised(case: Case, ranks: list[Step], rank: int) -> tuple[str, str, str]:
    """(name, sentence, question), as far as the coefficients tell."""
    n, k = len(ranks), case.micro_batches
    names = trained(ranks)
    ok = [name for name in names if close(ranks[rank].found[name], mean_of(ranks, name))]
    wrong = [name for name in names if name not in ok]
    right_ranks = [r for r, step in enumerate(ranks) if all(close(step.found[m], mean_of(ranks, m)) for m in names)]
    if right_ranks:
        return (
            "right on some ranks only",
            f"Right on {listed(right_ranks)}.",
            "How do the other ranks get to know the mean?",
        )
    found, mean = (
        torch.cat([x(m).double().flatten() for m in names])
        for x in (ranks[rank].found.__getitem__, partial(mean_of, ranks))
    )
    if torch.allclose(found, mean, rtol=1e-2, atol=1e-2 * float(mean.abs().max())):
        return "rounded on the way", "It is right but for its last digits.", "In which dtype do the gradients travel?"
    part = f" Right: {', '.join(map(repr, ok))}; wrong: {', '.join(map(repr, wrong))}." if ok else ""
    times = coefficients(ranks, rank, wrong)
    if times is None and all(close(ranks[rank].found[m], mean_of(ranks[rank : rank + 1], m)) for m in wrong):
        return "some parameters are left out", part.strip(), f"What is special about {wrong[0]!r}?"
    if times is None:
        return "", part.strip(), "Which gradients went into this one, and how often?"
    mistake, sentence, question = name_coefficients(times, rank, n, k)
    if wrong == ["embed.weight"] and ok:
        mistake, question = (
            "a tied weight reduced twice",
            "How often does your loop meet a parameter that two modules share?",
        )
    elif mistake == "nothing synchronised" and all_equal([step.found[wrong[0]] for step in ranks]):
        mistake, question = f"rank {rank}'s gradient everywhere", "Is a broadcast a mean?"
    elif ok and mistake == "nothing synchronised":
        mistake, question = "some parameters are left out", f"What is special about {wrong[0]!r}?"
    return mistake, sentence + part, question


def coefficients(ranks: list[Step], rank: int, names: list[str]) -> Tensor | None:
    """c[rank, micro-batch] × N k, so that 1 is right everywhere; None where it cannot be told."""
    sources = [torch.cat([g[name].double().flatten() for name in names]) for step in ranks for g in step.plain]
    found = torch.cat([ranks[rank].found[name].double().flatten() for name in names])
    if len(found) <= len(sources) or not found.isfinite().all():
        return None
    matrix = torch.stack(sources, 1)
    solution = torch.linalg.lstsq(matrix, found).solution
    if not torch.allclose(matrix @ solution, found, rtol=1e-3, atol=1e-3 * float(found.abs().max() + 1e-12)):
        return None
    return (solution * len(sources)).view(len(ranks), -1)


def name_coefficients(times: Tensor, rank: int, n: int, k: int) -> tuple[str, str, str]:
    def all_are(part: Tensor, value: float) -> bool:
        return torch.allclose(part, torch.full_like(part, value), atol=2e-3, rtol=2e-3)

    mine, others = times[rank], torch.cat([times[:rank], times[rank + 1 :]])
    rows = "; ".join(f"rank {r}'s {', '.join(f'{c:.2f}' for c in row)}" for r, row in enumerate(times.tolist()))
    sentence = f"Made of {rows} times what is due{' of each micro-batch' if k > 1 else ''}."
    if all_are(times, 0):
        return "the gradient is zero", "", "Who set it to zero, and when?"
    if all_are(times, n):
        return "summed instead of averaged", sentence, "By what must the sum over the ranks be divided?"
    if k > 1 and (all_are(times, k) or all_are(times, n * k)):
        return (
            "the loss is not divided by the number of micro-batches",
            sentence,
            "What does backward do to a .grad that is there already?",
        )
    if k > 1 and all_are(times, 1 / k):
        return "divided by the number of micro-batches twice", sentence, "Where is it divided, and by whom?"
    if all_are(times, 1 / n):
        return "averaged twice", sentence, "Who divides by the number of ranks, and how often?"
    if all_are(times, float(times[0, 0])):
        factor = float(times[0, 0])
        return "divided by the wrong number", f"It is {factor:.4g} × the mean.", "How many gradients were added up?"
    if k > 1 and all_are(times[:, :-1], 0):
        return "only the last micro-batch counts", sentence, "Where did the gradients of the others go?"
    if k > 1 and all_are(others[:, :-1], 0) and not all_are(others[:, -1], 0):
        return (
            "only the last micro-batch is synchronised",
            sentence,
            "What does your hook see at the last backward: this micro-batch's gradient, or all that is in p.grad?",
        )
    if k > 1 and all_are(others[:, 1:], 0) and not all_are(others[:, 0], 0):
        return "only the first micro-batch is synchronised", sentence, "When is .grad complete?"
    if all_are(others, 0) and not all_are(mine, 0):
        return "nothing synchronised", sentence, "Which call makes the other ranks' gradients arrive here?"
    row = [r for r in range(n) if not all_are(times[r], 0)]
    if len(row) == 1:
        return f"rank {row[0]}'s gradient everywhere", sentence, "Is a broadcast a mean?"
    return "", sentence, "Which gradients went into this one, and how often?"


def all_equal(tensors: list[Tensor]) -> bool:
    return all(torch.equal(tensors[0], tensor) for tensor in tensors)


def listed(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# ---- bytes -----------------------------------------------------------------------------------------------


def budget(case: Case, recording: Recording, step: int, ranks: list[Step]) -> None:
    """What a step sent, against what a ring sends for these gradients."""
    sizes = {name: ranks[0].before[name].nbytes for name in trained(ranks)}
    least = 2 * (case.ranks - 1) * sum(sizes.values())  # of all ranks
    sent = sum(recording.sent(rank, step) for rank in range(case.ranks))
    slack = 0.05 * least + 8 * case.ranks * len(sizes)  # a flag or two for each parameter
    busiest = max(range(case.ranks), key=lambda rank: recording.sent(rank, step))
    most = recording.sent(busiest, step)
    if sent <= least + slack and most <= (least + slack) / case.ranks + 16 * len(sizes):
        return
    if sent <= least + slack:
        raise Wrong(
            f"{case}: rank {busiest} sent {most:,} bytes in one step, of {sent:,} by all ranks together",
            "How long do the others wait for this rank?",
            "one rank does the work for all",
        )
    times, text = sent / least, f"{case}: the ranks sent {sent:,} bytes in one step; a ring sends {least:,}"
    extra = (sent - least) / (2 * (case.ranks - 1))
    frozen = sum(v.nbytes for name, v in ranks[0].before.items() if name.startswith("frozen"))
    if case.micro_batches > 1 and abs(times - case.micro_batches) < 0.1:
        raise Wrong(
            text,
            "When do the other ranks need your gradients, if the optimizer steps once?",
            "synchronised at every micro-batch",
        )
    if abs(extra - sizes["embed.weight"]) <= 8 * len(sizes):
        raise Wrong(
            text, "How often does your loop meet a parameter that two modules share?", "a tied weight reduced twice"
        )
    if abs(extra - frozen) <= 8 * len(sizes):
        raise Wrong(text, "Which parameters will never have a gradient?", "frozen parameters are sent")
    if case.dtype is torch.float32 and abs(times - 2) < 0.05 and case.ranks != 4:
        raise Wrong(text, "In which dtype do they travel, and how often?", "sent twice")
    raise Wrong(text, "What does each rank send to whom, and how often does the same number travel?", "too many bytes")


def sent_line(cases: list[Case], recording: Recording, per: str) -> str:
    """The line of success, from the last step of the last case."""
    case, step = cases[-1], sum(case.steps for case in cases) - 1
    model = case.model()
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    sent = sum(recording.sent(rank, step) for rank in range(case.ranks)) / case.ranks / gradients
    least = 2 * (case.ranks - 1) / case.ranks
    return f"you sent {sent:.2f} × the gradients per rank{per}; the least possible is {least:.2f} ×"


# ---- bytes held, unequal replicas, parameters without use ------------------------------------------------


def bytes_held(body: Callable[..., Any], fn: Callable[..., Any], case: Case) -> None:
    """In buffers, two copies of the gradients at the same time are plenty."""
    recording = job(body, fn, [case], ranks=case.ranks, record="memory").recording
    gradients = sum(p.nbytes for p in case.model().parameters() if p.requires_grad)
    for rank in range(case.ranks):
        beside = in_buffers(recording, rank, case.steps - 1) / gradients
        if beside > BUFFERS:
            raise Wrong(
                f"{case}: rank {rank} held {beside:.2f} × the gradients in buffers",
                "Whose gradients do you keep after you have added them up?",
                "full copies are kept",
            )


def in_buffers(recording: Recording, rank: int, step: int) -> int:
    """The most bytes of gradients, communication and temporaries that a step added to what was there before."""
    start, end = recording.window(rank, step)
    held = [(t, sum(kinds[k] for k in ("G", "comm", "temporary"))) for t, kinds in recording.memory[rank]]
    before = [0, *(size for t, size in held if t <= start)][-1]
    return max([before, *(size for t, size in held if start <= t < end)]) - before


def one_graph_at_a_time(fn: Callable[..., Any], draw: Draw) -> None:
    """The activations held must not grow with the number of micro-batches."""
    cases = [draw.wide(2, micro_batches=k) for k in (1, 4)]
    recording = job(accumulate_once, fn, cases, ranks=2, record="memory").recording
    one, four = (recording.held(0, step)["A"] for step in (0, 1))
    if four > 1.5 * one:
        raise Wrong(
            f"activations held at the peak: {one:,} bytes with 1 micro-batch, {four:,} with 4",
            "What is freed by backward, and when do you call it?",
            "the graphs of all micro-batches are kept",
        )


def unequal_replicas(wrap: Callable[..., Any], draw: Draw) -> None:
    """Replicas from different seeds: an error is a right answer, and so are equal replicas."""
    case = draw.case(3, equal=False)
    ranks = outcome_or_refusal(wrap, case)
    for name, value in ranks[0].after.items() if ranks else ():
        for rank, step in enumerate(ranks):
            if not torch.equal(value, step.after[name]):
                raise Wrong(
                    f"{case}: each rank built its model from another seed; after wrap(model) and one step "
                    f"{name!r} still differs between rank 0 and rank {rank}, and nobody was told",
                    "Equal gradients keep equal replicas equal. Who makes sure that they start so?",
                    "a replica that started from another seed",
                )


def unused_parameter(wrap: Callable[..., Any], draw: Draw) -> None:
    """A parameter without use: an error is a right answer, and so is None; zeros are not, nor a hang."""
    case = draw.case(2, steps=2, spare=True)
    if ranks := outcome_or_refusal(wrap, case):
        right_kind(case, f"{case}, a parameter without use", ranks)


def outcome_or_refusal(wrap: Callable[..., Any], case: Case) -> list[Step]:
    """The last step of each rank; nothing where the wrapper raised an error."""
    try:
        results = job(train, wrap, [case], ranks=case.ranks)
    except Wrong as wrong:
        if wrong.raised:
            return []
        raise
    return [steps[0][-1] for steps in results]
