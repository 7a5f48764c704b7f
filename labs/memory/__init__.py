"""Hold less.

In this order:

    precision     compute in two bytes, remember in four; loss scaling
    selective     operations whose outputs are kept, and not computed again
    surroundings  what a second run needs, so that it does what the first one did
    recompute     activations computed twice, so that they need not be kept; PyTorch calls it checkpointing
    mapped_files  tensors in files that are mapped into memory
    disk          numbers in files that no crash can spoil
    offload       optimizer state in host memory or on disk
"""
