"""A check of whether a job that ran on gloo would hang on NCCL, or receive wrong numbers.

calls            the calls that a rank makes to NCCL, in order of issue
deadlock_replay  a replay of all ranks' calls under NCCL's rules of order, which finds deadlocks
faults           calls that would end with wrong numbers on NCCL
would_hang       would_hang(recording): the rules, their sources, and one of four verdicts
"""
