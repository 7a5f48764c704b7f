"""The trainer: `train(settings)` trains a model on this rank; all ranks of a job call it.

    made        model, strategy, data and report, and the checkpoint from which the training goes on
    a step      the rank's part of the batch, gradients, their norm, the optimizer, one all-reduce for the report
    sometimes   a save in the background, an evaluation
    the end     a last save, and text that the model writes

A training that is asked to stop saves, and returns before its last step: the file `stop` in its folder of checkpoints
asks for it, which a batch script makes when its time is nearly over.  The next start goes on after the saved step, with
the same numbers as a training that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs import checkpoint
from labs.clusters import report, tokens
from labs.clusters.settings import Optimizer, Settings
from labs.data import Batches
from labs.generate import generate
from labs.kit.record import mark
from labs.kit.simulated.strategy_steps import model_of
from labs.kit.training.training_step import Batch, Training, compute_gradients
from labs.mesh import Mesh

STOP = "stop"  # a file of this name in the folder of checkpoints asks a training to save and to end
PROMPT = b"def "
SAME = ("model", "batch", "seed", "data", "context")  # the settings without which a checkpoint is another training's


@dataclass(frozen=True)
class Trained:
    """The end of a training.

    step: the steps that are done; fewer than the settings' if the training was asked to stop.
    losses: the mean loss of each step of this start.
    text: what the model wrote, on rank 0.
    """

    step: int
    losses: list[float]
    text: str


def train(settings: Settings) -> Trained:
    """Train by these settings on this rank.

    Raises ValueError for settings that do not fit the number of ranks, the data or the checkpoint that is there.
    """
    axes, row = settings.axes(dist.get_world_size()), settings.row
    mesh = Mesh(tuple(axes.values()), tuple(axes))
    training = row.apply(model_of(settings.config, torch.float32, settings.recompute, settings.seed), mesh)
    parts = math.prod(axes[axis] for axis in row.batch)
    of_rank = settings.batch, settings.tokens, settings.seed, row.part(mesh), parts
    batches, unseen = (Batches(part, *of_rank) for part in tokens.read(settings.data, settings.config.vocab))
    done, losses, stops = resume(settings, training), [], False
    with reported(settings) as says, checkpoint.Saver(settings.checkpoints.folder) as saves:
        while done < settings.steps and not stops:
            mark("step")
            rate = learning_rate(settings.optimizer, done, settings.steps)
            loss, norm = step(training, settings, batches[done], rate)
            loss, stops = everybodys(loss, asked_to_stop(settings))
            losses.append(loss)
            done += 1
            says.step(done, loss=loss, norm=norm, learning_rate=rate)
            if stops or is_due(done, settings.checkpoints.every, settings.steps):
                saves.save(done, training.held(), told(settings), checkpoint.random_state())
            if is_due(done, settings.evaluate, settings.steps):
                says.evaluation(done, evaluate(training, settings, unseen))
        mark("end")
    finish_stop(settings, done)
    text = sample(training, settings) if done == settings.steps and settings.sample else ""
    says.say(f"saved after step {done} of {settings.steps}: start it again, and it goes on" if stops else text)
    return Trained(done, losses, text)


def is_due(done: int, every: int, steps: int) -> bool:
    return every > 0 and (done % every == 0 or done == steps)


# ---- a step -------------------------------------------------------------------------------------------------


def step(training: Training, settings: Settings, batch: Batch, rate: float) -> tuple[float | None, float]:
    """Take a training step; return this rank's mean loss, if it has the model's last layer, and the gradients' norm.

    Raises ValueError, on every rank and before the step, if the norm is inf or nan.
    """
    chosen = settings.optimizer
    losses = gradients(training, settings, batch)
    norm = training.clip(chosen.clip).item()
    if not math.isfinite(norm):  # the same number on every rank; a step would spoil what the next save keeps
        raise ValueError(
            f"the norm of the gradients is {norm}, so no step was made: go on from the last checkpoint with a lower "
            "--optimizer.lr, a longer --optimizer.warmup, or --precision float32"
        )
    mark("optimizer")
    for group in getattr(training.optimizer, "optimizer", training.optimizer).param_groups:
        group |= {"lr": rate, "betas": chosen.betas, "eps": chosen.eps, "weight_decay": chosen.weight_decay}
    training.optimizer.step()
    training.optimizer.zero_grad()
    return mean(losses), norm


def gradients(training: Training, settings: Settings, batch: Batch) -> list[Tensor]:
    x, y = (tokens if reads else None for tokens, reads in zip(batch, training.reads, strict=True))
    with autocast(settings):
        return compute_gradients(training, x, y, settings.micro_batches)


def autocast(settings: Settings) -> AbstractContextManager:
    """Return the context in which products are computed in bfloat16, if the strategy has no dtypes of its own."""
    if settings.precision == "float32" or settings.row.computes != torch.float32:
        return nullcontext()
    return torch.autocast(torch.get_default_device().type, torch.bfloat16)


def mean(losses: Sequence[Tensor]) -> float | None:
    return fmean(loss.item() for loss in losses) if losses else None


def everybodys(loss: float | None, stops: bool) -> tuple[float, bool]:
    """Return the mean of the losses of all ranks that have one, and whether a rank has been asked to stop."""
    sums = torch.tensor([loss or 0.0, float(loss is not None), float(stops)], dtype=torch.float64)
    dist.all_reduce(sums)
    total, ranks, asked = sums.tolist()
    return total / ranks, asked > 0


def learning_rate(chosen: Optimizer, number: int, steps: int) -> float:
    """Return the learning rate of step `number`, counted from 0."""
    if number < chosen.warmup:
        return chosen.lr * (number + 1) / chosen.warmup
    way = (number - chosen.warmup) / max(1, steps - 1 - chosen.warmup)  # 0 after the warm-up, 1 in the last step
    left = {"constant": 1.0, "linear": 1 - way, "cosine": (1 + math.cos(math.pi * way)) / 2}[chosen.decay]
    return chosen.lr * (left if chosen.decay == "constant" else chosen.last + (1 - chosen.last) * left)


# ---- saving, stopping, resuming -----------------------------------------------------------------------------


def told(settings: Settings) -> dict[str, Any]:
    """Return the settings that a checkpoint remembers."""
    return {name: str(getattr(settings, name)) for name in SAME}


def resume(settings: Settings, training: Training) -> int:
    """Load the newest checkpoint into the training, if there is one; return the number of steps that are done."""
    if settings.checkpoints.every:
        training.held()  # a strategy that cannot be saved is refused now, not at the first save
    where = [str(checkpoint.newest(settings.checkpoints.folder) or "")]
    dist.broadcast_object_list(where)
    if not where[0]:
        return 0
    found = checkpoint.load(where[0], training.held())
    for name, value in told(settings).items():
        if found.values[name] != value:
            raise ValueError(
                f"{where[0]} is of a training with {name} {found.values[name]}, and this one has {value}: give it a "
                "folder of its own (--checkpoints.folder)"
            )
    if len(found.own) == dist.get_world_size():
        checkpoint.set_random_state(found.own[dist.get_rank()])
    return found.step


def asked_to_stop(settings: Settings) -> bool:
    return dist.get_rank() == 0 and (settings.checkpoints.folder / STOP).exists()


def finish_stop(settings: Settings, done: int) -> None:
    """Remove the request to stop if the training is over, so that a batch script does not start it again."""
    if dist.get_rank() == 0 and done == settings.steps:
        (settings.checkpoints.folder / STOP).unlink(missing_ok=True)


# ---- besides training ---------------------------------------------------------------------------------------


def reported(settings: Settings) -> report.Report:
    per_token = report.flops_per_token(settings.config, settings.tokens)
    card = report.peak_flops(settings.card)
    flops = None if card is None else card * dist.get_world_size()
    return report.Report(settings.steps, settings.batch * settings.tokens, per_token, flops, settings.report)


def evaluate(training: Training, settings: Settings, unseen: Batches) -> float:
    """Return the mean loss of some batches that are not trained on.

    Every strategy has one way to a loss, forward with backward.  An evaluation takes this way, and drops the gradients.
    """
    found = []
    for number in range(settings.evaluations):
        found.append(everybodys(mean(gradients(training, settings, unseen[number])), False)[0])
        training.optimizer.zero_grad()
    return fmean(found)


def sample(training: Training, settings: Settings) -> str:
    """Return, on rank 0, what the trained model writes after a prompt; all ranks help to gather its parameters."""
    full = training.full()
    if dist.get_rank():
        return ""
    model, config = model_of(settings.config, torch.float32, "none"), settings.config
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(full[name])
    prompt = torch.tensor([list(PROMPT)])
    written = generate(model, prompt, min(settings.sample, config.context - len(PROMPT)), temperature=0.8)[0].tolist()
    return bytes(written).decode(errors="replace") if config.vocab == 256 else str(written)
