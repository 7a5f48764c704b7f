"""The command `python -m labs train`: train a model of the course, on ranks that it starts, or on torchrun's.

python -m labs train configs/fsdp.toml --steps 200
python -m labs train --strategy pp-fsdp-tp --mesh pp=2,dp=2,tp=2
torchrun --nproc-per-node 4 -m labs train configs/fsdp.toml
python -m labs train configs/llama3-8b.toml --dry
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Annotated

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, arg

from labs import cost
from labs.clusters.kubernetes_job import train_job
from labs.clusters.settings import Settings, as_flags
from labs.clusters.trainer import train
from labs.kit.commands.dryrun import main as dry_run
from labs.kit.commands.plan import main as plan
from labs.kit.drawing.tables import short
from labs.kit.launch import RankError, run
from labs.kit.watch.storage_ledger import KINDS

LEDGER_STEPS = 2  # the second one is a steady step


@dataclass
class Train:
    """Train a model of the course; a TOML file with settings may come first, and flags are stronger than the file."""

    settings: Annotated[Settings, arg(name="")]
    ranks: int | None = None  # the ranks to start; by default the mesh's, or 4; under torchrun as many as it has
    ledger: bool = False  # measure in one step what each kind of memory takes, and end
    dry: bool = False  # predict what a rank holds and sends, without the other ranks
    plan: bool = False  # list the layouts in which the model fits on this many of the cards
    job: str | None = None  # print a TrainJob for Kubernetes that trains in this container image
    nodes: int = 1  # the nodes of that TrainJob


def main(arguments: Sequence[str]) -> int:
    """Train; return 0, or 2 if the settings are refused, or 1 if the training fails."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    try:
        file = arguments[:1] if arguments and not arguments[0].startswith("-") else []
        given = [*(as_flags(file[0]) if file else ()), *arguments[len(file) :]]
        options = (DisallowNone, FlagCreatePairsOff)
        chosen = tyro.cli(Train, prog="python -m labs train", args=given, config=options)
        settings, ranks = chosen.settings, chosen.ranks
        axes = settings.axes(ranks or (int(os.environ["WORLD_SIZE"]) if under_torchrun else None))
        if chosen.dry:
            return dry_run(for_dry_run(settings, axes))
        if chosen.plan:
            return plan(for_plan(settings, prod(axes.values())))
        if chosen.job:
            print(train_job(chosen.job, chosen.nodes, prod(axes.values()), without_job(arguments)), end="")
            return 0
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if not under_torchrun or os.environ["RANK"] == "0":
        print(*head(settings, axes), sep="\n", flush=True)
    try:
        if chosen.ledger:
            settings = replace(settings, steps=LEDGER_STEPS, evaluate=0, sample=0, report=None)
        record = "memory" if chosen.ledger else None
        ranks = None if under_torchrun else prod(axes.values())
        done = run(train, settings, ranks=ranks, timeout=inf, longest_wait=settings.timeout, record=record)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    if chosen.ledger and (not under_torchrun or os.environ["RANK"] == "0"):
        for rank in range(len(done)):
            held = done.recording.steady(rank)
            print(f"rank {rank} held at its peak {short(held['peak'])}", *(f"{k} {short(held[k])}" for k in KINDS))
    return 0


def head(settings: Settings, axes: dict[str, int]) -> list[str]:
    """Return in lines what is trained, and what a rank will hold by `cost`."""
    mesh = ",".join(f"{axis}={size}" for axis, size in axes.items())
    lines = [f"{settings.model} by {settings.row.name} on {mesh}: {settings.batch} × {settings.tokens} tokens a step"]
    ranks = prod(axes.values())
    if settings.row.fits(ranks) and dict(settings.row.axes(ranks)) == axes:
        parts = prod(axes[axis] for axis in settings.row.batch)
        each = settings.batch // parts // settings.micro_batches
        cut = {"context": settings.tokens, "accumulation": settings.micro_batches, "recompute": settings.recompute}
        held = settings.row.predict(cost.Job(settings.config, each, ranks, **cut)).held
        known = [(kind, size) for kind in "PGSA" if (size := getattr(held, kind)) is not None]
        lines.append("a rank will hold " + ", ".join(f"{kind} {short(size)}" for kind, size in known))
    return lines


def for_dry_run(settings: Settings, axes: dict[str, int]) -> list[str]:
    mesh, parts = ",".join(f"{axis}={size}" for axis, size in axes.items()), prod(axes[a] for a in settings.row.batch)
    name, batch = settings.row.name.removesuffix("-bf16"), settings.batch // parts // settings.micro_batches
    what = ["--model", settings.model, "--mesh", mesh, "--strategy", name, "--batch", str(batch)]
    return [*what, "--dtype", settings.precision, "--recompute", settings.recompute]


def for_plan(settings: Settings, gpus: int) -> list[str]:
    shape = ["--config", f"{settings.model}/config.json"] if os.sep in settings.model else [settings.model]
    card = ["--card", settings.card] if settings.card else []
    return [*shape, "--gpus", str(gpus), "--batch", str(settings.batch), "--context", str(settings.tokens), *card]


def without_job(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of the training that a job runs: without --job and --nodes, and without their values."""
    kept, skip = [], False
    for word in arguments:
        if skip:
            skip = False
        elif word in ("--job", "--nodes", "--ranks"):
            skip = True
        elif not word.startswith(("--job=", "--nodes=", "--ranks=")):
            kept.append(word)
    return kept
