"""Pencil and paper: what a job must send and hold, and how long that takes, before it is run.

    job                what is to be run: a model, a batch, a number of ranks, a precision
    traffic            elements and messages that one rank sends, and seconds
    cluster            the links of a cluster, in one table; what a collective takes on one
    model_states       what is held at rest: bytes per parameter, by precision and stage; what an answer is made of
    saved_activations  what backward needs from a forward, and what is alive on the way back
    data_parallel      one rank, one step, for each variant of `labs.ddp`
    zero_stages        ZeRO, stage by stage
    fully_sharded      FSDP, parameter by parameter
    split              what a tensor-parallel rank has of the model
    split_activations  what waits for its backward, and what is alive as that passes
    tensor_parallel    layer by layer what it sends and holds, with sequence parallelism or without
    pipeline_stages    what a stage of a pipeline holds while it runs an instruction, and what is left of that
    pipeline           a schedule: what it sends and holds
    on_a_mesh          stages that are split and sharded
    bubble             how long a schedule takes, and what is alive meanwhile, in closed form
    operations         additions and multiplications of a step
    torch_states       PyTorch's own strategies: bytes sent, and P, G and S
    deepspeed_stages   the same with DeepSpeed
    sense              what is refused, since it makes no sense
    fit                does it fit a card, and on how many ranks?
    generation         the cache of keys and values; milliseconds per token, by class of link

Integers are exact, down to the pieces that do not divide evenly; the textbook's formula, their limit, stands
beside them. Nothing here imports or runs what it predicts: measurements are compared with it.

    n          elements of a tensor                  S    its bytes
    N, ranks   ranks of the group                    c_i  piece i of n elements in N, the longer ones first
    Ψ          parameters of a model                 other letters are those of `labs.model`

All names are at hand as `cost.name`. (No function has the name of a file, so that neither hides the other.)

    job = cost.Job(config, batch=2, ranks=4)
    cost.ddp(job, "overlapped").held.peak
"""

# ruff: noqa: F401

from labs.cost.bubble import bubble_seconds, pipeline_seconds, stages_alive
from labs.cost.cluster import CARD, FLOPS, LINKS, MEMORY, NODE, LinkClass, all_gather_seconds, all_reduce_seconds
from labs.cost.data_parallel import buckets, ddp, ddp_sent
from labs.cost.deepspeed_stages import deepspeed, deepspeed_sent
from labs.cost.fit import per_rank, smallest_ranks
from labs.cost.fully_sharded import fsdp, fully_shard_sent
from labs.cost.generation import LINK_CLASSES, Token, kv_cache, token_seconds, token_sent
from labs.cost.job import RECOMPUTE, Job
from labs.cost.model_states import (
    FLOAT,
    INDEX,
    PIE,
    Held,
    Layer,
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
from labs.cost.saved_activations import activations, korthikanti, layer_activations, layer_terms, most_activations
from labs.cost.sense import checked
from labs.cost.split import Share, share
from labs.cost.split_activations import regathered_activations
from labs.cost.tensor_parallel import fsdp_tp, tp, tp_calls, tp_sent
from labs.cost.torch_states import (
    fully_shard,
    fully_shard_tp,
    parallelize_module,
    pipelining,
    pipelining_on_a_mesh,
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

# What is handed out looks at what it is given; among themselves the formulas trust each other.
globals().update(
    {name: checked(each) for name, each in globals().items() if callable(each) and not isinstance(each, type)}
)
