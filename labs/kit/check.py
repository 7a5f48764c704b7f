"""Checks for the exercises: each runs the learner's function in real jobs, and answers in one of three ways.

    check.mean_on_rank_0(fn)       fn(x)                             the mean on rank 0, one message per other rank
    check.my_shard(fn)             fn(elements, ranks, rank) -> (start, stop)
    check.mixed_precision(remember, step)    remember(p) -> {…}, step(p, kept, t, **settings)    float32 masters
    check.bytes_by_kind(fn)        fn(parameters, mixed) -> {"P": bytes, "G": …, "S": …}
    check.broadcast(fn)            fn(x, root=0, group=None)         a tree, in place
    check.reduce_scatter(fn)       fn(x, group=None) -> piece        a ring, in place
    check.all_gather(fn)           fn(x, group=None)                 a ring, in place
    check.all_reduce(fn)           fn(x, group=None)                 in place
    check.ring_seconds(fn)         fn(size, ranks, latency, bandwidth) -> seconds        of an all-reduce
    check.tree_seconds(fn)         likewise
    check.sent_by_rings(fn)        fn(ranks) -> {collective: × the tensor}
    check.average_gradients(fn)    fn(model)                         after backward: every gradient becomes the mean
    check.accumulation(fn)         fn(model, micro_batches)          several backwards, one synchronisation
    check.fill_buckets(fn)         fn(nbytes, bucket_bytes) -> buckets     which gradients travel together
    check.data_parallel(wrap)      wrap(model) -> module             with forward, no_sync() and sync()
    check.buckets(wrap)            wrap(model, **options) -> module  one all-reduce for each bucket
    check.overlap(wrap)            wrap(model, bucket_bytes) -> module      whose buckets begin during backward
    check.held_per_rank(fn)        fn(stage, layers, ranks, size) -> (P, G, S)    bytes, under DDP and each stage
    check.started_when(fn)         fn(tensors, buckets) -> {strategy: all-reduces (by backward, by sync)}
    check.partition_optimizer(fn)  fn(full, make) -> step            step() updates all of full, with 1/N of the state
    check.gradient_ready(fn)       fn(full, shard)                   full.grad goes, its part is added to shard.grad
    check.gather_and_drop(gather, drop)    gather(full, shard)       full is filled from all shards; drop(full): emptied
    check.stage_3(fn)              fn(layers, x, loss)               one step, event by event
    check.stages_by_event(fn)      fn() -> {event: (stage 1, stage 2, stage 3)}
    check.unshard_and_reshard(unshard, reshard)    unshard(shards, fulls), reshard(fulls)      one group, one gather
    check.prefetching(fn)          fn(model)                         hooks: the next layer on its way while one computes
    check.hsdp_gradient(fn)        fn(gradient, mesh) -> piece       the mean over both axes, by the least bytes
    check.held_and_sent(fn)        fn(shards, replicas) -> {strategy: (P held, sent)}
    check.clip(fn)                 fn(shards, max_norm) -> norm      by the global norm, in place
    check.checkpoint(fn)           fn(layer, x)                      layer(x), computed again in backward
    check.place_checkpoints(fn)    fn(model)                         so that both budgets are kept
    check.layer_bytes(fn)          fn(B, T, D, H, K, F) -> {term: bytes}     that a layer keeps for its backward
    check.offloaded_step(fn)       fn(due, fetch, update, store)     the next on its way while one is updated
    check.step_seconds(fn)         fn(fetch, update, store) -> seconds       of such a step
    check.load_shards(fn)          fn(index, read, rank, ranks) -> part      of a vector that other ranks have saved
    check.replace(fn)              fn(disk, name, text)              at every moment the old text or the new one, whole
    check.resume(remember, resume)         remember(model, optimizer, schedule, loader) -> {…}, resume(state, model, …)
    check.next_windows(fn)         fn(order, batch, read, rank, ranks) -> windows    that this rank reads next
    check.interval(fn)             fn(save, machine, machines) -> seconds    between two saves
    check.neighbours(fn)           fn(shape, rank) -> (coordinate, groups)   of a mesh, by arithmetic
    check.partial_to_shard(fn)     fn(summand, dim, group=None) -> piece     of the sum of all ranks' summands
    check.rules(fn)                fn() -> {operation: (letters, linear)}    of five that DTensors refuse
    check.placements(fn)           fn() -> {strategy: (P, G, S)}             of DDP, ZeRO 1, 2, 3 and HSDP
    check.conjugate(copy, reduce)  copy, reduce(x, group=None) -> tensor    forward and backward of a border
    check.row_linear(fn)           fn(x, weight, bias, group=None) -> y      whole, from pieces of x; the bias once
    check.deal_heads(fn)           fn(heads, kv_heads, ranks, rank) -> (queries, keys, sharers)      whole heads
    check.split_loss(fn)           fn(logits, targets, first, group=None) -> loss    of this rank's part of the logits
    check.block_plan(fn)           fn(config, sequence_parallel) -> plan     of one layer, in styles of labs.tp
    check.gpipe(fn)                fn(ranks, microbatches) -> lists          all forwards, then all backwards
    check.one_f_one_b(fn)          fn(ranks, microbatches) -> lists          the same bubble, with fewer activations
    check.zero_bubble(fn)          fn(ranks, microbatches) -> lists          the backward in two halves, I and W
    check.obey(fn)                 fn(instructions, stages, loss, xs, ys, take, put) -> losses     of one rank
    check.with_messages(fn)        fn(lists) -> lists                        with Send and Receive in between
    check.bubbles(fn)              fn(ranks, microbatches, stages_per_rank) -> {schedule: bubble}
    check.my_part(fn)              fn(sizes, rank, layers, sequences, heads) -> {…}      of a rank in four axes
    check.combine(fn)              fn(gradient, kind, mesh)                  added up, averaged or left, in place
    check.two_dimensions(fn)       fn(x, piece, dy, mesh) -> (y, gradient)   a layer that is split and sharded
    check.mesh_norm(fn)            fn(gradients, mesh) -> norm               each gradient once
    check.wrong_by(fn)             fn(sizes, microbatches) -> {"A", "B", "C"}            three losses, wrongly scaled
    check.mesh_sizes(fn)           fn(gpus, node, heads, layers, batch) -> [(tp, pp, dp), …]   all that can be run
    check.fullest_rank(fn)         fn(parameters, activations, tp, pp, dp, zero, microbatches) -> bytes
    check.exposed(fn)              fn(backward, reduce) -> seconds           that a step waits for its gradients
    check.forecast(fn)             fn(run) -> seconds                        of a published run's step
    check.bottlenecks(fn)          fn() -> {report: word}                    of seven real runs
    check.pass_on(fn)              fn(dims, cut) -> cut                      of each tensor, once a letter is cut
    check.meet(fn)                 fn(dims, cut, sizes) -> letter            of two that are cut, the one to follow
    check.sharded_gradients(fn)    fn(loss, shards, x, y) -> shards          on a virtual device of JAX
    check.pipelined(fn)            fn(stage, own, x) -> y                    likewise
    check.configure(fn)            fn(batch, most, ranks, clip) -> config    of DeepSpeed, from a description
    check.mend(fn)                 fn(train, micro, accumulation, ranks) -> (ranks it was for, micro-batches)
    check.translate(fn)            fn(reshard_after_forward, …, accumulation) -> config    that does as fully_shard does
    check.left_out(fn)             fn(parameters, ranks, activations, bucket, float32) -> bytes    by an estimate
    check.predict(question, guess, answer)

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
from labs.kit.checks.gradients.wrapper import data_parallel
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
    "bubbles", "buckets", "bytes_by_kind", "checkpoint", "clip", "combine", "configure", "conjugate", "data_parallel",
    "deal_heads", "exposed", "fill_buckets", "forecast", "fullest_rank", "gather_and_drop", "gpipe", "gradient_ready",
    "held_and_sent", "held_per_rank", "hsdp_gradient", "interval", "layer_bytes", "left_out", "load_shards",
    "mean_on_rank_0", "meet", "mend", "mesh_norm", "mesh_sizes", "mixed_precision", "my_part", "my_shard", "neighbours",
    "next_windows", "obey", "offloaded_step", "one_f_one_b", "overlap", "partial_to_shard", "partition_optimizer",
    "pass_on", "pipelined", "place_checkpoints", "placements", "predict", "prefetching", "reduce_scatter", "replace",
    "resume", "ring_seconds", "row_linear", "rules", "sent_by_rings", "sharded_gradients", "split_loss", "stage_3",
    "stages_by_event", "started_when", "step_seconds", "translate", "tree_seconds", "two_dimensions",
    "unshard_and_reshard", "with_messages", "wrong_by", "zero_bubble",
]  # fmt: skip
