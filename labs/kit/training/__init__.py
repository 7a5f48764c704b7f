"""Training with any strategy: the loop that every notebook, the tour and the benchmarks use.

training_step   a model under a strategy, and one training step
strategies      the table of strategies, ours and PyTorch's, and the training loop that they share      ../rows
calibration     the speed of this machine, in turns with steps of strategies
side_by_side    training with several strategies in one job, on the same batches
own_unshard     labs.fsdp with a learner's own functions that gather and free parameters
"""
