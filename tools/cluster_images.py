"""The picture of a cluster: two of its nodes, and what their links carry.

cluster    GPUs, NVLink inside of a node, InfiniBand and Ethernet between nodes          00
"""

from labs import cost
from labs.kit.drawing.palette import KINDS, RANKS, SOFT
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.times_by_size import rate, span
from tools.sketch import Sketch

LEFT, WIDE, APART, BOX, STEP = 16, 340, 16, 30, 34  # pixels: nodes, and the GPUs in one
TOP, BOTTOM = 66, 262
RIGHT = LEFT + 2 * WIDE + APART + 20
LINK = {"fill": KINDS["comm"], "stroke": "none"}


def cluster() -> Drawing:
    told = {name: [name, f"{rate(link.bandwidth)} each way, {span(link.latency)}"] for name, link in cost.LINKS.items()}
    card = ["GPU", f"{cost.CARD / 1e9:.0f} GB, read at {rate(cost.MEMORY)}"]
    sentences = "; ".join(f"{name}: {words}" for name, words in [card, *told.values()])
    canvas = Sketch(
        RIGHT + 254, 338, "Two nodes of a cluster",
        f"Each node has {cost.NODE} GPUs, joined by NVLink. PCI Express leads from each GPU to its own card, and "
        "from there InfiniBand to the other nodes. The CPUs of the nodes are joined by Ethernet. "
        f"At best, {sentences}, each message.",
    )  # fmt: skip
    ends = LEFT, LEFT + 2 * WIDE + APART
    canvas.rect(ends[0], 22, ends[1] - ends[0], 4, **LINK, radius=0)
    canvas.rect(ends[0], 292, ends[1] - ends[0], 12, **LINK)
    for number in range(2):
        node(canvas, LEFT + number * (WIDE + APART), number)
    heights = {"Ethernet, 10 Gb/s": 20, "NVLink 4": 92, "GPU": 146, "PCIe 5": 196, "InfiniBand, 400 Gb/s": 292}
    for name, y in heights.items():
        words, numbers = card if name == "GPU" else told[name]
        canvas.text(RIGHT, y, words, anchor="start", weight="bold")
        canvas.note(RIGHT, y + 19, numbers)
    key = "GB/s: 10⁹ bytes per second. µs: what even the shortest message takes. NIC: network card. Not to scale."
    canvas.note(LEFT, 324, key)
    return canvas.drawing()


def node(canvas: Sketch, left: float, number: int) -> None:
    first, cpus = left + 12, left + 22 + STEP * cost.NODE - 4
    canvas.line((cpus + 19, 26), (cpus + 19, 130), stroke=KINDS["comm"], line=2)
    for gpu in range(cost.NODE):
        x = first + STEP * gpu + BOX / 2
        canvas.line((x, 252), (x, 292), stroke=KINDS["comm"], line=5)
    canvas.rect(left, TOP, WIDE, BOTTOM - TOP, fill=SOFT, radius=8)
    canvas.line((cpus + 19, TOP), (cpus + 19, 130), stroke=KINDS["comm"], line=2)
    canvas.text(first, TOP + 16, f"node {number}", anchor="start", weight="bold")
    canvas.rect(first, 94, STEP * cost.NODE - 4, 20, **LINK)
    for gpu in range(cost.NODE):
        x = first + STEP * gpu
        canvas.line((x + BOX / 2, 112), (x + BOX / 2, 132), stroke=KINDS["comm"], line=12)
        canvas.line((x + BOX / 2, 170), (x + BOX / 2, 232), stroke=KINDS["comm"], line=5)
        canvas.rect(x, 132, BOX, 40, fill=RANKS[number])
        canvas.text(x + BOX / 2, 146, "GPU", size=10.5)
        canvas.text(x + BOX / 2, 161, gpu, size=12)
        canvas.line((x + BOX / 2, 230), (x + BOX / 2, BOTTOM), stroke=KINDS["comm"], line=5)
        canvas.rect(x, 224, BOX, 22)
        canvas.text(x + BOX / 2, 235, "NIC", size=10.5)
    canvas.rect(cpus, 132, 38, 40)
    canvas.lines(cpus + 19, 145, ["2", "CPUs"], size=11)
