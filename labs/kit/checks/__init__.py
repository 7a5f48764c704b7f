"""How an exercise is checked: the contract that holds for every check, and where its parts are.

A check runs the learner's function in real jobs, and measures

    values     against plain torch on one process, on awkward inputs: 1 to 8 ranks, sizes that divide nothing, no
               dimension, no element, large, not contiguous (an error is a right answer there), several dtypes, a
               sub-group where there is one, two calls in a row
    traffic    count and bytes of what was sent: more than needed is a waste, less than the least possible a lie
    memory     the peak, and what is left when the call is over; in Python and NumPy, too
    aftermath  modes, defaults, random numbers, process groups, hooks: as they were (left.py)
    time       of the processor; and the job's, which ends

on inputs that are drawn anew in each call, except those of the budget in a ✓ line.  The head of its judge.py says on
what an exercise is measured.  A check takes 3 s at most on two quiet cores: many cases share a job.

A family is a folder:

    cases       inputs, and the models that they are made of
    body        what runs on a rank
    mistakes    tables of rows: a name, a question that leads on, and when it fits
    judge       the checks: which jobs, and which table is asked about what

    collectives/     broadcast, reduce_scatter, all_gather, all_reduce
    gradients/       average_gradients, accumulation, data_parallel; buckets, overlap, a file each
    fsdp/            unshard_and_reshard, prefetch, hsdp_gradient
    tensor/          conjugate, row_linear, deal_heads, split_loss, block_plan
    pipeline/        gpipe, one_f_one_b, interleaved, zero_bubble, obey
    meshes/          neighbours, partial_to_shard (scatter), order_of_axes (order), placements (table), a file each
    pencil/          functions of numbers, on sheets of paper (sheet), a file each; tables from memory (said)

and not yet folders: messages (mean_on_rank_0); mixed (mixed_precision); shards, layers, pieces and stage3 (ZeRO); norms
(clip); recomputing and twice (checkpoint); offloading (offloaded_step).  All share

    answer      the three answers, a row, a prediction       case       a case, an outcome, a step; when numbers agree
    job         a job, and what becomes of one that fails    left       what is left behind
    wire        on which nothing is right by luck            mixture    what a wrong sum is made of
"""
