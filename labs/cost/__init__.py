"""Pencil and paper: formulas for the bytes that a job must send and hold, and for its time, before it is run.

    job                the job: a model, a batch, a number of ranks, a precision
    traffic            elements and messages that one rank sends in a collective, and seconds
    cluster            a table of a cluster's links; the seconds of a collective on each
    model_states       bytes per parameter between steps, by precision and stage; the classes of a prediction
    saved_activations  the activations that backward needs, and those alive while backward runs
    data_parallel      a step of one rank, for each variant of `labs.ddp`
    zero_stages        ZeRO, stage by stage
    fully_sharded      FSDP, parameter by parameter
    split              a tensor-parallel rank's share of the model
    tensor_parallel    bytes sent and held, layer by layer, with sequence parallelism or without
    context_parallel   bytes sent and held by a rank that computes a piece of every sequence
    pipeline_stages    bytes that a pipeline stage saves, and holds during each instruction
    pipeline           bytes that a rank of a pipeline sends and holds under a schedule
    on_a_mesh          stages that are split and sharded
    experts            experts split over ranks, for given loads
    bubble             seconds of a schedule, and the activations alive meanwhile, in closed form
    operations         additions and multiplications of a step
    torch_states       PyTorch's own strategies: bytes sent, and P, G and S
    deepspeed_stages   the same for DeepSpeed
    sense              checks that refuse arguments without sense
    fit                does it fit a card, and on how many ranks?
    generation         the cache of keys and values; milliseconds per token, by class of link

Integers are exact, even for pieces that do not divide evenly; beside them stands the textbook's formula, which is
their limit. Nothing here imports or runs what it predicts: measurements are compared with it.

    n          elements of a tensor                  S    its bytes
    N, ranks   ranks of the group                    c_i  piece i of n elements in N, the longer ones first
    Ψ          parameters of a model                 other letters are those of `labs.model`

All names are available as `cost.name`. No function has the name of a file, so that neither hides the other.

    job = cost.Job(config, batch=2, ranks=4)
    cost.ddp(job, "overlapped").held.peak
"""

# ruff: noqa: F401

from labs.cost.bubble import bubble_seconds, pipeline_seconds, stages_alive
from labs.cost.cluster import CARD, FLOPS, LINKS, MEMORY, NODE, LinkClass, all_gather_seconds, all_reduce_seconds
from labs.cost.context_parallel import attention_sent, cp
from labs.cost.data_parallel import buckets, ddp, ddp_sent
from labs.cost.deepspeed_stages import deepspeed, deepspeed_sent
from labs.cost.experts import (
    even_loads,
    expert_parallel,
    fsdp_experts,
    mixture_sent,
    own_experts,
    torch_expert_parallel,
)
from labs.cost.fit import per_rank, smallest_ranks
from labs.cost.fully_sharded import fsdp, fully_shard_sent
from labs.cost.generation import LINK_CLASSES, Token, kv_cache, token_seconds, token_sent
from labs.cost.job import RECOMPUTE, Job
from labs.cost.model_states import (
    FLOAT,
    INDEX,
    PIE,
    HeldBytes,
    LayerShapes,
    MiB,
    Moment,
    Prediction,
    bytes_held,
    gpt_layers,
    held,
    optimizer_state,
    optimizer_step,
    parameter_sizes,
)
from labs.cost.on_a_mesh import parallel
from labs.cost.operations import (
    BOTH,
    attention_operations,
    head_operations,
    layer_matrices,
    layer_operations,
    model_operations,
    recomputed_operations,
)
from labs.cost.pipeline import pp
from labs.cost.saved_activations import (
    activations,
    korthikanti,
    layer_activations,
    layer_terms,
    most_activations,
    regathered_activations,
)
from labs.cost.sense import checked
from labs.cost.split import Share, share
from labs.cost.tensor_parallel import cp_tp, fsdp_tp, tp, tp_calls, tp_sent
from labs.cost.torch_states import (
    fully_shard,
    fully_shard_tp,
    parallelize_module,
    pipelining,
    pipelining_on_a_mesh,
    templated_ring,
    zero_redundancy,
    zero_redundancy_sent,
)
from labs.cost.traffic import (
    Traffic,
    all_gather,
    all_reduce,
    all_reduce_doubling,
    all_reduce_limit,
    all_to_all,
    barrier,
    broadcast,
    doubling_seconds,
    message,
    piece,
    pieces_but,
    reduce,
    reduce_scatter,
    ring_seconds,
    tree_seconds,
)
from labs.cost.zero_stages import zero, zero_limit, zero_sent

# Every exported function checks its arguments; inside this package, the formulas trust each other.
globals().update(
    {name: checked(each) for name, each in globals().items() if callable(each) and not isinstance(each, type)}
)
