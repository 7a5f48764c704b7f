"""Training by any strategy, ours or PyTorch's, with one loop.

    strategies    the table of strategies, strategies.ROWS["fsdp"], and their training loop, strategies.train
    in_turn       train with several strategies in one job, on the same batches
    recorded      run such a job, and return the bytes that each strategy sends
    ledgers       run such jobs, and return the losses of each strategy, and what it sends and holds
    Training      a model under a strategy, with everything that a training loop needs
    step          take a step of a Training, and return its loss
    take_step     take a step of a Training without waiting for a GPU
    compute_gradients  the first part of a step, before the optimizer
    backward      run forward and backward of each micro-batch
    trainable     the parameters that are not frozen
    ADAMW         the settings of AdamW in every training of the course
    clipped       train with clipped gradients, and return their norms
    one_process   train in one process with clipped gradients; return the norms and the parameters
    dry_step      pretend to be rank 0 of a mesh of three dimensions, for two steps
    my_sequences  the sequences of a batch that a rank of a mesh reads
    predicted     the bytes that a rank sends along each axis of a mesh, and holds
    largest_difference  how far norms and parameters are from those of one process
    paced         run functions whose matrix products take longer, as recorded steps
    calibrated    the seconds of a computation, of Python and of an all-reduce here, beside steps of strategies
    by_xla, layers_by_xla, zero_3_by_hand   collectives that XLA has compiled, for a function, layers, a step of ZeRO 3
    products      the bytes that a rank sends for products in given layouts, by XLA and by the course
    largest_error  how far a labs.gspmd program on real ranks is from one process
    with_experts  train models with experts; return parameters, and the rows of each expert
    take_loads    the rows of each expert in each layer, since the last call
    norms_by      train with experts whose gradients a function averages; return the norms and losses
    slow_experts  let experts take longer for each row, so that a timeline shows their loads
    unshard_with  a learner's own functions in `labs.fsdp`, in place of its gather and drop

The tour, the contract test and the benchmarks read the same table: a strategy with one row (rows/) is in all three.
"""

from labs.kit.training import strategies
from labs.kit.training.calibration import calibrated
from labs.kit.training.clipped_steps import clipped, dry_step, largest_difference, my_sequences, one_process, predicted
from labs.kit.training.expert_steps import norms_by, slow_experts, take_loads, with_experts
from labs.kit.training.own_unshard import unshard_with
from labs.kit.training.paced_products import paced
from labs.kit.training.sent_by_layout import by_xla, largest_error, layers_by_xla, products, zero_3_by_hand
from labs.kit.training.side_by_side import in_turn, ledgers, recorded
from labs.kit.training.training_step import ADAMW, Training, backward, compute_gradients, step, take_step, trainable

__all__ = [
    "ADAMW", "Training", "backward", "by_xla", "calibrated", "clipped", "compute_gradients", "dry_step",
    "in_turn", "largest_difference", "largest_error", "layers_by_xla", "ledgers", "my_sequences",
    "norms_by", "one_process", "paced", "predicted", "products", "recorded", "slow_experts", "step", "strategies",
    "take_loads", "take_step", "trainable", "unshard_with", "with_experts", "zero_3_by_hand",
]  # fmt: skip
