"""A dry run: the real code as one rank of any number, in one process, on a simulated device.

device     the simulated accelerator, with its own device type: streams, events, autograd, and no memory behind tensors
autocast   the operations that compute in bfloat16 there under torch.autocast, and those that compute in float32
fakes      the shapes that operators return: each is asked once, and cached by its arguments
host       the tensors that have numbers, on the host, and those that have none; the reads that wait for the device
alone      one process in place of all ranks: groups that send nothing, and comparisons that compare nothing
as_rank    all of these together: this process as rank 17 of 1,024
rehearsal  training steps of a row of the table of strategies
"""
