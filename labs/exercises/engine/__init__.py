"""How an exercise is checked: the contract that holds for every check, and the files from the call to the verdict.

A check runs the learner's function in real jobs, and measures

    values     against plain torch on one process, on awkward inputs: 1 to 8 ranks, sizes that divide nothing, no
               dimension, no element, large, not contiguous (an error is a right answer there), several dtypes, a
               sub-group where there is one, two calls in a row
    traffic    count and bytes of what was sent: more than needed is a waste, less than the least possible a lie
    memory     the peak, and what is left when the call is over; in Python and NumPy, too
    aftermath  modes, defaults, random numbers, process groups and hooks: as they were before the call
    time       of the processor; and the job ends

on inputs that are drawn anew in each call, except those of the budget in a ✓ line.  A check takes 3 s at most on two
quiet cores: many cases share a job.

An exercise is a value in a file of its own; `start_here/mean_on_rank_0.py` is the shortest to read.  The file says what
the function is tried on, what is expected, which mistakes have a name, and what the check returns.  What holds for all
exercises stands in the engine.  `check.x(fn)` reaches its verdict through these files, in this order:

    answer            the three answers, a mistake as a row of a table, and `answered`, which makes a check
    one of            on_paper    a function of numbers: sheets, each with its arguments and what is expected
                      on_ranks    a function on ranks: worlds, and what is expected on each rank
                      in_acts     a script that calls what was written and yields what is to be looked at
    common_mistakes   the mistakes that are the same everywhere
    value             a value on one rank, and the summands that it is made of (mixture)
    scripts           worlds and scripts in jobs, and which case is blamed where a job fails
    launching         a job of the learner's function, and the sentence for one that fails
    aftermath         what a call leaves behind in its process

Beside them stand `case` (a case, its outcome, and when two numbers agree), `late_wire` (a wire on which nothing is
right by luck), `differentiated` (functions on ranks that are called forward and backward) and `on_axes` (what each rank
of a mesh with several axes brings).
"""
