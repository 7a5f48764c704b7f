"""A map of the layouts that a search found, by the bytes on the fullest rank and the time of a step.

    layouts(plan.search(llama, cluster, batch=512))

The band left of the card is for layouts that fit, but leave so little memory free that the plan multiplies their time.
A line joins the layouts that no other layout beats in both bytes and time: a sensible choice is one of them.  A
vertical line is the memory of the GPU (the card): a layout right of this line does not fit, is grey, and its tooltip
says how many bytes are missing.  Where the points of several layouts would cover each other, only the fastest layout is
shown.
"""

from collections.abc import Iterable

from labs.kit.drawing.palette import GROUPS, INK, MUTED, RANKS, SERIES
from labs.kit.drawing.scatters import HIGH, LEFT, LONG, RADIUS, TOP, Axis, Hovered, Point, axis, panel
from labs.kit.drawing.svg import Canvas, width_of
from labs.plan import Found, Plan, plan
from labs.plan.reasons import kinds, spent
from labs.plan.results import gb

CELL = 12  # pixels: the side of a square in which only one point is shown
FAR = 1.3  # layouts that need more than FAR times the memory of the GPU are counted, but not drawn
BESTS, TOO_LARGE = "none is better in both", "too large"


def layouts(found: Found) -> Hovered:
    """Draw the map of the layouts that a search found, with a tooltip on each layout's point.

    Raises ValueError if no layout fits into the GPU's memory; `plan.nearest` names the changes that would help.
    """
    if not found.feasible:
        raise ValueError("no layout fits into the GPU's memory, so there is none to draw: see plan.nearest(found)")
    card = found.setup.cluster.card
    grey = [plan(found.setup, each.layout) for each in found.too_large if each.peak <= FAR * card]
    x = axis([each.peak / 1e9 for each in (*found.feasible, *grey)], LEFT, LONG)
    y = axis([seconds(each) for each in (*found.feasible, *grey)], TOP + HIGH, -HIGH)
    fitting = thinned(found.feasible, x, y)
    shown = [*thinned(grey, x, y), *fitting, *found.front]
    points = [point(each, card) for each in shown]
    gpus = found.setup.cluster.gpus
    title = f"{len(found.feasible):,} layouts fit {gpus} GPUs: the quickest at {len(fitting):,} places"
    others = len(found.too_large) - len(grey)
    alt = (
        f"{title}: time of a step by bytes on the fullest rank. {len(grey):,} more hold up to {FAR} × the card; "
        f"{others:,} hold more than that, and {len(found.impossible):,} cannot be run: both are not drawn."
    )
    canvas = Canvas(LEFT + LONG + 40, TOP + HIGH + 54, title, alt)
    canvas.text(16, 20, title, anchor="start", weight="bold")
    panel(canvas, x, y, "GB on the fullest rank", "seconds of a step")
    wall = x.at(card / 1e9)
    constants = found.setup.constants
    full = max(LEFT, x.at(constants.crowded * card / 1e9))
    canvas.rect(full, TOP, wall - full, HIGH, fill=RANKS[3], stroke="none", radius=0)
    canvas.text(full - 5, TOP + 11, f"nearly full: time × {constants.thrash:g}", size=12, anchor="end")
    canvas.line((wall, TOP), (wall, TOP + HIGH), stroke=MUTED, dash="5 4")
    canvas.text(wall + 5, TOP + 11, "the card", size=12, anchor="start", fill=MUTED)
    canvas.line(*((x.at(each.peak / 1e9), y.at(each.seconds)) for each in found.front), line=1.5)
    colours = dict(zip(sorted({kind(each) for each in found.feasible}), GROUPS, strict=False)) | {TOO_LARGE: SERIES[0]}
    places = [(x.at(each.x), y.at(each.y)) for each in points]
    for (across, up), each in zip(places, points, strict=True):
        canvas.circle(across, up, RADIUS, fill=colours[each.series], line=0.5)
    chosen = x.at(found.best.peak / 1e9), y.at(found.best.seconds)
    canvas.circle(*chosen, RADIUS + 4, fill="none", line=2)
    canvas.circle(LEFT + LONG - 130, 20, RADIUS + 4, fill="none", line=2)
    canvas.text(LEFT + LONG - 114, 20, "the plan's choice", size=12.5, anchor="start")
    legend(canvas, colours)
    areas = ((*place, each.words) for place, each in zip(places, points, strict=True))
    drawing = canvas.drawing(alt)
    return Hovered(drawing.data, drawing.text, drawing.alt, drawing.width, drawing.height, tuple(areas)[::-1])


def kind(each: Plan) -> str:
    names = {"tp": each.layout.tp > 1, "pipeline": each.layout.pp > 1}
    return " and ".join(name for name, used in names.items() if used) or "data alone"


def seconds(each: Plan) -> float:
    """Return the seconds of a step of a layout; a layout that is too large is timed on a GPU with enough memory."""
    return each.step.seconds if each.peak > each.setup.cluster.card else each.seconds


def point(each: Plan, card: float) -> Point:
    if each.peak > card:
        words = f"{each.layout}: {gb(each.peak)}, {gb(each.peak - card)} more than the card has."
        return Point(each.peak / 1e9, seconds(each), TOO_LARGE, words)
    words = f"{each.layout}: {gb(each.peak)}: {kinds(each.held)}. {spent(each)}."
    return Point(each.peak / 1e9, each.seconds, kind(each), words)


def thinned(plans: Iterable[Plan], x: Axis, y: Axis) -> list[Plan]:
    cells: dict[tuple[int, int], Plan] = {}
    for each in plans:
        cell = int(x.at(each.peak / 1e9) // CELL), int(y.at(seconds(each)) // CELL)
        if cell not in cells or each.seconds < cells[cell].seconds:
            cells[cell] = each
    return list(cells.values())


def legend(canvas: Canvas, colours: dict[str, str]) -> None:
    place = 16.0
    for name, colour in colours.items():
        canvas.circle(place + 6, 46, RADIUS + 1, fill=colour)
        canvas.text(place + 18, 46, name, size=12.5, anchor="start")
        place += width_of(name, 12.5) + 34
    canvas.line((place, 46), (place + 16, 46), stroke=INK, line=1.5)
    canvas.text(place + 22, 46, BESTS, size=12.5, anchor="start")
