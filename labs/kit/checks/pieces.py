"""Is each rank's piece the piece that is due?  Where not: the first element, and what it is made of.

A layer's vector is cut in N pieces, piece r for rank r.  In stage 1 all pieces are looked at on all ranks, after each
step of one process's optimizer; in stage 2 each rank's own, of the mean gradient; in stage 3 all, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labs.kit.checks.answer import Wrong, first_fit, instead
from labs.kit.checks.case import close as close_within
from labs.kit.checks.case import isclose
from labs.kit.checks.flat_layers import FADING, LEARNING_RATE, OPTIMIZERS, Case, Optimizers, Step, passes
from labs.kit.checks.mixture import COEFFICIENTS, Made, mixture

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
Named = tuple[str, str, str]  # the mistake's name, a sentence, a question
ADDS = "The gradients of two micro-batches: which of them does the optimizer need?"
THERE = (
    "In this step shard.grad is there before the first gradient comes, and holds zeros. What do you make of the two?"
)
ONLY_THEN = {"the gradient is zero": "not added to what is there", "divided by the wrong number": "a moving average"}


def untroubled(case: Case, number: int, ranks: list[Step]) -> None:
    """Nothing that a rank saw for itself."""
    for rank, step in enumerate(ranks):
        if step.complaint:
            text, question, mistake = step.complaint
            raise Wrong(f"{case}, step {number}: on rank {rank} {text}", question, mistake)
        if step.touched:
            raise Wrong(
                f"{case}, step {number}: rank {rank} changed a tensor while it was being sent",
                "When may you touch the tensor of an isend again?",
                "changed while being sent",
            )


def close(found: Tensor, due: Tensor, dtype: torch.dtype) -> bool:
    return close_within(found, due, TOLERANCE[dtype])


def first_wrong(found: Tensor, due: Tensor, dtype: torch.dtype) -> str:
    at = int((~isclose(found, due, TOLERANCE[dtype])).nonzero()[0])
    return f"element {at} is {instead(found[at], due[at].to(found.dtype))}"


def means(ranks: list[Step]) -> list[Tensor]:
    """The mean gradient of each layer, in float64."""
    layers = zip(*(micro_batch for step in ranks for micro_batch in step.plain), strict=True)
    return [torch.stack([gradient.double() for gradient in layer]).mean(0) for layer in layers]


def piece(case: Case, vectors: list[Tensor], index: int) -> Tensor:
    """The pieces `index` of all layers, side by side."""
    return torch.cat([vector.chunk(case.ranks)[index] for vector in vectors])


# ---- stage 1 ---------------------------------------------------------------------------------------------


def judge_partition(case: Case, runs: list[Optimizers]) -> None:
    """After each step every rank has what one process has."""
    untroubled(case, 0, [run.steps[0] for run in runs])
    whole = [torch.nn.Parameter(vector.clone()) for vector in runs[0].steps[0].before]
    optimizer = OPTIMIZERS[case.optimizer](whole)
    for number in range(case.steps):
        ranks = [run.steps[number] for run in runs]
        untroubled(case, number, ranks)
        for p, mean in zip(whole, means(ranks), strict=True):
            p.grad = mean.to(p.dtype)
        optimizer.step()
        due = [p.detach() for p in whole]
        for rank, step in enumerate(ranks):
            for layer, (found, right) in enumerate(zip(step.after, due, strict=True)):
                if not close(found, right, case.dtype):
                    previous = [run.steps[number - 1] for run in runs] if number else []
                    where = f"{case}, {case.optimizer}, step {number}: on rank {rank}, in layer {layer}, "
                    mistake, sentence, question = misplaced_update(case, ranks, rank, due) or misguided_update(
                        case, ranks, rank, due, previous
                    )
                    raise Wrong(f"{where}{first_wrong(found, right, case.dtype)}\n{sentence}", question, mistake)
        for rank, step in enumerate(ranks):
            if not all(map(torch.equal, step.after, ranks[0].after)):
                raise Wrong(
                    f"{case}, step {number}: the parameters differ between rank 0 and rank {rank} in their last bits",
                    "Where does each rank get the other pieces from?",
                    "not the same bits on every rank",
                )


def misplaced_update(case: Case, ranks: list[Step], rank: int, due: list[Tensor]) -> Named | None:
    """Right numbers that are not where they should be."""
    step, n = ranks[rank], case.ranks
    moved = [[not torch.equal(*(piece(case, x, c) for x in (s.before, s.after))) for c in range(n)] for s in ranks]
    if not any(map(any, moved)):
        return "nothing is updated", "All ranks still have what they had.", "What does the optimizer update?"
    if all(moved[r] == [c == r for c in range(n)] for r in range(n)):
        return (
            "nobody gathers the parameters",
            "Each rank has updated its own piece, and has the others as they were.",
            "How do the other ranks learn the piece that you have updated?",
        )
    for c in range(n):
        other = next((o for o in range(n) if close(piece(case, step.after, c), piece(case, due, o), case.dtype)), c)
        if other != c:
            return (
                "the pieces are rotated",
                f"Piece {other} stands in the place of piece {c}.",
                "Which piece of full is rank r's?",
            )
    return None


def misguided_update(case: Case, ranks: list[Step], rank: int, due: list[Tensor], previous: list[Step]) -> Named:
    """From how far plain SGD went: which gradients it followed."""
    c = next(
        c for c in range(case.ranks) if not close(*(piece(case, x, c) for x in (ranks[rank].after, due)), case.dtype)
    )
    late = (
        ("wrong from the second step on", "Step 0 was right.", "What is left from the step before?")
        if previous
        else None
    )
    if case.optimizer != "SGD":
        return late or ("", f"Piece {c} is the first that is wrong.", "Which gradient does your optimizer see?")
    followed = (piece(case, ranks[rank].before, c) - piece(case, ranks[rank].after, c)) / LEARNING_RATE
    if previous:
        times = mixture(followed, [piece(case, means(x), c) for x in (ranks, previous)])
        if times is not None and torch.allclose(times, torch.ones(2, dtype=times.dtype), atol=1e-3):
            return (
                "the gradient of the step before is added again",
                "Step 0 was right; it went as far as both gradients say.",
                "What is in the shard's .grad when the step begins?",
            )
    named = made_of(case, ranks, c, followed)
    return late if late and not named[0] else named


# ---- stage 2 ---------------------------------------------------------------------------------------------


def judge_scatter(case: Case, steps_of: list[list[Step]]) -> None:
    """After each step's backwards, each rank has its piece of the mean gradient."""
    for number in range(case.steps):
        ranks = [steps[number] for steps in steps_of]
        untroubled(case, number, ranks)
        due = means(ranks)
        for rank, step in enumerate(ranks):
            for layer, (found, mean) in enumerate(zip(step.after, due, strict=True)):
                right = mean.chunk(case.ranks)[rank]
                if not close(found, right, case.dtype):
                    whole = torch.cat([x.double() for x in step.after])
                    mistake, sentence, question = made_of(case, ranks, rank, whole)
                    if mistake == "only the last micro-batch counts":
                        mistake, question = "overwritten instead of added", ADDS
                    if number % 2 and mistake in ONLY_THEN:  # it was right where there was no gradient before
                        mistake, question = ONLY_THEN[mistake], THERE
                    where = f"{case}, step {number}: on rank {rank}, in the shard's gradient of layer {layer}, "
                    raise Wrong(f"{where}{first_wrong(found, right, case.dtype)}\n{sentence}", question, mistake)


def made_of(case: Case, ranks: list[Step], index: int, found: Tensor) -> Named:
    """Of which ranks' and micro-batches' gradients, and of which piece of them."""
    n, k, due = case.ranks, case.micro_batches, means(ranks)
    right = piece(case, due, index)
    if torch.allclose(found.double(), right, rtol=1e-2, atol=1e-2 * float(right.abs().max())):
        return "rounded on the way", "It is right but for its last digits.", "In which dtype do the gradients travel?"
    if not found.isfinite().all():
        return (
            "read before it was written",
            "There are numbers in it that nobody has written.",
            "Who writes into this tensor, and when is that done?",
        )
    for shift in range(n):
        place = (index + shift) % n
        sources = [piece(case, gradients, place).double() for step in ranks for gradients in step.plain]
        times = mixture(found, sources)
        if times is None:
            continue
        if shift:
            return (
                "the gradient of another piece",
                f"It is made of piece {place} of the gradients; piece {index} is due.",
                "Which piece of full is rank r's?",
            )
        mistake, sentence = first_fit(COEFFICIENTS, Made((times * n * k).view(n, k), index))
        return mistake.name, sentence, mistake.question
    return "", "It is not a mixture of the ranks' gradients.", "Which gradients went into this one, and how often?"


# ---- stage 3 ---------------------------------------------------------------------------------------------


def judge_gathered(case: Case, steps_of: list[list[Step]]) -> None:
    """Whatever was gathered is everybody's shards, in full's dtype, bit for bit."""
    values = case.values()
    order = [index for index, _ in passes(case, list(range(len(values))))]
    for number in range(case.steps):
        ranks = [steps[number] for steps in steps_of]
        untroubled(case, number, ranks)
        for rank, step in enumerate(ranks):
            for found, layer in zip(step.after, order, strict=True):
                right = values[layer].to(case.dtype)
                if not torch.equal(found, right):
                    at = int((found != right).nonzero()[0])
                    where = f"{case}, step {number}: on rank {rank}, in layer {layer}, "
                    mistake, sentence, question = misgathered(case, values[layer], rank, found, number)
                    text = f"{where}element {at} is {instead(found[at], right[at])}\n{sentence}"
                    raise Wrong(text, question, mistake)
        values = [value.mul_(FADING) for value in values]


def misgathered(case: Case, due: Tensor, rank: int, found: Tensor, number: int) -> Named:
    right, before = due.to(case.dtype), (due / FADING).to(case.dtype)
    pieces = found.chunk(case.ranks)
    if torch.equal(found, before) and number:
        return (
            "the parameters of the step before",
            "These are the numbers of one step ago.",
            "What has the optimizer changed since, and who has told the others?",
        )
    if close(found, right, torch.bfloat16):
        return "rounded on the way", "It is right but for its last digits.", "In which dtype do the numbers travel?"
    own = right.chunk(case.ranks)[rank]
    missing = [c for c in range(case.ranks) if pieces[c].isnan().any()]
    if missing:
        return (
            "a piece is missing",
            f"Nobody has written piece {missing[0]}.",
            "Who has the other pieces, and how do they get here?",
        )
    if all(torch.equal(x, own) for x in pieces):
        return "one's own shard everywhere", f"Every piece is piece {rank}.", "Whose shard belongs where?"
    for c in range(case.ranks):
        for other, x in enumerate(right.chunk(case.ranks)):
            if other != c and torch.equal(pieces[c], x):
                return (
                    "the pieces are rotated",
                    f"Piece {other} stands in the place of piece {c}.",
                    "Whose shard belongs where?",
                )
    return "", "It is not what the ranks hold in their shards.", "What does each rank bring, and where does it go?"
