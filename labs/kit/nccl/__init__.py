"""A judgement of how a job that ran on gloo would run on NCCL.

calls        the calls that a rank makes to NCCL, in order of issue
standstill   a replay of all ranks' calls under NCCL's rules of order, until all are done or no rank can continue
faults       calls that end with wrong numbers
verdict      would_hang(recording): the rules, their sources, and one of four verdicts
"""
