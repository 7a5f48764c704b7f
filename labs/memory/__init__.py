"""Memory: three ways in which a rank holds fewer bytes.

In this order:

    precision          mixed precision: compute in two bytes, update in four; loss scaling
    selective          operations whose outputs are saved for the recomputation, which then skips them
    recompute_context  the state that a recomputation needs in order to repeat the first run
    recompute          activations that are recomputed in backward, and not held until then: activation checkpointing
    mapped_files       tensors in files that are mapped into memory
    disk               optimizer state in files that no crash can damage
    offload            optimizer state in host memory or on disk
"""
