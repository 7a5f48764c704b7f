"""Numbers in tables: the ledger, which compares predictions with measurements, and a plain table.

    ledger({"sent": (614_400, 614_400), "step": (None, 0.012, "s")})
    table([{"ranks": 2, "sent": 100}, {"ranks": 4, "sent": 150}])
    traffic(results.recording, step=2)
    size(1_638_400)  ->  "1,638,400 B (1.56 MiB)"

A ledger compares values that are the same on every machine: bytes, counts, shapes.  Times and losses (rows whose unit
is in NOISY) differ from run to run.  A ledger gives no verdict on such rows and prints them below the table, one per
line, so that their digits never change the width of a column that a notebook test compares.

The tables are written without a package.  rich sets a table for HTML as preformatted text, without header cells for
screen readers.  great_tables has no plain text, and makes random ids.  humanize writes "512 Bytes", and has no
thousands separator for bytes.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

NOISY = ("s", "ms", "µs", "nats")
STEPS = (0.001, 0.01, 0.02, 0.05, 0.10, 0.20, 0.50)
Value = int | float | str | None


def size(count: float) -> str:
    """Return a number of bytes exactly and, if it is large, rounded as well: "512 B", "1,638,400 B (1.56 MiB)"."""
    exact = f"{count:,.0f} B" if float(count).is_integer() else f"{count:,.1f} B"
    return exact if abs(count) < 1024 else f"{exact} ({short(count)})"


def short(count: float) -> str:
    """Return a rounded number of bytes with its unit: "1.56 MiB"."""
    power = min(4, int(math.log2(max(1, abs(count))) // 10))
    return f"{count:,.0f} B" if power == 0 else f"{count / 1024**power:,.2f} {'KMGT'[power - 1]}iB"


def clock(seconds: float) -> tuple[float, str]:
    """Return a suitable unit for a duration, as (number of these units in a second, name): (1000, "ms")."""
    return next(((f, name) for f, name in ((1, "s"), (1e3, "ms")) if seconds * f >= 1), (1e6, "µs"))


def show(value: Value, unit: str = "") -> str:
    """Return one value of a table as text."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return {True: "yes", False: "no"}.get(value, str(value))
    if unit == "B":
        return size(value)
    if unit == "s":
        factor, unit = clock(value)
        value *= factor
    if unit in NOISY:
        return f"{value:.{4 if unit == 'nats' else 2}f} {unit}"
    digits = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return f"{digits} {unit}".strip()


@dataclass(frozen=True)
class Table:
    """A table of text below a header; column i is aligned to the right if `numeric[i]`."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]
    caption: str = ""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, self.numeric, strict=True)
            ).rstrip()
            for row in (self.header, *self.rows)
        ]
        lines.insert(1, "  ".join("─" * width for width in widths))
        return "\n".join([*([self.caption] if self.caption else []), *lines, *self.notes])

    @property
    def html(self) -> str:
        """The table as HTML, which takes its colours from the page, light or dark."""
        caption = f"<caption>{unbroken(self.caption)}</caption>" if self.caption else ""
        head = "".join(self._cell("th", name, i, 'scope="col" ') for i, name in enumerate(self.header))
        body = "".join(
            "<tr>"
            + self._cell("th", row[0], 0, 'scope="row" ')
            + "".join(self._cell("td", cell, i + 1) for i, cell in enumerate(row[1:]))
            + "</tr>\n"
            for row in self.rows
        )
        notes = "".join(f"<div>{unbroken(note)}</div>\n" for note in self.notes)
        return f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n{notes}"

    def _cell(self, tag: str, words: str, column: int, scope: str = "") -> str:
        side = "right" if self.numeric[column] else "left"
        return f'<{tag} {scope}style="text-align:{side}">{unbroken(words)}</{tag}>'

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self.html}


def unbroken(words: str) -> str:
    """Return text for HTML whose lines never break between a number and its unit."""
    return re.sub(r"(?<=\d) (?=[^\s(–=])", "\N{NO-BREAK SPACE}", escape(words))


def table(rows: Iterable[Mapping[str, Value]], caption: str = "") -> Table:
    """Return a table of rows, each a mapping {column: value} with the same columns.

    Raises ValueError if there is no row, or if the columns of a row differ from those of the first row.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("a table needs at least one row; it was given none")
    header = tuple(rows[0])
    for number, row in enumerate(rows):
        if tuple(row) != header:
            raise ValueError(f"row {number} has the columns {tuple(row)}: give it those of the first row, {header}")
    numeric = tuple(all(type(row[name]) in (int, float, type(None)) for row in rows) for name in header)
    return Table(header, tuple(tuple(show(row[name]) for name in header) for row in rows), numeric, caption)


def traffic(recording: Any, step: int | None = None) -> Table:
    """Return a table of the bytes that all ranks sent, by op, in one step or in the whole job if step is None.

    If the job emulated the links of a cluster, the table also has the bytes sent inside nodes and across nodes.
    """
    events = [event for rank in recording.seen for event in recording.select(rank, step)]
    rows = []
    for op in dict.fromkeys(event.op for event in events):
        calls = [event for event in events if event.op == op]
        row = {"op": op, "calls": len(calls), "bytes sent": sum(event.sent for event in calls)}
        if recording.link:
            across = sum(recording.link.across(event.rank, event.to, recording.ranks) for event in calls)
            row |= {"inside nodes": row["bytes sent"] - across, "across nodes": across}
        rows.append(row)
    return table(rows)


@dataclass(frozen=True)
class Row:
    """One row of a ledger: a prediction and one or two measurements (ours, native), all in `unit`."""

    name: str
    predicted: Value
    measured: tuple[Value, ...]
    unit: str

    @property
    def noisy(self) -> bool:
        return self.unit in NOISY


@dataclass(frozen=True)
class Ledger:
    """A table of predictions beside measurements, with a verdict on each row.

    within: the relative difference up to which a measurement still agrees.
    """

    rows: tuple[Row, ...]
    within: float
    caption: str

    @property
    def agrees(self) -> bool:
        """Whether no compared row differs by more than `within`."""
        return not any("differs" in self.verdict(row) for row in self.rows if not row.noisy)

    def verdict(self, row: Row) -> str:
        """Return the verdict on a row; if ours and native differ in their verdict, return both verdicts."""
        words = [verdict(row.predicted, value, self.within) for value in row.measured]
        if len(words) == 1 or words[0] == words[1]:
            return words[0]
        return f"ours {words[0]}; native {words[1]}"

    def table(self) -> Table:
        """Return the compared rows as a table, with the rows that differ from run to run as notes below the table."""
        sides = max((len(row.measured) for row in self.rows), default=1)
        names = ("measured",) if sides == 1 else ("ours", "native")
        rows = [
            (row.name, *(show(value, row.unit) for value in self._values(row, sides)), self.verdict(row))
            for row in self.rows
            if not row.noisy
        ]
        notes = [note(row, names) for row in self.rows if row.noisy]
        header = ("", "predicted", *names, "verdict")
        numeric = (False, *[True] * (sides + 1), False)
        return Table(header, tuple(rows), numeric, self.caption, tuple(notes))

    @staticmethod
    def _values(row: Row, sides: int) -> tuple[Value, ...]:
        return (row.predicted, *row.measured, *[None] * (sides - len(row.measured)))

    @property
    def html(self) -> str:
        return self.table().html

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return self.table()._repr_mimebundle_()


def ledger(
    rows: Mapping[str, Sequence[Value]] | Iterable[Sequence[Value]], within: float = 0.10, caption: str = ""
) -> Ledger:
    """Return a ledger: a table that compares measurements with predictions.

    rows: {name: (predicted, measured)}, {name: (predicted, ours, native)}, or a list of such rows with the
        name first. A last entry that is text is the unit: "B" (the default), "" for plain numbers, or a unit of NOISY
        for values that are not compared. None stands for "no prediction" or "not measured".
    within: the relative difference up to which a measurement still agrees.
    Raises ValueError unless each row has one prediction and one or two measurements.
    """
    if isinstance(rows, Mapping):
        rows = [(name, *values) for name, values in rows.items()]
    return Ledger(tuple(_row(*row) for row in rows), within, caption)


def _row(name: str, *values: Value) -> Row:
    unit = "B"
    if values and isinstance(values[-1], str):
        *values, unit = values
    if len(values) not in (2, 3):
        raise ValueError(
            f"the row {name!r} holds {len(values)} values; it needs (predicted, measured) or (predicted, ours, native)"
        )
    return Row(name, values[0], tuple(values[1:]), unit)


def verdict(predicted: Value, measured: Value, within: float) -> str:
    """Return the verdict on a measurement; a relative difference up to `within` is rounded up to one of STEPS."""
    if predicted is None or measured is None:
        return "–"
    if predicted == measured:
        return "= exact"
    if isinstance(predicted, str) or isinstance(measured, str) or predicted == 0:
        return "≠ differs"
    off = abs(measured - predicted) / abs(predicted)
    if off <= within:
        share = min(within, next((step for step in STEPS if off <= step), within))
        return f"≈ within {100 * share:g} %"
    return f"≠ differs ({measured / predicted:.2f} ×)"


def note(row: Row, names: tuple[str, ...]) -> str:
    """Return a ledger row without a verdict as one line: "step: predicted 10.00 ms, measured 12.31 ms"."""
    named = zip(("predicted", *names), (row.predicted, *row.measured), strict=False)
    return f"{row.name}: " + ", ".join(f"{name} {show(v, row.unit)}" for name, v in named if v is not None)
