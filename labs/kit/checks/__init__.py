"""How an exercise is checked: the contract that holds for every check, and where its parts are.

A check runs the learner's function in real jobs, and measures

    values     against plain torch on one process, on awkward inputs: 1 to 8 ranks, sizes that divide nothing, no
               dimension, no element, large, not contiguous (an error is a right answer there), several dtypes, a
               sub-group where there is one, two calls in a row
    traffic    count and bytes of what was sent: more than needed is a waste, less than the least possible a lie
    memory     the peak, and what is left when the call is over; in Python and NumPy, too
    aftermath  modes, defaults, random numbers, process groups, hooks: as they were (left.py)
    time       of the processor; and the job's, which ends

on inputs that are drawn anew in each call, except those of the budget in a ✓ line.  A check takes 3 s at most on two
quiet cores: many cases share a job.

An exercise is a value, in a file of its own (collectives/mean is the shortest to read).  There stand, in this order,
what it is tried on; what happens, and is looked at; what is due, and what may be there instead; its mistakes; the
check.  Most mistakes are what would have been due, had something else been asked for.  What holds for all exercises is
not written there.  There are three engines:

    pencil/sheet    a function of numbers: sheets, each with its arguments and what is due
    ranks           a function on ranks: worlds, and what is due on each rank
    acts            a script that calls what was written, and yields what is to be looked at; tables of rows about it

and what they are made of:

    scripts      worlds and scripts in jobs, and who is blamed where a job fails
    rows         mistakes that are the same everywhere        one        a value on one rank, and of what it is made
    answer       the three answers, a row, a prediction       case       a case, an outcome; when numbers agree
    launching    a job, and what becomes of one that fails    left       what is left behind
    late_wire    on which nothing is right by luck            mixture    what a wrong sum is made of

Families of exercises:

    collectives/     mean_on_rank_0 (mean); broadcast, reduce_scatter, all_gather, all_reduce (by_hand)
    gradients/       average_gradients (average), accumulation, buckets, overlap
    zero/            partition_optimizer (partition), gradient_ready (ready), gather_and_drop (gathered),
                     stage_3 (stage3), clip (norms)
    fsdp/            unshard_and_reshard (unshard), prefetching, hsdp_gradient (gradient), translate (translated)
    memory/          mixed_precision (mixed); checkpoint, place_checkpoints (recomputing); offloaded_step (offloading)
    surviving/       load_shards (shards), replace (replacing), resume (resuming)
    tensor/          conjugate (border), row_linear (linear), deal_heads (heads), split_loss (loss), block_plan (block)
    pipeline/        gpipe, one_f_one_b, zero_bubble (orders); obey (obeying), with_messages (posted)
    meshes/          neighbours, partial_to_shard (scatter), rules (unknown), placements (table);
                     combine (combining), two_dimensions (composed), mesh_norm (squares)
    pencil/          functions of numbers, a file each; tables from memory (said)

Schedules, of which many are right, come back on sheets, too, and are judged by what they amount to (pipeline/listed).
"""
