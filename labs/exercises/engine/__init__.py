"""The engine that checks exercises: the contract of every check, and the files from the call to the verdict.

A check runs the learner's function in real jobs, and measures

    values     against plain torch on one process, on awkward inputs: 1 to 8 ranks, sizes that divide nothing, no
               dimension, no element, large tensors, tensors that are not contiguous (where an error is right, too),
               several dtypes, a sub-group if the function takes one, two calls in a row
    traffic    the count and the bytes of messages: more than needed is a waste, less than the least possible a lie
    memory     the peak, and the bytes held after the call, in Python and NumPy as well as in torch
    aftermath  modes, defaults, random numbers, process groups and hooks must be as they were before the call
    time       the processor time of a call is limited, and the job must end

on inputs that are drawn anew in each call, except those whose budget stands in a ✓ line.  A check takes at most 3 s on
two quiet cores, because many cases share a job.

An exercise is a value in a file of its own; `start_here/mean_on_rank_0.py` is the shortest to read.  The file has the
inputs of the function, the expected results, the mistakes with a name, and what the check returns.  The engine has
everything that all exercises share.  `check.x(fn)` reaches its verdict through these files, in this order:

    answer            the three answers, a mistake as a row of a table, and `answered`, which makes a check
    one of            on_paper    a function of numbers: sheets, each with arguments and the expected answer
                      on_ranks    a function on ranks: worlds, and the expected values on each rank
                      in_acts     a script that calls the learner's functions and yields the values to be judged
    common_mistakes   the mistakes that are the same everywhere
    value             a value on one rank, and the summands that it is made of (mixture)
    scripts           worlds and scripts in jobs, and which case is blamed if a job fails
    launching         a job of the learner's function, and the sentence for one that fails
    aftermath         what a call leaves behind in its process

The other files are `case` (a case, its outcome, and when two numbers agree), `late_wire` (a network on which nothing is
right by luck), `differentiated` (functions on ranks with a forward and a backward) and `on_axes` (the tensors of ranks
on a mesh with several axes).  Challenges have `challenge`, `scores` and `tries`.
"""
