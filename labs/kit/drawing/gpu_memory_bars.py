"""Bars of the bytes that a rank holds, by kind, beside the memory sizes of common GPUs (cards).

    cards(held, fits, caption)                     a bar for each name, a line for each GPU, a table below
    cards(held, fits, caption, measured, card=80)  a job's measurements as thin bars below the bars of a formula

All bars share one scale, which the longest bar sets.  The memory of each GPU is drawn as a line in a shaded strip on
the same scale as the bars.  If the strip is too narrow for lines of all GPUs, only the highlighted GPU has a line.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from labs.kit.drawing.palette import KINDS, MUTED, NAMES, SOFT, ink
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of

Bytes = Mapping[str, float]  # {kind: its maximum}; "peak" is the maximum of the total at one moment
GB = 10**9
CARDS = (24, 40, 80, 141)  # GB of memory of an RTX 4090, an A100, an H100 and an H200
LONG, COLUMN = 520, 76  # pixels: the longest bar, and a column of the table
THICK, THIN = 24, 12  # pixels: the height of a bar
SMALL = 2 * GB  # if the longest bar is shorter, no GPUs are drawn: beside 24 GB, such a bar would be a dot
NOTE = "Each kind at its most. The stem, and the number: the most of all at one moment. GB: 10⁹ bytes."
GREY = "Grey: what an operation needs for itself while it runs, and gives back."
STAY = "Thin: measured. These bars stay as they are, whatever the formula is asked."


@dataclass(frozen=True)
class Bar:
    """A bar with the bytes that a formula predicts, or a thin bar with measured bytes.

    full_name: the bar's name in words that are clear without the other bars.
    """

    name: str
    full_name: str
    held: Bytes
    measured: bool = False

    @property
    def kinds(self) -> dict[str, float]:
        return {kind: self.held.get(kind, 0) for kind in KINDS}

    @property
    def long(self) -> float:
        return max(sum(self.kinds.values()), self.held["peak"])

    @property
    def high(self) -> int:
        return THIN if self.measured else THICK


def cards(
    held: Mapping[str, Bytes],
    fits: Mapping[str, Mapping[int, int | None]],
    caption: str,
    measured: Mapping[str, Bytes] | None = None,
    card: int = max(CARDS),
) -> Drawing:
    """Draw bars of the bytes held, lines for the GPUs, and a table of how many ranks each GPU size needs.

    held: the predicted bytes, as {name: {kind: bytes, ..., "peak": bytes}}.
    fits: {name: {memory of a GPU in GB: the smallest number of ranks whose peak fits into it}} for some of the names;
        None in place of a number if no number of ranks fits.
    measured: the measured bytes, in the form of `held`; a name's measured bar stands below its predicted bar.
    card: the GPU to highlight, by its memory in GB.
    """
    bars = [*bars_of(held, measured or {})]
    longest = max(bar.long for bar in bars)
    shown = CARDS if longest > SMALL else ()
    fits = fits if shown else {}
    lines = [f"{bar.full_name}: {size(bar.held['peak'])}{fits_in_words(fits.get(bar.full_name, {}))}" for bar in bars]
    left = 24 + max(width_of(bar.name, 13) for bar in bars)
    canvas = Canvas(left + LONG + 90, 0, caption, "; ".join(lines) + ".")
    canvas.text(16, 22, caption, anchor="start", weight="bold")
    scale = LONG / (1.05 * max(longest, card * GB if shown else 0))
    top = 64 if shown else 36
    narrow = scale * max(CARDS) * GB < 0.6 * LONG
    lined(canvas, left, top, height(bars), [card] if shown and narrow else shown, scale, card)
    y = rows(canvas, left, top, bars, scale)
    if fits:
        y = table(canvas, left, y + 30, fits, card)
    kinds = [kind for kind in KINDS if any(bar.kinds[kind] for bar in bars)]
    legend(canvas, 16, y + 26, kinds)
    notes = [NOTE, GREY] if "temporary" in kinds else [NOTE]
    notes += [STAY] if measured else []
    canvas.lines(16, y + 54, notes, size=12, anchor="start", fill=MUTED)
    canvas.height = y + 54 + 17 * len(notes)
    return canvas.drawing("\n".join([caption, *lines]))


def bars_of(held: Mapping[str, Bytes], measured: Mapping[str, Bytes]) -> Iterable[Bar]:
    """Yield the bars from the top of the figure to the bottom."""
    for name in {**held, **measured}:
        if name in held:
            yield Bar(name, name, held[name])
        if name in measured and name in held:
            yield Bar("measured", f"{name}, measured", measured[name], measured=True)
        elif name in measured:
            yield Bar(name, name, measured[name], measured=True)


def height(bars: Sequence[Bar]) -> float:
    return sum(bar.high for bar in bars) + 12 * sum(not bar.measured for bar in bars) + 12


def rows(canvas: Canvas, left: float, y: float, bars: Sequence[Bar], scale: float) -> float:
    """Draw the bars and, at the right, their peaks in bytes; return the y at which the last bar ends."""
    for bar in bars:
        y += 2 if bar.measured else 12
        middle, peak = y + bar.high / 2, bar.held["peak"]
        style = {"fill": MUTED, "style": "italic", "size": 12} if bar.measured else {}
        canvas.text(left - 10, middle, bar.name, anchor="end", **style)
        draw(canvas, left, y, bar.kinds, peak, scale, bar.measured)
        canvas.text(left + LONG + 12, middle, size(peak), anchor="start", **style)
        y += bar.high
    return y + 12


def draw(canvas: Canvas, left: float, y: float, kinds: Bytes, peak: float, scale: float, thin: bool = False) -> float:
    """Draw one bar: its kinds of bytes side by side, and a stem at the peak, above a thick bar or below a thin bar.

    Returns the x at which the bar or its stem ends.
    """
    x, high = left, THIN if thin else THICK
    for kind, held in kinds.items():
        long = scale * held
        if long > 0:
            canvas.rect(x, y, long, high, fill=KINDS[kind], radius=0)
            if not thin and long > width_of(kind, 12) + 4:
                canvas.text(x + long / 2, y + high / 2, kind, size=12, fill=ink(KINDS[kind]))
        x += long
    mark = left + scale * peak
    stem = (y + high, y + high + 6) if thin else (y - 7, y)
    canvas.line(*((mark, end) for end in stem), line=3)
    return max(x, mark)


def lined(canvas: Canvas, left: float, y: float, high: float, shown: Iterable[int], scale: float, card: int) -> None:
    """Draw the shaded strip behind the bars, and in it a line for each GPU whose memory is on the bars' scale."""
    there = [each for each in shown if scale * each * GB <= LONG]
    if there:
        canvas.rect(left, y, scale * max(there) * GB, high, fill=SOFT, stroke="none", radius=0)
    for each in there:
        x, words = left + scale * each * GB, f"{each} GB"
        if each == card:
            canvas.text(x, y - 12, words, size=12, weight="bold")
            canvas.line((x, y), (x, y + high), line=1.6)
        else:
            canvas.text(x, y - 12, words, size=12, fill=MUTED)
            canvas.line((x, y), (x, y + high), stroke=MUTED, dash="4 3")


def table(canvas: Canvas, left: float, y: float, fits: Mapping[str, Mapping[int, int | None]], card: int) -> float:
    """Draw a table of the smallest number of ranks whose peak fits into each GPU; return the y of the table's end."""
    canvas.text(left, y, "smallest number of ranks that fits:", size=12, anchor="start", fill=MUTED)
    for row, (name, by_card) in enumerate(fits.items()):
        canvas.text(left - 10, y + 46 + 20 * row, name, anchor="end")
        for column, (each, ranks) in enumerate(by_card.items()):
            x, weight = left + COLUMN * (column + 0.5), "bold" if each == card else ""
            if row == 0:
                canvas.text(x, y + 22, f"{each} GB", size=12.5, weight=weight)
            canvas.text(x, y + 46 + 20 * row, ranks or "none", weight=weight)
    return y + 46 + 20 * len(fits)


def legend(canvas: Canvas, x: float, y: float, kinds: list[str]) -> None:
    for kind in kinds:
        canvas.rect(x, y - 8, 16, 16, fill=KINDS[kind])
        canvas.text(x + 22, y, NAMES[kind], size=12, anchor="start", fill=MUTED)
        x += 28 + width_of(NAMES[kind], 12)


def fits_in_words(by_card: Mapping[int, int | None]) -> str:
    return ", fits " * bool(by_card) + ", ".join(
        f"{card} GB on {ranks or 'no number of'} rank{'s' * (ranks != 1)}" for card, ranks in by_card.items()
    )


def size(held: float) -> str:
    """Return bytes in decimal units, as data sheets and papers give them: "1.88 GB"."""
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6}
    name = next((name for name, unit in units.items() if held >= unit), "kB")
    return f"{held / units.get(name, 1e3):.3g} {name}"
