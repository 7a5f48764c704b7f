"""A figure of the load of each expert over training, for several trainings beside each other, as PNG.

expert_loads({"no balancing": loads, "auxiliary loss": loads, "bias": loads})
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from labs.kit.drawing.figures import LEGEND, axes, finish
from labs.kit.drawing.palette import INK, KINDS, MUTED
from labs.kit.drawing.picture import Figure

WIDE = 6.4  # inches, fewer than other figures have: several panels share them, and words are larger on a phone
OTHERS, EVEN = "#A6ADB5", (0, (4, 2))
Rows = Tensor | Sequence[Tensor] | Sequence[Sequence[float]]  # of each expert, by [step, expert]
LAST = 10  # steps at the end, by whose loads experts are compared


def expert_loads(loads: Mapping[str, Rows]) -> Figure:
    """Draw the rows of each expert as a multiple of the even share, and mark who has the most and the fewest at last.

    loads: {name of a training: rows by [step, expert]}.
    """
    shares = {name: share_of(rows) for name, rows in loads.items()}
    canvas, panels = axes(WIDE, 3.2, columns=len(shares))
    words = []
    for panel, (name, share) in zip(panels, shares.items(), strict=True):
        last = share[-LAST:].mean(0)
        idlest, busiest = int(last.argmin()), int(last.argmax())
        panel.plot(share, color=OTHERS, linewidth=0.9)
        panel.plot(share[:, idlest], color=KINDS["P"], linewidth=2)
        panel.plot(share[:, busiest], color=KINDS["comm"], linewidth=2)
        panel.axhline(1, color=INK, linewidth=1.2, linestyle=EVEN)
        panel.set_title(name, fontsize=11, pad=22, loc="left", fontweight="bold")
        ends = f"{last[idlest]:.2f} to {last[busiest]:.2f}"
        panel.annotate(f"ends at {ends}", (0, 1.03), xycoords="axes fraction", fontsize=10, color=MUTED)
        panel.set_xlabel("step", fontsize=10)
        panel.set_xlim(0, len(share) - 1)
        panel.xaxis.get_major_locator().set_params(integer=True)
        words.append(f"{name}: {ends} in the last {min(LAST, len(share))} steps")
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("rows / even share", fontsize=10)
    legend(canvas)
    steps, experts = share.shape
    alt = f"The rows of each of {experts} experts by step, as multiples of the even share. {'; '.join(words)}."
    return finish(canvas, f"ExpertLoads({', '.join(shares)}; {experts} experts, {steps} steps)", alt)


def share_of(rows: Rows) -> Tensor:
    """Return the rows as multiples of the even share of their step, [steps, experts]."""
    counts = torch.stack([torch.as_tensor(step, dtype=torch.float64) for step in rows])
    return counts / counts.mean(1, keepdim=True)


def legend(canvas) -> None:
    from matplotlib.lines import Line2D

    looks = {
        "busiest expert at the end": {"color": KINDS["comm"], "linewidth": 2},
        "idlest": {"color": KINDS["P"], "linewidth": 2},
        "others": {"color": OTHERS, "linewidth": 0.9},
        "even share": {"color": INK, "linestyle": EVEN},
    }
    handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    canvas.legend(handles=handles, loc="outside upper center", ncols=len(handles), **LEGEND | {"handlelength": 1.6})
