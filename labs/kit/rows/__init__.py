"""The strategies themselves, as rows of the table STRATEGIES: how each is set up, and what `labs.cost` predicts for it.

row         the class of a row, whose fields are the columns of the table
ddp         strategies that average gradients
fsdp        strategies that shard the state
deepspeed   DeepSpeed's ZeRO stages, if DeepSpeed is installed
tp          strategies that split matrices
pp          strategies that divide the layers among the ranks
parallel    strategies on several axes at once
ep          strategies that split experts
gspmd       XLA's compiler, if JAX is installed
"""
