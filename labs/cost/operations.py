"""Operations of a step: additions and multiplications of the GPT's matrix products, for each token.

    layer_operations(config, context)        a layer, forward and backward: 6 N + 6 T D
    attention_operations(config, context)    the part of attention in a layer: 6 T D
    head_operations(config)                  the head: 6 V D
    recomputed_operations(config, context, recompute)    the part of a layer that is recomputed
    model_operations(config, context)        the model, as published figures of MFU count it

A product of a matrix of N numbers by a vector takes 2 N operations; backward takes twice as many, for the gradients of
its input and of the matrix.  Each token attends to T/2 others on average, which takes 2 x 2 D operations each.

MFU, the model FLOPs utilization, divides by a GPU's best rate, and counts attention as if it were not causal: twice the
operations that are done.  There are several definitions [PaLM; nanotron and torchtitan differ about the embedding], so
compare tokens per second, never MFU.

Sources: [PaLM] Chowdhery et al. 2022, arXiv 2204.02311, appendix B; Korthikanti et al. 2022, arXiv 2205.05198, section
6 and appendix A.
"""

from fractions import Fraction
from math import prod

from labs.cost.job import RECOMPUTE
from labs.cost.model_states import gpt_layers

FORWARD, BOTH = 2, 6  # operations for each number of a matrix: in forward, and in forward and backward together


def layer_matrices(config) -> int:
    """Return the number of elements in the matrices of a layer."""
    return sum(prod(shape) for shape in gpt_layers(config)[1].trained if len(shape) == 2)


def layer_operations(config, context: int) -> int:
    return BOTH * layer_matrices(config) + attention_operations(config, context)


def attention_operations(config, context: int) -> int:
    """Return the operations of a layer's causal attention, without its projections."""
    return BOTH * context * config.heads * config.head_size


def head_operations(config) -> int:
    return BOTH * config.vocab * config.dim


def recomputed_operations(config, context: int, recompute: str) -> Fraction:
    """Return the operations that a layer does again; none under "selective", which saves the results of products."""
    match recompute:
        case "none" | "selective":
            return Fraction(0)
        case "all but attention":
            return Fraction(FORWARD * layer_matrices(config))
        case "full":
            return Fraction(FORWARD, BOTH) * layer_operations(config, context)
    raise ValueError(f"recompute is {recompute!r}: it must be one of {', '.join(map(repr, RECOMPUTE))}")


def model_operations(config, context: int) -> int:
    """Return 6 N + 12 L T D for each token; N does not count the embedding [PaLM]."""
    layer = layer_operations(config, context) + attention_operations(config, context)
    return config.depth * layer + head_operations(config)
