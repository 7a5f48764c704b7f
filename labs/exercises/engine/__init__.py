"""The engine that checks exercises: the contract of every check, and the files from the call to the verdict.

A check runs the learner's function in real jobs, and measures

    values     against plain torch on one process, on awkward inputs: 1 to 8 ranks, sizes that divide nothing, no
               dimension, no element, large tensors, tensors that are not contiguous (where an error is right, too),
               several dtypes, a sub-group if the function takes one, two calls in a row
    traffic    the count and the bytes of messages: more than needed is a waste, less than the least possible a lie
    memory     the peak, and the bytes held after the call, in Python and NumPy as well as in torch
    traces     modes, defaults, random numbers, process groups and hooks must be as they were before the call
    time       the processor time of a call is limited, and the job must end

on inputs that are drawn anew in each call, except those whose budget stands in a ✓ line.  A check takes at most 3 s on
two quiet cores, because many cases share a job.

An exercise is a value in a file of its own; `start_here/mean_on_rank_0.py` is the shortest on ranks, and
`resume/interval.py` on paper.  The file says what the function is tried on, what is expected, what may be sent and
held, which mistakes have a name, and what the line of success says; the engine has what all exercises share.
`check.x(fn)` reaches its verdict through at most eight files.  Each imports only those below it:

    the exercise       its inputs, expected values and mistakes, as a value of one of the three engines
    on_ranks           one call on ranks: worlds, and the values that each rank must have
      or by_script     a script that calls the learner's functions and yields the values to be judged
      or on_paper      a function of numbers: sheets, each with arguments and the expected answer
    common_mistakes    the mistakes that are the same everywhere, what may be sent and held
    value              a value on one rank: is it the expected one, and of which summands is it made?
    scripts            worlds and scripts in jobs, and which world is blamed if a job fails
    around_a_call      the slow network during a call, and what the call leaves behind
    learner_job        a job of the learner's function, and the sentence for one that fails
    answer             the three answers, a mistake as a row of a table, and `answered`, which makes a check

Three files are for some exercises: `differentiated` (functions on ranks with a forward and a backward), `on_axes` (the
tensors of ranks on a mesh with several axes) and `mixture` (gradients as mixtures of those of all micro-batches).
Challenges have `challenge` and `scores`.
"""
