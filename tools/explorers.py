"""The explorers on the site: `make images` draws each at all its settings, and stores the pictures.

    solutions/NN_name.py
        │  a cell that ends in a call of labs.kit.play, and the statements before it that the call depends on
        ▼
    an Explorer of labs.kit.play, the same as in JupyterLab
        │  its picture at every point of the grid that its controls span, or of the part in GRIDS
        ▼
    images/explorers/NN_name_1.js    which the site loads when a reader comes near; 1: the notebook's first explorer

Pictures of one explorer have most of their elements in common, so a file has each element once, and a picture is a
list of elements.  An explorer that is drawn from recordings is stored once, since every run of its jobs differs; any
other is drawn again if its picture at some of 20 random points is not the stored one.

    python -m tools.explorers [--force] [01 04 ...]
"""

import ast
import base64
import contextlib
import dis
import io
import itertools
import json
import random
import re
import sys
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipywidgets

from labs.kit.drawing.formulas import Captioned, escape
from labs.kit.play import Explorer
from tools.site.pages import EXPLORERS, ROOT, explorers_in, stored_explorer

NAMES = ("LOAD_NAME", "LOAD_GLOBAL", "STORE_NAME")
# The grid of some explorers is too large to store.  On the site, such an explorer has these values of its controls, and
# its first value; a control with one value cannot be moved.
GRIDS: dict[str, dict[str, tuple]] = {
    "02_collectives_4": {"frame": tuple(range(0, 41, 2))},
    "03_ddp_1": {"frame": tuple(range(0, 41, 2))},
    "04_zero_1": {
        "model": ("llama3-8b",), "precision": ("mixed",), "ranks": (1, 2, 4, 8, 64, 512), "batch": (4,),
        "context": (1024,), "recompute": ("full",), "card": (),
    },
    "04_zero_2": {"batch": (), "context": (8192,), "recompute": ("full",)},
    "07_memory_1": {
        "precision": ("float32",), "ranks": (1, 8, 64, 512), "batch": (2, 4, 16), "context": (1024, 32_768, 131_072),
        "offload": (), "card": (80,),
    },
    "07b_offload_1": {
        "precision": ("float32",), "ranks": (8, 64), "batch": (4, 16), "context": (1024, 32_768), "card": (80,),
    },
    "10_pipeline_2": {
        "ranks": (2, 4, 8), "microbatches": (2, 4, 8, 16), "stages_per_rank": (1, 2, 3), "forward": (),
        "backward": (1, 2), "send": (0, 0.2),
    },
    "15_plan_a_run_1": {"gpus": (8, 32, 128), "sequences": (512,), "context": (4096, 32_768)},
}  # fmt: skip


# ---- the explorers of a notebook -------------------------------------------------------------------------


def sources(names: tuple[str, ...] = ()) -> Iterator[tuple[str, list[ast.stmt], Path]]:
    """Yield the name of each explorer, the statements that make it, and the notebook's source that has them."""
    for path in sorted((ROOT / "solutions").glob("[0-9]*.py")):
        if names and path.stem.partition("_")[0] not in names:
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        calls = [place for place, each in enumerate(body) if explorers_in([each])]
        for number, place in enumerate(calls, 1):
            yield f"{path.stem}_{number}", needed(body[: place + 1]), path


def needed(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return the last of these statements, and those before it that set or change a name on which it depends."""
    last = statements[-1]
    kept, names = [last], loaded(last)
    for each in reversed(statements[:-1]):
        whole = set_by(each)
        if whole & names or changed_by(each) & names:
            kept.append(each)
            names = names - (whole if isinstance(each, ast.FunctionDef | ast.Assign) else set()) | loaded(each)
    return kept[::-1]


@cache
def operations(statement: ast.stmt) -> set[tuple[str, Any]]:
    """Return what a statement does, in functions, too, as (name of an operation, its argument)."""
    codes, found = [compile(ast.Module([statement], []), "", "exec")], set()
    for code in codes:  # which grows
        codes += [each for each in code.co_consts if hasattr(each, "co_code")]
        found |= {(each.opname, each.argval) for each in dis.get_instructions(code) if each.opname in NAMES}
    return found


def loaded(statement: ast.stmt) -> set[str]:
    return {name for operation, name in operations(statement) if operation != "STORE_NAME"}


def set_by(statement: ast.stmt) -> set[str]:
    return {name for operation, name in operations(statement) if operation == "STORE_NAME"}


def changed_by(statement: ast.stmt) -> set[str]:
    """Return the names whose values a statement may change: x[0] = …, and whatever a loop reads."""
    if isinstance(statement, ast.For):
        return loaded(statement)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {each.value.id for each in targets if isinstance(each, ast.Subscript) and isinstance(each.value, ast.Name)}


def is_measured(statements: list[ast.stmt]) -> bool:
    """Return whether jobs run for an explorer, or XLA does."""
    return any({"run", "train"} & loaded(each) for each in statements)


def make(statements: list[ast.stmt], path: Path) -> Explorer:
    """Run the statements, the last of which is an explorer, in the notebook's folder.

    An answer is not checked again, since the tests of notebooks check all of them.
    """
    *before, last = statements
    for each in before:
        if isinstance(each, ast.Assign) and ast.unparse(each.value).startswith("check."):
            each.value = ast.copy_location(ast.Name("passed", ast.Load()), each)
    space: dict[str, Any] = {"__name__": "__main__", "passed": SimpleNamespace(ok=True)}
    with contextlib.chdir(path.parent), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(ast.Module(before, []), str(path), "exec"), space)
        return eval(compile(ast.Expression(last.value), str(path), "eval"), space)


# ---- a grid of pictures ----------------------------------------------------------------------------------


class Grid:
    """The values of an explorer's controls on the site, as {control: [(label, value), …]}, and their pictures."""

    def __init__(self, name: str, explorer: Explorer):
        self.explorer, kept = explorer, GRIDS.get(name, {})
        self.values = {
            each: [(label, value) for label, value in choices(control) if keeps(kept.get(each), value, control.value)]
            for each, control in explorer.controls.items()
        }

    def points(self) -> Iterator[tuple]:
        """Yield the values of the controls at each point, the last control's changing fastest."""
        return itertools.product(*[[value for _, value in each] for each in self.values.values()])

    def draw(self, point: tuple) -> str:
        """Return the picture at a point as HTML: SVG as it is, between \\1 and \\2; and each term with its controls."""
        picture = self.explorer.picture(**dict(zip(self.values, point, strict=True)))
        html = picture.html
        if isinstance(picture, Captioned):
            terms = "".join(f"<div>{''.join(map(naming, line))}</div>" for line in picture.lines)
            html = f'<div style="line-height:1.6">{terms}</div>{picture.picture.html}'
        return re.sub(
            r"data:image/svg\+xml;base64,([^\"]+)", lambda svg: f"\1{base64.b64decode(svg[1]).decode()}\2", html
        )

    def controls(self) -> list[dict]:
        """Return what the site's page needs to know about each control."""
        found = []
        for name, values in self.values.items():
            control = self.explorer.controls[name]
            labels, there = [label for label, _ in values], [value for _, value in values]
            begin = there.index(self.shown(there) if name == "frame" else control.value)
            kind = "menu" if isinstance(control, ipywidgets.Dropdown) else "slider"
            found.append({"name": name, "label": control.description, "kind": kind, "values": labels, "begin": begin})
            found[-1]["readout"] = getattr(control, "readout", True)
        return found

    def shown(self, frames: list[int]) -> int:
        """Return the frame of a film that a saved notebook shows, or the film's first one, if it shows none."""
        still = self.explorer.still.html
        same = (frame for frame in frames if self.explorer.picture(frame=frame).html == still)
        return next(same, self.explorer.settings["frame"])

    def followers(self) -> dict[str, dict[str, list[int]]]:
        """Return the controls that move with another one, as {other: {control: [its place at each place of other]}}."""
        picture, self.explorer.picture = self.explorer.picture, lambda **_: self.explorer.still
        controls, first, found = self.explorer.controls, self.explorer.settings, {}
        for name, values in self.values.items():
            after = []
            for _, value in [*values, (None, first[name])]:
                controls[name].value = value
                after.append(self.explorer.settings)
            for other in self.values.keys() - {name}:
                if any(settings[other] != first[other] for settings in after):
                    there = [value for _, value in self.values[other]]
                    found.setdefault(name, {})[other] = [there.index(settings[other]) for settings in after[:-1]]
        self.explorer.picture = picture
        return found

    def pause(self) -> int:
        """Return the milliseconds between two pictures of a film, 0 for an explorer that is none."""
        buttons = [each for each in self.explorer.children[0].children if isinstance(each, ipywidgets.Play)]
        return buttons[0].interval * buttons[0].max // (len(self.values["frame"]) - 1) if buttons else 0

    def store(self, path: Path) -> None:
        """Write all pictures to a file that a page can load from the disk, too."""
        pictures = [parts(self.draw(point)) for point in self.points()]
        elements = sorted({each for picture in pictures for each in picture})
        letter = {each: chr(n + 1 if n < 0xD7FF else n + 0x801) for n, each in enumerate(elements)}  # no surrogate
        stored = {
            "controls": self.controls(),
            "follow": self.followers(),
            "play": self.pause(),
            "elements": packed(elements),
            "pictures": packed("".join(letter[each] for each in picture) for picture in pictures),
        }
        text = json.dumps(stored, ensure_ascii=False, separators=(",", ":"))
        path.write_text(f'explorers["{path.stem}"]({text})\n', encoding="utf-8")


def choices(control: ipywidgets.Widget) -> list[tuple[str, Any]]:
    """Return the labels and values of a control."""
    if isinstance(control, ipywidgets.IntSlider):
        return [(str(value), value) for value in range(control.min, control.max + 1)]
    return [each if isinstance(each, tuple) else (str(each), each) for each in control.options]


def keeps(kept: tuple | None, value: Any, first: Any) -> bool:
    return kept is None or value in kept or value == first


def naming(part: Any) -> str:
    """Return a part of a formula as HTML in which a term names its controls."""
    if isinstance(part, str):
        return escape(part)
    return f'<span data-of="{" ".join(part.controls)}">{escape(part.words)}</span>'


def parts(html: str) -> list[str]:
    return re.split(r"(?<=[>;])", html)


def packed(texts) -> str:
    return base64.b64encode(zlib.compress("\0".join(texts).encode(), 9)).decode()


def unpacked(text: str) -> list[str]:
    return zlib.decompress(base64.b64decode(text)).decode().split("\0")


class Stored:
    """The pictures in a file that Grid.store has written."""

    def __init__(self, path: Path):
        data = stored_explorer(path)
        self.controls, self.elements = data["controls"], unpacked(data["elements"])
        self.pictures = unpacked(data["pictures"])

    def picture(self, number: int) -> str:
        codes = map(ord, self.pictures[number])
        return "".join(self.elements[code - 1 if code < 0xD800 else code - 0x801] for code in codes)


def wrong_at(path: Path, grid: Grid, count: int, any_of: random.Random) -> list[tuple]:
    """Return the points among `count` random ones at which the stored picture is not the explorer's."""
    if not path.exists() or (stored := Stored(path)).controls != grid.controls():
        return [()]
    numbered = list(enumerate(grid.points()))
    chosen = any_of.sample(numbered, min(count, len(numbered)))
    return [point for number, point in chosen if stored.picture(number) != grid.draw(point)]


def main(arguments: list[str]) -> None:
    EXPLORERS.mkdir(exist_ok=True)
    force = "--force" in arguments
    for name, statements, path in sources(tuple(each for each in arguments if each != "--force")):
        target = EXPLORERS / f"{name}.js"
        if target.exists() and is_measured(statements) and not force:
            continue
        grid = Grid(name, make(statements, path))
        if force or wrong_at(target, grid, 20, random.Random()):
            grid.store(target)
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
