"""Training under a strategy, as every notebook, the tour and the benchmarks do it.

training_step   a model under a strategy, and one step of it
strategies      the table of strategies, ours and PyTorch's, and the training loop that they share      ../rows
side_by_side    several strategies in one job, on the same batches
own_unshard     a learner's own gather and drop in labs.fsdp
"""
