"""What NCCL would make of a job that ran on gloo.

calls        what a rank asks of NCCL, in its order of issue
standstill   the calls of all ranks, replayed under NCCL's rules of order, until nothing goes on
faults       calls that come to an end, with wrong numbers
verdict      would_hang(recording): the rules, their sources, and one of four verdicts
"""
