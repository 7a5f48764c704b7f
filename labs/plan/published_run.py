"""A published run as a question to the plan, and helpers that read rows of tables.

Case(setup, layout, group, tokens)                                   a run
setup_of(...), whole(row, "gpus"), number(row, "mfu"), gpt(...)      helpers for readers of tables
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
    """A published run.

    group: its model and number of GPUs.
    tokens: the measured tokens per second and GPU; None if the run is no target for time.
    bytes: the measured bytes on the fullest rank, or on rank 0 if `of_first`; None if they were not measured.
    free: the fields of the layout that the table does not tell.
    source: the publisher of the table.
    """

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
    """Return a setup, the same object for equal arguments; known: constants that the table itself tells."""
    software = software or "pytorch"
    constants = replace(FITTED[software], **known) if software in FITTED else None
    return Setup(config, cluster, batch, context, constants, software)


NO_MEMORY = {"thrash": 1.0}  # a table without memory has no crowded runs


def whole(row: Row, name: str) -> int:
    return int(float(row[name]))


def number(row: Row, name: str) -> float:
    """Return the number in a column; 0 for an empty cell."""
    return float(row[name] or 0)


def gpt(vocab: int, dim: int, depth: int, heads: int, context: int) -> Config:
    """Return the config of a GPT-3, whose MLP has two matrices."""
    return Config(vocab, dim, depth, heads, heads, dim * 8 // 3, context=context, tied=True)
