"""Pipeline parallelism: each rank has some of the layers, and micro-batches flow through them.

    instructions    F, B, I and W of a stage and a micro-batch, and what each needs; read from text and from CSV files
    checker         can these lists be run, and if not, why?  Activations alive
    simulation      when each instruction begins and ends
    schedules       gpipe, 1f1b, interleaved, zb1p, zbv, dualpipev
    stages          a model cut by its layers
    deferred        a backward in two halves
    messages        what travels, and in which order, so that ranks never wait for each other in a circle
    batches         what a step is given: the same batch on every rank?
    tied            a parameter that stages of several ranks share
    fitting         lists, stages and ranks: do they fit together?
    executor        obeys a schedule
    one_process     the oldest way: one process, layers on devices
    search          the quickest schedule of all, for a few ranks and micro-batches

A schedule is data, a list of instructions for each rank.  The same lists are checked, simulated and run:

    lists = pp.one_f_one_b(ranks=4, microbatches=8)
    pp.simulate(lists, F=1, B=2, send=0.1).bubble
    pp.Pipeline(pp.cut(model, 4), lists, model.loss).forward_backward(x, y)         # in a job of 4 ranks

(No function has the name of a file, so that neither hides the other.)
"""

# ruff: noqa: F401

from labs.pp.checker import WrongSchedule, alive, ranks_of, validate
from labs.pp.deferred import Deferred
from labs.pp.executor import Pipeline
from labs.pp.instructions import B, F, I, Instruction, Lists, W, read, read_csv
from labs.pp.messages import plan
from labs.pp.schedules import SCHEDULES, Schedule, dualpipev, gpipe, interleaved, one_f_one_b, zb1p, zbv
from labs.pp.simulation import Simulation, simulate
from labs.pp.stages import Stage, cut
