"""The tables and pictures of the course: each is displayed as the last expression of a notebook cell.

    ledger, table, traffic, size      numbers in tables; predictions beside measurements        tables.py
    bars, curves                      measured bytes by kind, and losses, as PNG                figures.py
    memory                            bytes held over time, as PNG                              memory_over_time.py
    by_rank                           a ledger of bytes per rank: equal ranks share a row            ranks_ledger.py
    timeline                          the work, communication and waiting of each rank, as PNG  timelines.py
    messages, step, sends             messages between ranks, and the ranks' pieces, as SVG     collective_messages.py
    mesh, chart                       ranks as a grid; the values of a formula as bars, as SVG  charts.py
    nodes                             the process groups of a mesh on its nodes, as SVG         mesh_on_nodes.py
    who_combines                      mean, sum or nothing, by kind of parameter, as SVG        gradients_combined.py
    apart                             loss curves, and each one's distance from the first, PNG  curves_apart.py
    buckets                           buckets of gradients, and the ranks that need them, SVG   deepspeed_buckets.py
    crossings                         lines, and where the last one passes the others, as SVG   crossing_lines.py
    ratios                            ratios as bars from 1 on a logarithmic axis, as SVG       ratio_bars.py
    on_scales                         lines that cross, and dots, on two logarithmic axes, SVG  lines_on_scales.py
    wire                              who sends how much on two nodes of two ranks, as SVG      wire_between_nodes.py
    orders, rank_by_axis              bytes out of a node, and a rank's step, by mesh axis      bytes_of_axes.py
    sent_and_held                     what each rank sends along each axis and holds, as SVG    ranks_in_bars.py
    rows_by_rank                the rows that each rank computes, beside the least possible, SVG  rows_of_ranks.py
    node_bound                        a node's layers and sequences, and what must leave it     node_bound.py
    weight_cut                        one weight, cut along the axes of a mesh, as SVG            weight_cut.py
    scatter, Point                    points with tooltips on two logarithmic axes, as SVG      scatters.py
    speeds, lost, parallelism         published runs beside forecasts, as SVG                   runs_and_forecasts.py
    by_kind, agreement                a reader's forecast beside published runs                 runs_and_forecasts.py
    yours_and_plan                    a reader's bytes beside the plan's                        runs_and_forecasts.py
    rules, rule_times, verdict        rules of thumb beside published runs, and by the plan     rules_on_runs.py
    pairs, ratio_errors, order        what a planned ratio or order is worth                    rules_on_runs.py
    layouts                           all layouts of a plan, by memory and time, as SVG         layout_map.py
    products                          products of cut matrices, and the bytes that they send, as SVG  cut_products.py
    blocks                            the block of a tensor that each rank holds, as SVG        dtensor_blocks.py
    schedule                          a pipeline schedule, simulated and recorded               pipeline_gantt.py
    plan                              a tensor-parallel plan on its model, as SVG               tensor_parallel_plan.py
    ring_steps                        ring attention: who has whose keys, and what is masked    ring_steps.py
    work_per_rank                     products of each rank and step under several cuts, as SVG work_per_rank.py
    travel                            tokens that travel to their experts and back, as SVG        expert_travel.py
    expert_loads                      load per expert over several trainings, as PNG              expert_loads.py
    merged_softmax                    two parts of a softmax, and the weights of their merge, SVG merged_softmax.py
    keys_by_way                       what a rank has in the ways of context parallelism, as SVG  keys_by_way.py
    reads, folder                     the files of a checkpoint: read by ranks, and in a save   checkpoint_files.py
    formula, term                     a picture under its formula, with highlighted terms       formulas.py
    KINDS, TIMELINE                   the colours of every figure and widget                    palette.py
    Drawing, Figure, Table, Ledger    what these functions return: pictures, and tables         picture.py, tables.py
    Canvas                            an empty drawing, for shapes and words, as SVG            svg.py

These functions neither measure nor predict: they draw the numbers of a recording or of a formula.
"""

from labs.kit.drawing.bytes_of_axes import orders, rank_by_axis
from labs.kit.drawing.charts import chart, mesh
from labs.kit.drawing.checkpoint_files import folder, reads
from labs.kit.drawing.collective_messages import messages, sends, step
from labs.kit.drawing.crossing_lines import crossings
from labs.kit.drawing.curves_apart import apart
from labs.kit.drawing.cut_products import products
from labs.kit.drawing.deepspeed_buckets import buckets
from labs.kit.drawing.dtensor_blocks import blocks
from labs.kit.drawing.expert_loads import expert_loads
from labs.kit.drawing.expert_travel import travel
from labs.kit.drawing.figures import bars, curves
from labs.kit.drawing.formulas import formula, term
from labs.kit.drawing.gradients_combined import who_combines
from labs.kit.drawing.keys_by_way import keys_by_way
from labs.kit.drawing.layout_map import layouts
from labs.kit.drawing.lines_on_scales import on_scales
from labs.kit.drawing.memory_over_time import memory
from labs.kit.drawing.merged_softmax import merged_softmax
from labs.kit.drawing.mesh_on_nodes import nodes
from labs.kit.drawing.node_bound import node_bound
from labs.kit.drawing.palette import KINDS, TIMELINE
from labs.kit.drawing.picture import Drawing, Figure
from labs.kit.drawing.pipeline_gantt import schedule
from labs.kit.drawing.ranks_in_bars import sent_and_held
from labs.kit.drawing.ranks_ledger import by_rank
from labs.kit.drawing.ratio_bars import ratios
from labs.kit.drawing.ring_steps import ring_steps
from labs.kit.drawing.rows_of_ranks import rows_by_rank
from labs.kit.drawing.rules_on_runs import order, pairs, ratio_errors, rule_times, rules, verdict
from labs.kit.drawing.runs_and_forecasts import agreement, by_kind, lost, parallelism, speeds, yours_and_plan
from labs.kit.drawing.scatters import Point, scatter
from labs.kit.drawing.svg import Canvas
from labs.kit.drawing.tables import Ledger, Table, ledger, size, table, traffic
from labs.kit.drawing.tensor_parallel_plan import plan
from labs.kit.drawing.timelines import timeline
from labs.kit.drawing.weight_cut import weight_cut
from labs.kit.drawing.wire_between_nodes import wire
from labs.kit.drawing.work_per_rank import work_per_rank

__all__ = [
    "KINDS", "TIMELINE", "Canvas", "Drawing", "Figure", "Ledger", "Point", "Table", "agreement", "apart", "bars",
    "blocks", "buckets", "by_kind", "by_rank", "chart", "crossings", "curves", "expert_loads", "folder", "formula",
    "keys_by_way", "layouts", "ledger", "lost", "memory", "merged_softmax", "mesh", "messages", "node_bound",
    "nodes", "on_scales", "order", "orders", "pairs", "parallelism", "plan", "products", "rank_by_axis",
    "ratio_errors", "ratios", "reads", "ring_steps", "rows_by_rank", "rule_times", "rules", "scatter", "schedule",
    "sends", "sent_and_held", "size", "speeds", "step", "table", "term", "timeline", "traffic", "travel", "verdict",
    "weight_cut", "who_combines", "wire", "work_per_rank", "yours_and_plan",
]  # fmt: skip
