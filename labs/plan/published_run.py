"""A published run as a question to the plan, and what its table says in words.

Case(setup, layout, group, tokens)
setup_of(...), whole(row, "gpus"), number(row, "mfu"), gpt(...)      what readers of tables use
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from labs.model import Config
from labs.plan.fitted import FITTED
from labs.plan.layout import Layout, Setup
from labs.plan.machines import Cluster

Row = dict[str, str]


@dataclass(frozen=True)
class Case:
    """A run.  group: its model and number of GPUs.  tokens: measured, per second and GPU, None where it is no target.
    bytes: measured on the fullest rank, or on rank 0 where of_first.  free: fields of the layout that are not told.
    source: who measured."""

    setup: Setup
    layout: Layout
    group: tuple[str, int]
    tokens: float | None
    bytes: float | None = None
    of_first: bool = False
    free: tuple[str, ...] = ()
    source: str = ""


EIGHT_BITS = "computes in 8 bits: the plan's are 16"
CONTEXT = "splits the sequence (context parallelism): the plan does not"


@lru_cache(1 << 12)
def setup_of(config: Config, cluster: Cluster, batch: int, context: int, software: str, **known) -> Setup:
    """Return one setup for all rows that ask the same.  known: constants that the table itself tells."""
    software = software or "pytorch"
    constants = replace(FITTED[software], **known) if software in FITTED else None
    return Setup(config, cluster, batch, context, constants, software)


NO_MEMORY = {"thrash": 1.0}  # where a table does not tell what a card held, no run is taken for a crowded one


def whole(row: Row, name: str) -> int:
    return int(float(row[name]))


def number(row: Row, name: str) -> float:
    """0 where nothing is told."""
    return float(row[name] or 0)


def gpt(vocab: int, dim: int, depth: int, heads: int, context: int) -> Config:
    """GPT-3's shapes, whose MLP has two matrices."""
    return Config(vocab, dim, depth, heads, heads, dim * 8 // 3, context=context, tied=True)
