"""The colours of every figure and every widget: one thing has one colour everywhere.

    KINDS        the bytes on a rank: P parameters, G gradients, S optimizer state, A activations, comm, temporary
    TIMELINE     the activities of a rank: compute, communication, waiting
    COLLECTIVES  collectives by their op: pale for ops that gather, dark for ops that scatter
    INSTRUCTIONS the instructions of a pipeline: forward, backward and its two halves; `paler` shades a rank's stages
    RANKS        pale tints for the rank whose data a cell holds; a label in the cell names the rank as well
    EXPERTS      strong colours, in the hues of RANKS, for the rank that holds an expert
    SERIES       curves in one plot: the first colour is for the reference, a wide pale band below the other curves
    GROUPS       points of several groups in one plot
    WRONG        the frame and the text of an error

KINDS is the palette of Okabe and Ito, "Color Universal Design" (2008), with a grey added; RANKS begins with the pale
scheme of Paul Tol, "Colour Schemes" (SRON/EPS/TN/09-002, 2021).  Readers with any kind of colour vision can tell
these colours apart.  Every filled shape also has a dark outline and a label, so that colour never carries the meaning
alone.
"""

KINDS = {
    "P": "#0072B2",
    "G": "#E69F00",
    "S": "#009E73",
    "A": "#CC79A7",
    "comm": "#D55E00",
    "temporary": "#C4C4C4",
}
NAMES = {
    "P": "parameters",
    "G": "gradients",
    "S": "optimizer state",
    "A": "activations",
    "comm": "communication",
    "temporary": "temporary",
}
TIMELINE = {"compute": "#56B4E9", "communication": KINDS["comm"], "waiting": "#E8E8E8"}
COLLECTIVES = dict.fromkeys(("all_gather", "gather", "broadcast", "recv"), "#F6B48A")
COLLECTIVES |= dict.fromkeys(("reduce_scatter", "scatter", "all_to_all"), "#8F3E00")
COLLECTIVES["barrier"] = "#B4B9C0"
INSTRUCTIONS = {"F": "#77AADD", "B": "#EE8866", "I": "#DDAA33", "W": "#44BB99"}
RANKS = ("#BBCCEE", "#FFCCCC", "#CCDDAA", "#EEEEBB", "#CCEEFF", "#E4D4F0", "#F5DEC3", "#DDDDDD")
EXPERTS = ("#4477AA", "#EE6677", "#117733", "#CCBB44", "#66CCEE", "#882255", "#442200", "#BBBBBB")
SERIES = ("#BBBBBB", "#000000", "#882255", "#117733", "#332288", "#AA4499", "#661100")
GROUPS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000")

INK = "#1F2328"
MUTED = "#57606A"
PAPER = "#FFFFFF"
SOFT = "#F3F4F6"
WRONG = "#B00020"


def luminance(colour: str) -> float:
    """Return the relative luminance of "#RRGGBB", from 0 for black to 1 for white.

    Source: WCAG 2.2, "relative luminance".
    """
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21; text needs at least 4.5.

    Source: WCAG 2.2, "contrast ratio".
    """
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink(fill: str) -> str:
    """Return the colour of text on `fill`: black or white, whichever is easier to read."""
    return max(("#000000", PAPER), key=lambda colour: contrast(colour, fill))


def paler(colour: str, share: float) -> str:
    """Return a colour mixed with white; `share` is the share of white, from 0 to 1."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + share * (255 - channel)):02X}" for channel in channels)
