"""What no data sheet says: how much of a machine a training program reaches.  A few numbers, each with a meaning.

    FITTED["pytorch"]          by the software that trains, `Setup.software`

They are fitted by `python -m tools.plan_constants` on published runs (`labs/plan/tables`), and kept in `fitted.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """time:

        matmul      part of a GPU's operations per second that matrix products reach
        attention   and that attention's do, between its projections
        passes      how often each byte that a layer keeps for backward crosses the GPU's memory in all other operators
        launch      seconds that Python takes to launch a layer's forward and backward: no layer takes less
        tangle      seconds more, for each tensor-parallel rank, where the same layers send to stages on other nodes
        exposed     part of tensor parallelism's traffic (8 (N-1)/N tensors a layer) that computation does not hide
        outer       part of the bandwidth between nodes that is reached
        hidden      part of a backward under which all-reduces of gradients travel
        ahead       part of a backward under which the reduce-scatters of ZeRO's stages 1 and 2 do
        prefetched  part of the computation under which FSDP's traffic does
        step        seconds that each step takes besides

    memory:

        precision   a name in `cost.PIE`: the bytes of a parameter, its gradient and its state
        slack       bytes that are reserved for each byte of activations: more for gaps, less where kernels are fused
        logit       bytes for each logit, with its gradient and its logarithm
        reserve     bytes that are always taken
        crowded     part of the card beyond which the allocator gives memory back and asks for it again
        thrash      and how many times as long a step then takes
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
