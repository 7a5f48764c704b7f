"""A dry run: the real code as one rank of any number, in one process, on a device that only pretends.

device     an accelerator of its own type: streams, events, autograd, and no memory behind its tensors
autocast   which of its operations compute in bfloat16 under torch.autocast, and which in float32
fakes      what operators answer of shapes: asked once, and known for the same arguments
host       which tensors have numbers (those of the host) and which have none; what a step reads of them
alone      one process in place of all ranks: groups that send nothing, and nothing to compare with
as_rank    all of these together: this process as rank 17 of 1,024
rehearsal  steps of a row of the table of strategies
dry        some ranks of many, each in a process of its own, and recordings of them
dryrun     python -m labs dryrun
"""
