"""A drawing of a node's share of a training, and of what must leave it: the bound of the challenge of notebook 11.

node_bound(layers=4, nodes=4, stages=2)
"""

from labs.kit.drawing.palette import KINDS, MUTED, PAPER
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

LEFT, TOP, WIDE, TALL = 150, 62, 300, 200


def node_bound(nodes: int, stages: int) -> Drawing:
    """Draw layers by sequences, the share of one node, and its two arrows: gradients, and activations.

    nodes: the number of nodes.
    stages: the number of parts in which the layers are cut, so that f = 1/stages.
    """
    parts = nodes // stages  # of the sequences
    words = (
        f"A node holds f = 1/{stages} of the layers and reads g = 1/{parts} of the sequences. Gradients of its layers "
        "go to the nodes that hold the same layers; activations of its sequences cross each end of its layers."
    )
    canvas = Canvas(LEFT + WIDE + 360, TOP + TALL + 40, "What must leave a node", words)
    canvas.text(LEFT + WIDE / 2, 20, "sequences of the batch →", 13, fill=MUTED)
    canvas.text(LEFT - 16, TOP + 14, "first layer", 13, "end", fill=MUTED)
    canvas.text(LEFT - 16, TOP + TALL - 14, "last layer", 13, "end", fill=MUTED)
    across, down = WIDE / parts, TALL / stages
    for row in range(stages):
        for column in range(parts):
            own = (row, column) == (0, 0)
            canvas.rect(LEFT + across * column, TOP + down * row, across, down, KINDS["temporary"] if own else PAPER)
            name = "this node" if own else f"node {row * parts + column}"
            canvas.text(
                LEFT + across * (column + 0.64), TOP + down * (row + 1) - 16, name, 13, weight="bold" if own else ""
            )
    canvas.text(LEFT + across / 2, 46, f"g = 1/{parts}", 13)
    canvas.text(LEFT - 16, TOP + down / 2, f"f = 1/{stages}", 13, "end")
    right = LEFT + WIDE + 24
    if parts > 1:
        y = TOP + down * 0.68
        canvas.arrow((LEFT + across * 0.5, y), (LEFT + across * 1.5, y), stroke=KINDS["G"], line=5, head=14)
    if stages > 1:
        x = LEFT + across * 0.28
        canvas.arrow((x, TOP + down * 0.6), (x, TOP + down * 1.4), stroke=KINDS["A"], line=5, head=14)
    legend = (
        ("G", "gradients of its layers, to the nodes", "with the same layers: 2 (1 − g) f G bytes"),
        ("A", "activations of its sequences, or their", "gradients, at each end: g X bytes"),
    )
    for number, (kind, *lines) in enumerate(legend):
        y = TOP + 40 + 90 * number
        canvas.line((right, y), (right + 28, y), stroke=KINDS[kind], line=5)
        canvas.lines(right + 38, y, list(lines), 13, anchor="start")
    return canvas.drawing()
