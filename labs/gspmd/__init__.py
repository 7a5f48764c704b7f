"""A small GSPMD: say how a few tensors are laid out, and each other layout, and all communication, follows.

In this order:

    tracing      a function's operations, as a list: forward and backward, each with its letters
    sayable      what such a list cannot say, and is refused
    propagation  from the layouts that are given to that of each value: along letters, and what wins where two meet
    lowering     how each operation is computed there, with the collectives that this takes: what a rank sends
    execution    the same on the blocks of a mesh
    annotated    forward and backward of a layer, and the few layouts that are given of it

So it is used:

    graph = trace(forward_and_backward(layer), x, gradient, *weights)           # once, on whole tensors
    program = lower(graph, propagate(graph, (4, 2), given(graph, names, ("dp", "tp"))))
    y, *gradients = execute(program, mesh, *blocks)                             # on each rank

labs.dtensor decides op by op, as they are called, and knows of an operation only what it is given.  Here the whole
program is known before it runs, as it is to XLA: a layout that is wanted at the end can be had from the beginning.

Source: Xu et al. 2021, arXiv 2105.04663, section 3; the letters are what Shardy, XLA's partitioner, calls factors.
"""

# ruff: noqa: F401

from labs.gspmd.annotated import forward_and_backward, given
from labs.gspmd.execution import execute
from labs.gspmd.lowering import Program, lower
from labs.gspmd.propagation import propagate
from labs.gspmd.tracing import Graph, Operation, trace
