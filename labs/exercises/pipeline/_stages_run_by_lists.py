"""Pipeline stages that lists of instructions run, and one process's losses and gradients of the same model."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor, nn

from labs import pp
from labs.exercises.engine.on_ranks import BF16, F64
from labs.exercises.engine.scripts import World
from labs.pp.checker import microbatches_of, ranks_of, stages_of

VOCABULARY, DIM, SEQUENCES, TOKENS = 11, 6, 3, 7
TOLERANCE = {F64: 1e-11, BF16: 2e-2}


@dataclass(frozen=True)
class Stacked(World):
    """A world with a model cut into pipeline stages, and a batch in each step; gradients add up from step to step.

    frozen: whether a parameter of every second stage is frozen.
    floats: whether the first stage reads floats, and not tokens.
    """

    name: str = ""
    lists: tuple[tuple[pp.Instruction, ...], ...] = ()
    frozen: bool = False
    floats: bool = False

    @property
    def stages(self) -> int:
        return stages_of(self.lists)

    @property
    def microbatches(self) -> int:
        return microbatches_of(self.lists)

    def rank_of(self, stage: int) -> int:
        return ranks_of(self.lists)[stage]

    def stage(self, number: int) -> nn.Sequential:
        """Return the stage with this number: the first reads tokens or floats, the last returns logits."""
        linear = nn.Linear(DIM, DIM)
        linear.bias.requires_grad_(not (self.frozen and number % 2))
        first = [nn.Embedding(VOCABULARY, DIM)] if number == 0 and not self.floats else []
        last = [nn.Linear(DIM, VOCABULARY)] if number == self.stages - 1 else []
        stage = nn.Sequential(*first, linear, nn.GELU(), *last).to(self.dtype)
        generator = torch.Generator().manual_seed(self.seed % 2**40 + number)
        with torch.no_grad():
            for p in stage.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=F64) / 2)
        return stage

    def model(self) -> list[nn.Sequential]:
        return [self.stage(number) for number in range(self.stages)]

    def batch(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tokens and the targets of each micro-batch, [3, 7] each; floats are [3, 7, 6]."""
        generator, size = self.generator(step=self.step), (self.microbatches * SEQUENCES, TOKENS)
        xs, ys = torch.randint(VOCABULARY, (2, *size), generator=generator)
        if self.floats:
            xs = torch.randn(*size, DIM, generator=generator, dtype=self.dtype)
        return list(xs.chunk(self.microbatches)), list(ys.chunk(self.microbatches))

    def summands(self, stage: int) -> list[Tensor]:
        """Return the summands of a stage's gradients after this step, in the order of its backwards."""
        mine = self.lists[self.rank_of(stage)]
        order = [x.microbatch for x in mine if x.stage == stage and isinstance(x, pp.B | pp.I)]
        return [by_itself(self.at(step))[m][1][stage] for step in range(self.step + 1) for m in order]

    def __str__(self) -> str:
        return f"{self.name}, {many(len(self.lists), 'rank')}, {many(self.microbatches, 'micro-batch', 'es')}"


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def flat(stage: nn.Module) -> Tensor:
    """Return the gradients of the trained parameters in one vector, with NaN for a missing gradient."""
    trained = [p for p in stage.parameters() if p.requires_grad]
    return torch.cat([(torch.full_like(p, torch.nan) if p.grad is None else p.grad).flatten() for p in trained])


@lru_cache(maxsize=64)
def by_itself(world: Stacked) -> list[tuple[float, list[Tensor]]]:
    """Return the loss, and the gradients of each stage, of each micro-batch alone, computed in one process."""
    found = []
    for x, y in zip(*world.batch(), strict=True):
        stages = world.model()
        loss = mean_loss(nn.Sequential(*stages)(x), y)
        (loss / world.microbatches).backward()
        found.append((loss.item(), [flat(stage) for stage in stages]))
    return found


def total(summands: list[Tensor]) -> Tensor:
    return reduce(torch.add, summands)


def many(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{plural * (n != 1)}"


def whole(lists: pp.Lists) -> list[list[pp.Instruction]]:
    """Return the lists with a whole backward: each I becomes a B, and each W is left out."""
    kinds = {pp.F: pp.F, pp.B: pp.B, pp.I: pp.B}
    return [[kinds[type(x)](x.stage, x.microbatch) for x in order if type(x) in kinds] for order in lists]


def bits(pairs: Iterable[tuple[Tensor, Tensor]]) -> str:
    """Return words that say whether the two tensors of all pairs (found, expected) are equal bit for bit."""
    return ", bit for bit" if all(torch.equal(found, expected) for found, expected in pairs) else ", but for rounding"
