"""The rows of the table of strategies: how each is set up, and what `labs.cost` predicts of it; one family per file.

row     what a row says
ddp     gradients averaged
fsdp    state sharded
deepspeed   likewise, where it is installed
tp      matrices split
pp      layers dealt out
parallel    several axes at once
"""
