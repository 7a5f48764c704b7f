"""Challenges to beat: an open task in each notebook, with a score that is the same on any machine.

    beat.slow_wire(fn)             fn(x, latency, bandwidth)     02: x becomes the sum over all ranks, in place
    beat.early_start(fn)           fn(nbytes, backward, forward, latency, bandwidth)     03: -> buckets, in their order
    beat.large_model(fn)           fn(make, batches, settings)   04: -> losses, of the largest model
    beat.stops(fn)                 fn(spec, target)              05: -> placements to go through
    beat.in_time(fn)               fn(nbytes, forward, backward, budget, latency, bandwidth)   06: -> instructions
    beat.least_again(fn)           fn(model, most)   07: the model is changed in place
    beat.hidden_disk(fn)           fn(nbytes, forward, update, budget, latency, bandwidth)     07b: -> instructions
    beat.cheap_save(fn)            fn(disk, step, mine, tensors, memo)   08: the state is on the disk
    beat.boundary(fn)              fn(x, up, down, mesh) -> y    09b: y for this rank's tokens, with a gradient
    beat.short_schedule(fn)        fn(ranks, microbatches, costs, most)     10: -> lists of instructions
    beat.best_mesh(fn)             fn(config, batch, nodes, pieces)     11: -> axes and their sizes, outermost first
    beat.fewest_bytes(fn)          fn(tokens, width)             13: -> layouts of weights, and of activations
    beat.knobs(fn)                 fn(widths, rows, budget, latency, bandwidth)     14: -> DeepSpeed's configuration
    beat.five_questions(fn)        fn(setup, ask)                15: -> a layout; ask(layout) is the plan's answer

    ✓ slow_wire: 63.1 points of 100
      …
      straightforward 46.6, the course's own 63.1, known to be possible 75.2, the bound 100

A real job judges a learner's function: its numbers first, then the bytes that it sent or held, or the time that it
waited.  100 points stand for a bound that nobody can beat; the notebook derives it.  Each try is drawn, and saved in
scores.json if a notebook of the course runs; LABS_PLOT=off in the environment turns the drawing off.
"""

from labs.kit.challenges.best_mesh import best_mesh
from labs.kit.challenges.boundary import boundary
from labs.kit.challenges.cheap_save import cheap_save
from labs.kit.challenges.early_start import early_start
from labs.kit.challenges.fewest_bytes import fewest_bytes
from labs.kit.challenges.five_questions import five_questions
from labs.kit.challenges.hidden_disk import hidden_disk
from labs.kit.challenges.in_time import in_time
from labs.kit.challenges.knobs import knobs
from labs.kit.challenges.large_model import large_model
from labs.kit.challenges.least_again import least_again
from labs.kit.challenges.short_schedule import short_schedule
from labs.kit.challenges.slow_wire import slow_wire
from labs.kit.challenges.stops import stops

ALL = (
    slow_wire,
    early_start,
    large_model,
    stops,
    in_time,
    least_again,
    hidden_disk,
    cheap_save,
    boundary,
    short_schedule,
    best_mesh,
    fewest_bytes,
    knobs,
    five_questions,
)
