"""What a training is: one dataclass, read from a TOML file and from flags, the same for every launcher.

    settings = read("configs/fsdp.toml")                # every key of the file is a field
    settings.row                                        # the row of the table of strategies
    settings.axes(ranks=8)                              # {axis: size} of the mesh

Settings that do not fit together are refused before a rank is started.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any, Literal

import tyro

from labs.kit.commands.dryrun import MODELS, mesh_of, require_fitting, row_of
from labs.kit.commands.names import known
from labs.kit.rows.parallel_rows import scheduled
from labs.kit.rows.row import Strategy
from labs.kit.training.strategies import ADAMW, ROWS
from labs.llama import read_config
from labs.model import Config
from labs.pp import SCHEDULES


@dataclass(frozen=True)
class Optimizer:
    """AdamW, and the course of its learning rate: it rises for some steps, and then falls."""

    lr: float = ADAMW["lr"]  # the largest learning rate
    betas: tuple[float, float] = ADAMW["betas"]
    eps: float = ADAMW["eps"]
    weight_decay: float = ADAMW["weight_decay"]
    warmup: int = 0  # the steps in which the learning rate rises from 0
    decay: Literal["constant", "linear", "cosine"] = "constant"  # how it falls after that, until the last step
    last: float = 0.1  # the part of it that is left at the last step
    clip: float = 1.0  # the largest norm of the gradients; inf only measures the norm


@dataclass(frozen=True)
class Checkpoints:
    """The place and the times of saving.  A training that finds a checkpoint in its folder goes on from it."""

    folder: Path = Path("checkpoints/train")
    every: int = 0  # steps between two saves; 0 saves only when the training is asked to stop


@dataclass(frozen=True)
class Settings:
    """A training of a model of the course: what is trained, on what, by which strategy, for how long."""

    strategy: str = ""  # a row of the table of strategies, ours or PyTorch's; the one that the mesh names, or fsdp
    mesh: str = ""  # the axes, outermost first, like pp=2,dp=2,tp=2; the strategy's own if it is left out
    schedule: str = "1f1b"  # of the pipelines of pp-fsdp and pp-fsdp-tp
    model: str = "tiny"  # one of the course's shapes, or a folder with a Hugging Face config.json
    data: Path | None = None  # a folder of text, or of token files (.npy, or .bin of uint16); the corpus if left out
    context: int = 0  # the tokens of a sequence; 0 is the model's
    batch: int = 16  # the sequences of a step, on all ranks together
    micro_batches: int = 1  # the parts in which each rank reads its sequences; in a pipeline, per stage
    steps: int = 100
    seed: int = 0  # of the weights and of the order of the data
    precision: Literal["float32", "bfloat16"] = "float32"  # what products are computed in
    recompute: Literal["none", "selective", "all but attention", "full"] = "none"
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    evaluate: int = 0  # steps between two evaluations on data that is not trained on; 0 makes none
    evaluations: int = 4  # the batches of an evaluation
    sample: int = 64  # the tokens that the trained model writes at the end
    report: Path | None = None  # a folder for TensorBoard's logs and for a JSON line per step
    timeout: float = 600.0  # seconds that ranks of torchrun wait in one call for other hosts before the job fails
    card: str = ""  # a GPU's name in the planner's table, for the MFU; the GPU's own if left out

    @property
    def config(self) -> Config:
        """Return the shape of the model."""
        return MODELS[self.model] if self.model in MODELS else read_config(self.model)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a sequence."""
        return self.context or self.config.context

    @property
    def row(self) -> Strategy:
        """Return the row of the strategy, with this pipeline schedule, in this precision if it has such a row."""
        name = self.strategy or (row_of(mesh_of(self.mesh, None)) if self.mesh else "fsdp")
        mixed = f"{known('strategy', name, ROWS)}-bf16"
        row = ROWS[mixed if self.precision == "bfloat16" and mixed in ROWS else name]
        return scheduled(row, known("schedule", self.schedule, SCHEDULES))

    def axes(self, ranks: int | None = None) -> dict[str, int]:
        """Return `{axis: size}` of the mesh.

        ranks: the number of ranks that were started; by default as many as the mesh has, or 4.
        Raises ValueError for settings that cannot be: unknown names, numbers out of range, a mesh that is another
        strategy's or has another number of ranks, a batch that cannot be divided among the ranks.
        """
        self.require_sensible()
        if self.mesh:
            axes = mesh_of(self.mesh, ranks)
            require_fitting(self.row.name, axes, axes.get("pp", 1))
        else:
            axes = dict(self.row.axes(4 if ranks is None else ranks))
        if ranks not in (None, prod(axes.values())):
            many = ",".join(f"{axis}={size}" for axis, size in axes.items())
            raise ValueError(f"{ranks} ranks were started, and {self.row.name} takes {many}: start as many, or --mesh")
        parts = prod(axes[axis] for axis in self.row.batch)
        cuts = self.micro_batches * axes.get("pp", 1)
        if self.batch % (parts * cuts):
            raise ValueError(
                f"a batch of {self.batch} is not divisible by {parts} parts of {cuts} micro-batches: "
                f"take {-(-self.batch // (parts * cuts)) * parts * cuts}"
            )
        return axes

    def require_sensible(self) -> None:
        least = {"batch": 1, "micro_batches": 1, "steps": 1, "evaluations": 1, "timeout": 1}
        least |= {"context": 0, "evaluate": 0, "sample": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}: give {lowest} or more")
        if not (Path(self.model) / "config.json").is_file():
            known("model", self.model, MODELS)
        if self.context > self.config.context:
            raise ValueError(f"context is {self.context}, and the model's is {self.config.context}: give that or less")


def read(path: Path | str | None, flags: Sequence[str] = ()) -> Settings:
    """Read settings from a TOML file and from flags; a flag is stronger than the file.

    Raises ValueError for a key of the file that is no setting, and names the nearest one; for a flag that is none, tyro
    prints the nearest one and exits.
    """
    return tyro.cli(Settings, args=[*(as_flags(path) if path else ()), *flags])


def as_flags(path: Path | str) -> list[str]:
    """Return the flags that say what a TOML file says: tables become dots, as in --optimizer.lr."""
    try:
        given = flat(tomllib.loads(Path(path).read_text()))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    names = flat(dataclasses.asdict(Settings()))
    for key in given:
        if key not in names:
            near = get_close_matches(key, names, 1, 0)[0]
            raise ValueError(f"{path} has {key!r}, which is no setting: the nearest is {near!r}, of {', '.join(names)}")
    values = {key: value if isinstance(value, list) else [value] for key, value in given.items()}
    return [word for key, of_it in values.items() for word in (f"--{key}", *map(str, of_it))]


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return a tree of mappings as one, whose keys are joined by dots."""
    found = {}
    for key, value in tree.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + key: value}
    return found
