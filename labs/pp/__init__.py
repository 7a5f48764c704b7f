"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through them.

    instructions    the instructions F, B, I and W, and the instructions that each needs; read from text and CSV files
    checker         the check that a schedule can be run, and the number of activations alive on each rank
    simulation      the times at which each instruction of a schedule begins and ends
    schedules       the schedules gpipe, 1f1b, interleaved, zb1p, zbv and dualpipev
    stages          a model cut into stages, by its layers
    split_backward  a backward in two halves: gradients of inputs first, gradients of weights later
    messages        the messages between ranks, in an order in which ranks never wait for each other in a circle
    batches         the batch of a step: is it the same batch on every rank?
    tied            parameters that stages of several ranks share
    fitting         checks that lists, stages and ranks fit together
    executor        the class Pipeline, which runs a schedule on the ranks
    one_process     the oldest pipeline: one process, layers on several devices
    search          the fastest schedule of all, for a few ranks and micro-batches

A schedule is data: a list of instructions for each rank.  The same lists are checked, simulated and run:

    lists = pp.one_f_one_b(ranks=4, microbatches=8)
    pp.simulate(lists, F=1, B=2, send=0.1).bubble
    pp.Pipeline(pp.cut(model, 4), lists, model.loss).forward_backward(x, y)         # in a job of 4 ranks

No function of this package has the name of one of its files, so that neither hides the other.
"""

# ruff: noqa: F401

from labs.pp.checker import WrongSchedule, alive, ranks_of, validate
from labs.pp.executor import Pipeline
from labs.pp.instructions import B, F, I, Instruction, Lists, W, read, read_csv
from labs.pp.messages import plan
from labs.pp.schedules import SCHEDULES, Schedule, dualpipev, gpipe, interleaved, one_f_one_b, zb1p, zbv
from labs.pp.simulation import Simulation, simulate
from labs.pp.split_backward import Deferred
from labs.pp.stages import Stage, cut
