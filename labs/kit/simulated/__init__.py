"""A dry run: the real code of one rank among any number of ranks, in one process, on a simulated device.

device               the simulated accelerator, with its own device type: streams, events, autograd, and no memory
autocast             the operations that compute in bfloat16 or in float32 on the device under torch.autocast
fake_shapes          a cache of the shapes that operators return, by their arguments
host                 fake tensors on the device, real tensors on the host; the reads for which the host waits
without_other_ranks  one process in place of all ranks: groups that send nothing, and comparisons of nothing
as_rank              the context of a dry run: this process acts as rank 17 of 1,024
strategy_steps       training steps of one strategy of the table of strategies
"""
