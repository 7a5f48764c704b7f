"""token_mean: micro-batches with unequal numbers of tokens, whose mean losses are averaged."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from labs.exercises.bug_clinic._case import INSTRUMENTS, RANKS, clinic, drawn, fewest

VOCABULARY, LENGTH, EACH, STEPS = 16, 24, 2, 4
PADDING = -100
Batch = tuple[Tensor, Tensor]


def faulty(model: nn.Module, micro_batches: Sequence[Batch]) -> None:
    for x, y in micro_batches:
        loss = F.cross_entropy(model(x), y, ignore_index=PADDING)
        (loss / len(micro_batches)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def right(model: nn.Module, micro_batches: Sequence[Batch]) -> None:
    tokens = counted(micro_batches)
    dist.all_reduce(tokens)
    for batch in micro_batches:
        (summed(model, [batch]) / tokens).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


def counted(batches: Sequence[Batch]) -> Tensor:
    return (torch.cat([y for _, y in batches]) != PADDING).sum()


def summed(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    x, y = map(torch.cat, zip(*batches, strict=True))
    return F.cross_entropy(model(x), y, ignore_index=PADDING, reduction="sum")


def drawn_batches(seed: int, rank: int) -> list[Batch]:
    """Return a rank's micro-batches: (tokens, targets), each [LENGTH]; the targets end in padding."""
    draw, found = random.Random(1000 * seed + rank), []
    for k in range(EACH):
        x, y = (torch.tensor([draw.randrange(VOCABULARY) for _ in range(LENGTH)]) for _ in range(2))
        y[1 + 5 * k + 4 * rank + draw.randrange(3) :] = PADDING
        found.append((x, y))
    return found


def tokens(seed: int) -> list[int]:
    """Return the number of tokens of each micro-batch, rank by rank."""
    return [int(counted([batch])) for rank in range(RANKS) for batch in drawn_batches(seed, rank)]


def trained(backward: Callable[[nn.Module], Any], seed: int) -> dict[str, Tensor]:
    """Take some steps; return the first gradient, and the mean loss per token of the whole batch before each step."""
    model, losses, gradients = model_of(seed), [], []
    for _ in range(STEPS):
        losses.append(whole_loss(model, seed).detach())
        model.zero_grad()
        backward(model)
        gradients.append(model.weight.grad.clone())
        model.weight.data -= 4 * model.weight.grad
    return {"gradient": gradients[0], "losses": torch.stack(losses)}


def model_of(seed: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(drawn((VOCABULARY, VOCABULARY), seed), freeze=False)


def whole_loss(model: nn.Module, seed: int, rank: int | None = None, k: int | None = None) -> Tensor:
    """Return the mean loss of the whole batch, or what one micro-batch adds to it."""
    every = [drawn_batches(seed, rank) for rank in range(RANKS)]
    whole = [batch for own in every for batch in own]
    return summed(model, whole if rank is None else [every[rank][k]]) / counted(whole)


def job(fn: Callable[..., Any], seed: int) -> dict[str, Tensor]:
    return trained(lambda model: fn(model, drawn_batches(seed, dist.get_rank())), seed)


def alone(seed: int) -> list[dict[str, Tensor]]:
    return RANKS * [trained(lambda model: whole_loss(model, seed).backward(), seed)]


def parts(seed: int, rank: int) -> list[list[Tensor]]:
    return [[RANKS * EACH * gradient(seed, source, k) for k in range(EACH)] for source in range(RANKS)]


def gradient(seed: int, rank: int, k: int) -> Tensor:
    return torch.autograd.grad(whole_loss(model := model_of(seed), seed, rank, k), model.weight)[0]


# fmt: off
token_mean = clinic(
    "a", faulty, right, job, alone, number=1, parts=parts, tells={"numbers", "gradients"},
    asks="`fn(model, micro_batches)`, which leaves in .grad the gradient of the batch's mean loss per token; "
         "micro_batches: pairs of tokens and targets; a target of PADDING does not count",
    threads=("huggingface/trl/issues/2175 closed 2024-10-04", "huggingface/transformers/pull/34191 merged 2024-10-17"),
    mistake="each micro-batch counts alike, whatever its tokens",
    question="How much does a token count in a micro-batch of 2 tokens, and how much in one of 20?",
)
# fmt: on
token_mean.instruments, token_mean.fewest, token_mean.tokens = tuple(INSTRUMENTS), fewest, tokens
