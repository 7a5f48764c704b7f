"""Constants that no data sheet has: the fraction of a machine's numbers that a training program reaches.

    FITTED["pytorch"]          the constants of a training software, a name for `Setup.software`

`python -m tools.plan_constants` fits them on the published runs in `labs/plan/tables`, and writes `fitted.py`.
"""

from dataclasses import dataclass


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

    Constants of memory:

        precision   a name in `cost.PIE`: the bytes of a parameter, its gradient and its state
        slack       bytes reserved per byte of activations: gaps make it larger, fused kernels smaller
        logit       bytes per logit, with its gradient and its logarithm
        reserve     bytes that are always in use
        crowded     fraction of the card from which on the allocator returns memory and requests it again
        thrash      factor by which a step then takes longer
    """

    matmul: float
    attention: float
    passes: float
    launch: float
    tangle: float
    exposed: float
    outer: float
    hidden: float
    ahead: float
    prefetched: float
    step: float
    precision: str
    slack: float
    logit: float
    reserve: float
    crowded: float
    thrash: float


TIME = (
    "matmul",
    "attention",
    "passes",
    "launch",
    "tangle",
    "exposed",
    "outer",
    "hidden",
    "ahead",
    "prefetched",
    "step",
)
