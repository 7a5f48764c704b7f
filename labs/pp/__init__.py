"""Pipeline parallelism: each rank has some of the layers, and micro-batches flow through them.

    instructions    F, B, I and W of a stage and a micro-batch, and what each needs; read from text and from CSV files
    checker         can these lists be run, and if not, why?  Activations alive
    simulate        when each instruction begins and ends
    schedules       gpipe, 1f1b, interleaved, zb1p, zbv, dualpipev

A schedule is data, a list of instructions for each rank.  The same lists are checked, simulated, drawn and run.

    pp.validate(lists)
    pp.simulate(lists, F=1, B=2, send=0.1).bubble
"""

# ruff: noqa: F401

from labs.pp.checker import WrongSchedule, alive, validate
from labs.pp.instructions import B, F, I, Instruction, Lists, W, read, read_csv
from labs.pp.schedules import SCHEDULES, Schedule, dualpipev, gpipe, interleaved, one_f_one_b, zb1p, zbv
from labs.pp.simulation import Simulation, simulate
