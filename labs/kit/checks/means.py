"""Is each gradient the mean over all ranks and micro-batches?  Where not: the first element, and what it is made of.

found on rank 1 = Σ c[rank, i] × (gradient of micro-batch i of that rank)

all c equal            too large by N: summed; by k: the loss not divided; too small: divided twice
c zero but for rank 1  nothing came from the others
only the last column   only the last micro-batch was synchronised
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from labs.kit.checks.answer import Wrong, instead, show
from labs.kit.checks.awkward import Case, Step
from labs.kit.checks.mixture import mixture

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
AVERAGED_PARAMETERS = "parameters averaged instead of gradients"


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
    sources = [torch.cat([g[name].flatten() for name in names]) for step in ranks for g in step.plain]
    times = mixture(torch.cat([ranks[rank].found[name].flatten() for name in names]), sources)
    return None if times is None else (times * len(sources)).view(len(ranks), -1)


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
