"""Checks for the exercises: each runs the learner's function in real jobs, and answers in one of three ways.

    00   mean_on_rank_0, my_shard
    01   mixed_precision, bytes_by_kind
    02   broadcast, reduce_scatter, all_gather, all_reduce; ring_seconds, tree_seconds, sent_by_rings
    03   average_gradients, accumulation, fill_buckets, buckets, overlap, started_when
    04   held_per_rank, partition_optimizer, gradient_ready, gather_and_drop, stage_3, stages_by_event, clip
    05   neighbours, partial_to_shard, rules, placements
    06   unshard_and_reshard, prefetching, hsdp_gradient, held_and_sent
    07   checkpoint, place_checkpoints, layer_bytes
    07b  offloaded_step, step_seconds
    08   load_shards, replace
    08b  resume, next_windows, interval
    09   conjugate, row_linear, deal_heads
    09b  split_loss, block_plan
    10   gpipe, one_f_one_b, zero_bubble, obey, with_messages, bubbles
    11   my_part, combine, two_dimensions, mesh_norm, wrong_by
    13   pass_on, meet, sharded_gradients, pipelined
    14   configure, mend, translate, left_out
    15   mesh_sizes, fullest_rank, exposed, forecast, bottlenecks

Each is given the learner's function, and says in its docstring what that is called with, and what it should do; in all
notebooks there is predict(question, guess, answer).

    ✓ reduce_scatter: you sent 0.75 × the tensor per rank; the least possible is 0.75 ×
    not yet: reduce_scatter (the stub is untouched; the notebook goes on with the course's own)
    ✗ reduce_scatter: the pieces are rotated
      4 ranks, 20 elements of float64: on rank 0 element 0 is 1.62, and not -0.87
      Rank 0 holds the sum of piece 1.
      → A partial sum sets out from rank r and takes N - 1 steps. Where does it end?
      (the same numbers again: seed=81273)

The inputs are drawn anew in each call; the budget in a ✓ line is always measured on the same sizes.  What is right is
worked out by plain torch on one process; what travelled and what was held come from recordings (labs/kit/record.py).

What every check measures, and where the parts are: labs/kit/checks/__init__.py.
"""

from labs.kit.checks.answer import Answer, predict
from labs.kit.checks.collectives.by_hand import all_gather, all_reduce, broadcast, reduce_scatter
from labs.kit.checks.collectives.mean import mean_on_rank_0
from labs.kit.checks.fsdp.gradient import hsdp_gradient
from labs.kit.checks.fsdp.prefetching import prefetching
from labs.kit.checks.fsdp.translated import translate
from labs.kit.checks.fsdp.unshard import unshard_and_reshard
from labs.kit.checks.gradients.accumulation import accumulation
from labs.kit.checks.gradients.average import average_gradients
from labs.kit.checks.gradients.buckets import buckets
from labs.kit.checks.gradients.overlap import overlap
from labs.kit.checks.mapped.by_shard_map import pipelined, sharded_gradients
from labs.kit.checks.memory.mixed import mixed_precision
from labs.kit.checks.memory.offloading import offloaded_step
from labs.kit.checks.memory.recomputing import checkpoint, place_checkpoints
from labs.kit.checks.meshes.combining import combine
from labs.kit.checks.meshes.composed import two_dimensions
from labs.kit.checks.meshes.neighbours import neighbours
from labs.kit.checks.meshes.scatter import partial_to_shard
from labs.kit.checks.meshes.squares import mesh_norm
from labs.kit.checks.meshes.table import placements
from labs.kit.checks.meshes.unknown import rules
from labs.kit.checks.pencil.along_letters import meet, pass_on
from labs.kit.checks.pencil.bottlenecks import bottlenecks
from labs.kit.checks.pencil.bytes_by_kind import bytes_by_kind
from labs.kit.checks.pencil.exposed import exposed
from labs.kit.checks.pencil.fill_buckets import fill_buckets
from labs.kit.checks.pencil.forecast import forecast
from labs.kit.checks.pencil.fullest_rank import fullest_rank
from labs.kit.checks.pencil.held import held_per_rank
from labs.kit.checks.pencil.in_a_file import configure, mend
from labs.kit.checks.pencil.interval import interval
from labs.kit.checks.pencil.layer_bytes import layer_bytes
from labs.kit.checks.pencil.left_out import left_out
from labs.kit.checks.pencil.mesh_sizes import mesh_sizes
from labs.kit.checks.pencil.my_part import my_part
from labs.kit.checks.pencil.said import bubbles, held_and_sent, sent_by_rings, stages_by_event, started_when
from labs.kit.checks.pencil.seconds import ring_seconds, tree_seconds
from labs.kit.checks.pencil.shard import my_shard
from labs.kit.checks.pencil.step_seconds import step_seconds
from labs.kit.checks.pencil.windows import next_windows
from labs.kit.checks.pencil.wrong_by import wrong_by
from labs.kit.checks.pipeline.obeying import obey
from labs.kit.checks.pipeline.orders import gpipe, one_f_one_b, zero_bubble
from labs.kit.checks.pipeline.posted import with_messages
from labs.kit.checks.surviving.replacing import replace
from labs.kit.checks.surviving.resuming import resume
from labs.kit.checks.surviving.shards import load_shards
from labs.kit.checks.tensor.block import block_plan
from labs.kit.checks.tensor.border import conjugate
from labs.kit.checks.tensor.heads import deal_heads
from labs.kit.checks.tensor.linear import row_linear
from labs.kit.checks.tensor.loss import split_loss
from labs.kit.checks.zero.gathered import gather_and_drop
from labs.kit.checks.zero.norms import clip
from labs.kit.checks.zero.partition import partition_optimizer
from labs.kit.checks.zero.ready import gradient_ready
from labs.kit.checks.zero.stage3 import stage_3

__all__ = [
    "Answer", "accumulation", "all_gather", "all_reduce", "average_gradients", "block_plan", "bottlenecks", "broadcast",
    "bubbles", "buckets", "bytes_by_kind", "checkpoint", "clip", "combine", "configure", "conjugate",
    "deal_heads", "exposed", "fill_buckets", "forecast", "fullest_rank", "gather_and_drop", "gpipe", "gradient_ready",
    "held_and_sent", "held_per_rank", "hsdp_gradient", "interval", "layer_bytes", "left_out", "load_shards",
    "mean_on_rank_0", "meet", "mend", "mesh_norm", "mesh_sizes", "mixed_precision", "my_part", "my_shard", "neighbours",
    "next_windows", "obey", "offloaded_step", "one_f_one_b", "overlap", "partial_to_shard", "partition_optimizer",
    "pass_on", "pipelined", "place_checkpoints", "placements", "predict", "prefetching", "reduce_scatter", "replace",
    "resume", "ring_seconds", "row_linear", "rules", "sent_by_rings", "sharded_gradients", "split_loss", "stage_3",
    "stages_by_event", "started_when", "step_seconds", "translate", "tree_seconds", "two_dimensions",
    "unshard_and_reshard", "with_messages", "wrong_by", "zero_bubble",
]  # fmt: skip
