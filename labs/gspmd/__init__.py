"""A small GSPMD: you give the layouts of a few tensors, and all other layouts and all communication follow.

Read the files in this order:

    tracing          a function's operations as a list, forward and backward, each with its letters
    traceable        checks that refuse what a list of operations cannot express
    propagation      the layout of each value, from the given ones: cuts pass along letters, a rule decides conflicts
    lowering         the way in which each operation is computed, with its collectives and the bytes that a rank sends
    execution        running the program on the blocks of a mesh
    annotated_layer  forward and backward of a layer, and the few layouts that are given for it

Example:

    graph = trace(forward_and_backward(layer), x, gradient, *weights)           # once, on whole tensors
    program = lower(graph, propagate(graph, (4, 2), given(graph, names, ("dp", "tp"))))
    y, *gradients = execute(program, mesh, *blocks)                             # on each rank

labs.dtensor decides for one operation at a time, when the operation is called, and knows only its inputs.  In this
chapter, as in XLA, the whole program is known before it runs: a layout that is needed at the end can be used from the
beginning.

Source: Xu et al. 2021, arXiv 2105.04663, section 3; the letters are what Shardy, XLA's partitioner, calls factors.
"""

# ruff: noqa: F401

from labs.gspmd.annotated_layer import forward_and_backward, given
from labs.gspmd.execution import execute
from labs.gspmd.lowering import Program, lower
from labs.gspmd.propagation import propagate
from labs.gspmd.tracing import Graph, Operation, trace
