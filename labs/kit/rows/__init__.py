"""The rows of the table of strategies: how each is set up, and what `labs.cost` predicts for it; one family per file.

row         the columns of a row
ddp         strategies that average gradients
fsdp        strategies that shard the state
deepspeed   DeepSpeed's ZeRO stages, if DeepSpeed is installed
tp          strategies that split matrices
pp          strategies that divide the layers among the ranks
parallel    strategies on several axes at once
gspmd       XLA's compiler, if JAX is installed
"""
