"""Constants that no data sheet has: the fraction of a machine's numbers that a training program reaches.

    FITTED["pytorch"]                 the constants of a training software, a name for `Setup.software`
    WITHOUT["pytorch", "MosaicML"]    the same, fitted without the runs of that source
    NANOTRON                          what the runs of nanotron hold
    EVIDENCE["pytorch"]               the fitted runs, and their errors: a row of the table

`python -m tools.plan_constants` fits them on the runs of `published.csv`, and writes the table `fitted.csv`.  Constants
that are not in it have the defaults below.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

FITS = Path(__file__).with_name("fitted.csv")


@dataclass(frozen=True)
class Constants:
    """The constants of one training software.

    Constants of time:

        matmul      fraction of a GPU's operations per second that matrix products reach
        attention   fraction of them that attention reaches, between its projections
        passes      number of times that each byte a layer keeps for backward is read or written by all other operators
        launch      seconds that Python needs to launch a layer's forward and backward: no layer takes less
        tangle      additional seconds per tensor-parallel rank if the same layers send to stages on other nodes
        exposed     fraction of tensor parallelism's traffic, 8 (N-1)/N tensors a layer, that computation does not hide
        outer       fraction of the bandwidth between nodes that is reached
        hidden      fraction of a backward that hides all-reduces of gradients
        ahead       fraction of a backward that hides the reduce-scatters of ZeRO's stages 1 and 2
        prefetched  fraction of the computation that hides FSDP's traffic
        step        seconds that each step takes in addition
        eight       factor by which matrix products of 8 bits are faster than those of 16
        grouped     fraction of the rate of large products that the products of experts reach
        exchanged   fraction of the tokens' way to their experts and back that computation does not hide

    Constants of memory:

        precision   a name in `cost.PIE`: the bytes of a parameter, its gradient and its state
        slack       bytes reserved per byte of activations: gaps make it larger, fused kernels smaller
        logit       bytes per logit, with its gradient and its logarithm
        reserve     bytes that are always in use
        crowded     fraction of the card from which on the allocator returns memory and requests it again
        thrash      factor by which a step then takes longer
    """

    matmul: float = 0.62
    attention: float = 0.3
    passes: float = 12.0
    launch: float = 2.5e-3
    tangle: float = 2.1e-3
    exposed: float = 1.2
    outer: float = 1.0
    hidden: float = 0.7
    ahead: float = 0.01
    prefetched: float = 1.0
    step: float = 0.03
    eight: float = 1.8
    grouped: float = 0.45
    exchanged: float = 0.7
    precision: str = "mixed, float32 gradients"
    slack: float = 0.91
    logit: float = 5.98
    reserve: float = 3.7e8
    crowded: float = 0.93
    thrash: float = 2.5


TIME = ("matmul", "attention", "passes", "launch", "tangle", "exposed", "hidden", "ahead", "step")
SPARSE_TIME = ("eight", "grouped", "exchanged")
MEMORY = ("precision", "slack", "logit", "reserve")


def fits() -> list[dict]:
    """Return the rows of the table, with numbers as floats and without empty cells."""
    with open(FITS, encoding="utf-8", newline="") as file:
        return [{name: as_number(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def as_number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def constants_of(row: dict) -> Constants:
    return Constants(**{name: row[name] for name in (*TIME, *SPARSE_TIME, *MEMORY) if name in row})


ROWS = fits()
EVIDENCE = {row["software"]: row for row in ROWS if "rows" in row}
FITTED = {name: constants_of(row) for name, row in EVIDENCE.items()}
WITHOUT = {(row["software"], row["without"]): constants_of(row) for row in ROWS if "without" in row}
NANOTRON = next({name: row[name] for name in MEMORY} for row in ROWS if row["software"] == "nanotron")
