"""Everything that the course shows: the last expression of a cell is the figure.

    ledger, table, traffic, size      numbers in tables; predicted beside measured       tables.py
    bars, curves                      what was measured, as PNG                          figures.py
    memory                            bytes held over time, as PNG                       memories.py
    timeline                          who did what when, as PNG                          timelines.py
    messages, step, sends             who sends what to whom, who holds what, as SVG     diagrams.py
    mesh, chart                       ranks as a grid; what a formula says, as bars      charts.py
    nodes                             a mesh on its cluster, axis by axis, as SVG        nodes.py
    scatter, Point                    points on two logarithmic axes; each says what it is      scatters.py
    layouts                           all layouts of a plan, by memory and time, as SVG  layout_map.py
    blocks                            who holds which block of a tensor, as SVG          blocks.py
    schedule                          a pipeline's schedule, simulated; as a job ran it      schedules.py, overlays.py
    plan                              a plan of tensor parallelism on its model, as SVG  plans.py
    reads, folder                     who reads which part of which file; a folder at one moment, as SVG   files.py
    formula, term                     a picture under its formula; its terms light up    formulas.py
    KINDS, TIMELINE                   one colour each, in every figure and widget        palette.py

Nothing here measures or predicts: it draws what a recording or a formula said.
"""

from labs.kit.drawing.blocks import blocks
from labs.kit.drawing.charts import chart, mesh
from labs.kit.drawing.diagrams import messages, sends, step
from labs.kit.drawing.figures import bars, curves
from labs.kit.drawing.files import folder, reads
from labs.kit.drawing.formulas import formula, term
from labs.kit.drawing.gantt import schedule
from labs.kit.drawing.layout_map import layouts
from labs.kit.drawing.memories import memory
from labs.kit.drawing.nodes import nodes
from labs.kit.drawing.palette import KINDS, TIMELINE
from labs.kit.drawing.picture import Drawing, Figure
from labs.kit.drawing.plans import plan
from labs.kit.drawing.scatters import Point, scatter
from labs.kit.drawing.svg import Canvas
from labs.kit.drawing.tables import Ledger, Table, ledger, size, table, traffic
from labs.kit.drawing.timelines import timeline

__all__ = [
    "KINDS", "TIMELINE", "Canvas", "Drawing", "Figure", "Ledger", "Point", "Table",
    "bars", "blocks", "chart", "curves", "folder", "formula", "layouts", "ledger", "memory", "mesh", "messages",
    "nodes", "plan", "reads", "scatter", "schedule", "sends", "size", "step", "table", "term", "timeline", "traffic",
]  # fmt: skip
