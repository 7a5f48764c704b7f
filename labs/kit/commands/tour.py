"""The tour: the course's GPT is trained on one process and with one strategy after another, and measured.

    python -m labs tour --ranks 4 --steps 30

The same training runs three times for each chosen strategy, by default those in `ONE_OF_EACH`.  Each run makes another
kind of recording, since one kind would disturb the values that another kind measures:

    time             all steps, without an observer  losses, parameters, milliseconds
    communication    WATCHED steps                   bytes sent
    memory           WATCHED steps                   bytes held, by kind

A strategy of XLA runs once, in one process with virtual devices; the bytes that it sends and holds are read from the
compiled program.

The predictions of `labs.cost` stand beside the measurements.  The output is a table, a figure and a JSON file.  The
command fails, and says why, if a strategy does not train like one process, or if a rank does not send or hold the
predicted bytes.
"""

from __future__ import annotations

import io
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from tqdm import tqdm
from tyro.conf import DisallowNone, arg

from labs import moe
from labs.cost import Job, Prediction, expert_parallel
from labs.data import Batches, Corpus, corpus
from labs.kit import draw
from labs.kit.drawing.palette import NAMES
from labs.kit.extras.jax_devices import on_devices
from labs.kit.launch import MOST_RANKS, RankError, Results, run
from labs.kit.ranks.devices import devices_for
from labs.kit.simulated.strategy_steps import model_of
from labs.kit.training.strategies import (
    ADAMW,
    COMPILED,
    EXPERTS,
    ONE_DEVICE,
    STRATEGIES,
    WITH_AN_EXTRA,
    Batch,
    Compiled,
    Strategy,
    train,
)  # fmt: skip
from labs.mesh.grid import equation
from labs.model import GPT, PRESETS, Config, parameters
from labs.moe import MOE_PRESETS, MoEConfig, MoEGPT, Router

KINDS = (*draw.KINDS, "peak")
EXACT = ("P", "G", "S")
CLOSE = 0.05  # the share by which a closed form of the other kinds may miss the measurement, without a word
MODELS = PRESETS | MOE_PRESETS
SIZES = [name for name, config in MODELS.items() if config.vocab == 256]  # the models whose tokens are bytes
PASSES = ("time", "communication", "memory")
WATCHED = 4  # the number of steps of a pass that counts bytes
WARM_UP = 3  # the number of first steps that are not timed
# Parameters are compared with one process's after COMPARED steps, since training amplifies rounding in every step.
# Until then, a difference of at most SAME is rounding, in the dtype of the computation.
SAME = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
COMPARED = 30
TIMEOUT = 3600.0
ONE_OF_EACH = (  # one strategy of each kind, ours and PyTorch's, in about a minute
    *("ddp-overlapped", "torch-ddp", "zero-1", "zero-2", "zero-3"),
    *("fsdp", "torch-fsdp", "tp-sp", "fsdp-tp", "cp-ring", "pp-1f1b", "torch-pp-1f1b"),
)


@dataclass(frozen=True)
class TourSettings:
    """The settings of a tour.  Raises ValueError, with a remedy, for settings that cannot be trained."""

    size: str = "tiny"
    ranks: int = 4
    steps: int = 30
    batch: int = 12
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size {self.size!r} is no model whose tokens are bytes: take {' or '.join(SIZES)}")
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(
                f"ranks {self.ranks}: a job has 1 to {MOST_RANKS} ranks; more than that takes several machines"
            )
        if min(self.steps, self.batch) < 1:
            raise ValueError(f"steps {self.steps} and batch {self.batch} must each be at least 1")
        if self.batch % self.ranks:
            divisors = ", ".join(str(n) for n in range(1, MOST_RANKS + 1) if self.batch % n == 0)
            larger = self.batch + -self.batch % self.ranks
            raise ValueError(
                f"batch {self.batch} is not divisible by {self.ranks} ranks: "
                f"take --batch {larger}, or --ranks with one of {divisors}"
            )
        # The device is chosen once, since the single process must run on the same kind of device as the strategies.
        object.__setattr__(self, "device", devices_for(self.device, self.ranks).names[0].split(":")[0])

    @property
    def config(self) -> Config:
        """Return the model's shape, without a balance loss, which each part of a batch would have for itself."""
        config = MODELS[self.size]
        return replace(config, balance=0.0) if isinstance(config, MoEConfig) else config

    @cached_property
    def corpus(self) -> Corpus:
        return corpus()

    def batches(self, parts: int, steps: int) -> list[list[Batch]]:
        """Return batches[part][step], with each batch cut into `parts` parts; their number does not change the data."""
        tokens, context = self.corpus.tokens, self.config.context
        loaders = [Batches(tokens, self.batch, context, 0, part, parts) for part in range(parts)]
        return [[loader[step] for step in range(steps)] for loader in loaders]

    def to_json(self) -> dict[str, Any]:
        text = self.corpus
        source = {"source": text.source, "bytes": text.size, "sha256": text.sha256}
        return {
            **asdict(self),
            "model": asdict(self.config),
            "optimizer": {"name": "AdamW", **ADAMW},
            "corpus": {**source, "unigram_entropy": text.unigram_entropy()},
            "compared_after": min(self.steps, COMPARED),
        }


@dataclass
class Row:
    """The measurements of a strategy; `differs` has a sentence for each measurement that its prediction misses."""

    name: str
    side: str
    ranks: int
    losses: list[float]  # per step, the mean over the ranks that have a loss
    max_param_diff: float
    sent: dict[str, int | None]  # "predicted" and "measured", the maximum over the ranks; None if there is no value
    held: dict[str, dict[str, int | None]]  # {kind: "predicted" and "measured", the maximum over the ranks}
    ms_per_step: float
    note: str = ""
    mesh: str = ""  # the mesh of the job
    same: float = SAME[torch.float32]  # the largest max_param_diff that is allowed
    differs: list[str] = field(default_factory=list)

    @property
    def final_loss(self) -> float:
        return statistics.fmean(self.losses[-5:])

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "differs"}


# ---- measuring -------------------------------------------------------------------------------------------


def tour(
    plan: TourSettings, chosen: Sequence[Strategy | Compiled], tick: Callable[[str, int], Any] = lambda name, done: None
) -> Iterator[Row]:
    """Yield the measurements of one device, and then of each chosen strategy, compared with one device.

    tick: a function that is called before each run with the strategy's name and the number of runs done.
    """
    reference, one = None, ONE_DEVICE
    if isinstance(plan.config, MoEConfig):
        one = replace(one, predict=partial(expert_parallel, edp=1, ep=1))
    for number, strategy in enumerate((one, *chosen)):
        ranks = strategy.ranks(plan.ranks)
        if isinstance(strategy, Compiled):
            tick(strategy.name, len(PASSES) * number)
            yield read(strategy, plan, ranks, reference)
            continue
        seen = {}
        for kind in PASSES:
            tick(strategy.name, len(PASSES) * number + len(seen))
            seen[kind] = watch(strategy, plan, ranks, kind, reference)
        if reference is None:
            reference = seen["time"][0][1]
            seen["time"][0] = seen["time"][0][0], 0.0
        yield compare(strategy, plan, ranks, **seen)


def watch(
    strategy: Strategy, plan: TourSettings, ranks: int, kind: str, reference: dict[str, Tensor] | None
) -> Results:
    """Train once with a strategy, and make a recording of this kind."""
    job = dict(ranks=ranks, device=plan.device, timeout=TIMEOUT, record=kind)
    build, parts = partial(model_of, plan.config, torch.float32, "none"), strategy.parts(plan.ranks)
    if kind == "time":
        return run(train_and_compare, strategy, build, plan.batches(parts, plan.steps), reference, **job)
    return run(train_and_count, strategy, build, plan.batches(parts, WATCHED), **job)


def train_and_count(strategy: Strategy, build: Any, batches: Any) -> list[list[int]]:
    """Train on a rank; return the rows of each expert in the last step, layer by layer, if the model has experts."""
    model, rows = build(), []
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.register_forward_hook(lambda router, x, out: rows.append(out[0].flatten()))
    train(strategy, lambda: model, batches)
    return [chosen.bincount(minlength=model.config.experts).tolist() for chosen in rows[len(rows) - len(routers) :]]


def train_and_compare(
    strategy: Strategy, build: Any, batches: Any, reference: dict[str, Tensor] | None
) -> tuple[Any, Any]:
    """Train on a rank; return its losses, and the largest difference between its parameters and one process's.

    reference: the parameters of one process; None in that process, which then returns its parameters.
    """
    losses, kept = train(strategy, build, batches, keep=min(COMPARED, len(batches[0])))
    if reference is None:
        return losses, kept
    return losses, max((kept[name] - p).abs().max().item() for name, p in reference.items())


def compare(
    strategy: Strategy, plan: TourSettings, ranks: int, time: Results, communication: Results, memory: Results
) -> Row:
    """Return the measurements of a strategy's three runs, compared with the predictions on every rank."""
    losses, differences = zip(*time, strict=True)
    share = plan.batch // strategy.parts(plan.ranks)
    loads = {"loads": list(communication)} if strategy.takes is MoEGPT else {}
    predicted = [strategy.predict(Job(plan.config, share, ranks, rank), **loads) for rank in range(ranks)]
    sent = [communication.recording.sent(rank, WATCHED - 1) for rank in range(ranks)]
    held = [memory.recording.steady(rank) for rank in range(ranks)]
    durations = [
        1000 * (span.end - span.start)
        for rank in range(ranks)
        for span in time.recording.step_spans(rank)[min(WARM_UP, plan.steps - 1) :]
    ]
    row = Row(
        strategy.name,
        strategy.side,
        ranks,
        [statistics.fmean(step) for step in zip(*filter(None, losses), strict=True)],
        max(differences),
        {"predicted": max(p.sent for p in predicted), "measured": max(sent)},
        {
            kind: {
                "predicted": most(getattr(p.held, kind) for p in predicted),
                "measured": max(rank[kind] for rank in held),
            }
            for kind in KINDS
        },
        statistics.median(durations),
        strategy.note,
        mesh_of(strategy, ranks),
        SAME[strategy.computes],
    )
    faults: dict[str, list[int]] = {}
    for rank, (difference, p) in enumerate(zip(differences, predicted, strict=True)):
        for fault in faults_of(difference, p, sent[rank], held[rank], row.same):
            faults.setdefault(fault, []).append(rank)
    row.differs = [f"{strategy.name}, rank {', '.join(map(str, at))}: {fault}" for fault, at in faults.items()]
    return row


def most(predicted: Iterable[int | None]) -> int | None:
    """Return the largest prediction of all ranks, or None if there is no prediction."""
    return max((number for number in predicted if number is not None), default=None)


def read(strategy: Compiled, plan: TourSettings, ranks: int, reference: dict[str, Tensor]) -> Row:
    """Return the measurements of a strategy of XLA, and the bytes that the compiled program sends and holds."""
    weights = {name: p.detach().numpy() for name, p in GPT(plan.config).named_parameters()}
    batches = [tuple(part.numpy() for part in batch) for batch in plan.batches(1, plan.steps)[0]]
    job = plan.config, weights, batches, strategy.axes(ranks), ADAMW, min(COMPARED, plan.steps)
    trained = on_devices(train_annotated, *job, devices=ranks, timeout=TIMEOUT)
    ours = strategy.predict(Job(plan.config, plan.batch, ranks))
    # The compiler does not report G: together with A and the communication, it is part of "temporary".
    measured = {"P": trained.held // 3, "S": trained.held - trained.held // 3}  # AdamW has two moments for each weight
    expected = replace(ours, sent=trained.sent, held=replace(ours.held, S=2 * ours.held.P))
    known = {kind: (getattr(expected.held, kind), measured[kind]) for kind in measured}
    known |= {"temporary": (None, trained.temporary), "peak": (None, trained.peak)}
    row = Row(
        strategy.name,
        strategy.side,
        ranks,
        trained.losses,
        max(abs(trained.weights[name] - p.numpy()).max().item() for name, p in reference.items()),
        {"predicted": None, "measured": trained.sent},
        {kind: dict(zip(("predicted", "measured"), known.get(kind, (None, None)), strict=True)) for kind in KINDS},
        1000 * statistics.median(trained.seconds[min(WARM_UP, plan.steps - 1) :]),
        strategy.note,
        mesh_of(strategy, ranks),
    )
    faults = faults_of(row.max_param_diff, expected, trained.sent, measured | {"G": expected.held.G})
    row.differs = [f"{strategy.name}: {fault}" for fault in faults]
    return row


def train_annotated(*job: Any) -> Any:
    from labs.xla import annotations

    return annotations.train(*job)


def mesh_of(strategy: Strategy | Compiled, ranks: int) -> str:
    axes = strategy.axes(ranks)
    return equation(tuple(axes.values()), tuple(axes))


def faults_of(
    difference: float, predicted: Prediction, sent: int, held: dict[str, int], same: float = SAME[torch.float32]
) -> Iterator[str]:
    """Yield a sentence for each difference of a rank from one process, or from the predictions."""
    if not difference <= same:  # also true if the difference is nan
        yield f"parameters differ from one process's by {difference:.1e}, more than {same:.0e}"
    if sent != predicted.sent:
        yield f"sent {sent:,} bytes in a step, not the predicted {predicted.sent:,}"
    for kind in EXACT:
        if held[kind] != getattr(predicted.held, kind):
            yield f"held {held[kind]:,} bytes of {NAMES[kind]}, not the predicted {getattr(predicted.held, kind):,}"


# ---- showing ---------------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> draw.Table:
    """Return a table for a terminal of 100 columns, with the predictions of a strategy above its measurements."""
    cells = [[row.sent, *(row.held[kind] for kind in KINDS)] for row in rows]
    largest = max(max(filter(None, cell.values()), default=0) for line in cells for cell in line)
    power = next(power for power in range(1, 6) if largest < 1000 * 1024**power)
    lines = []
    for row, line in zip(rows, cells, strict=True):
        about = (row.name, f"{row.final_loss:.4f}", f"{row.max_param_diff:.1e}", f"{row.ms_per_step:.1f}")
        again = (f"  {row.mesh}", "", "", "")
        for first, which in ((about, "predicted"), (again, "measured")):
            figures = (three_digits(cell[which], 1024**power) for cell in line)
            lines.append((*first, which, *figures))
    names = ["temp" if kind == "temporary" else kind for kind in KINDS]
    header = ("strategy", "loss", "Δ params", "ms", f"{' KMGTP'[power]}iB/rank", "sent", *names)
    notes = (
        "loss: nats, mean of the last 5 steps.  Δ params: largest difference from one process.",
        "ms and sent: per step.  P … temp: the most that a rank held during a step;  peak: all at once.",
    )
    if any(None in cell.values() for line in cells for cell in line):
        notes += ("–: there is no formula, or it is not told apart from the rest.",)
    return draw.Table(header, tuple(lines), (False, *[True] * 3, False, *[True] * 8), notes=notes)


def three_digits(number: float | None, unit: int) -> str:
    if number is None:
        return "–"
    number /= unit
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def verdicts(rows: Sequence[Row], plan: TourSettings) -> list[str]:
    """Return the conclusions from the table of measurements, in sentences."""
    after = min(plan.steps, COMPARED)
    entropy, loss = plan.corpus.unigram_entropy(), rows[0].final_loss
    below = "below" if loss < entropy else "not yet below"
    low = any(row.same > SAME[torch.float32] for row in rows)
    unigrams = f"the corpus's unigram entropy of {entropy:.2f} (byte counts alone)"
    lines = [f"The loss, {loss:.2f} nats, is {below} {unigrams}."]
    if len(rows) > 1 and not any(row.differs for row in rows):
        lines += [
            f"After {after} steps every strategy has one process's parameters, to {SAME[torch.float32]:.0e}"
            + (f", or {SAME[torch.bfloat16]:.0e} if it computes in bfloat16." if low else "."),
            "Each rank sent, and held of P, G and S, what the formulas say, to the byte.",
        ]
    lines += [sentence for row in rows if (sentence := off(row))]
    return lines + [f"{row.name} {row.note}." for row in rows if row.note]


def off(row: Row) -> str:
    """Return a sentence with the kinds of bytes that miss a closed form by more than 5 %, or "" if there are none."""
    kinds = [(NAMES.get(kind, kind), row.held[kind]) for kind in KINDS if kind not in EXACT]
    differ = [
        f"{name} {cell['measured']:,} (predicted {cell['predicted']:,})"
        for name, cell in kinds
        if cell["predicted"] is not None and abs(cell["measured"] - cell["predicted"]) > CLOSE * cell["predicted"]
    ]
    return f"{row.name} held, in bytes: {', '.join(differ)}." if differ else ""


def picture(rows: Sequence[Row], plan: TourSettings) -> bytes:
    """Return a PNG of all strategies' losses over one process's, and of the bytes held, predicted and measured."""
    from matplotlib import image
    from numpy import vstack

    losses = {label(row): row.losses for row in rows}
    held = {
        f"{label(row)}, {which}": {kind: row.held[kind][which] or 0 for kind in KINDS}
        for row in rows
        for which in ("predicted", "measured")
        if row.held["peak"][which] is not None
    }
    figures = (draw.curves(losses, marks={"unigram entropy": plan.corpus.unigram_entropy()}), draw.bars(held))
    whole = io.BytesIO()
    image.imsave(whole, vstack([image.imread(io.BytesIO(figure.data)) for figure in figures]), format="png")
    return whole.getvalue()


def label(row: Row) -> str:
    return row.name if row.ranks == 1 else f"{row.name} × {row.ranks}"


def summary(rows: Sequence[Row], plan: TourSettings) -> dict[str, Any]:
    """Return the content of the JSON file that `--json` writes."""
    return {
        "schema": 1,
        "config": plan.to_json(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "reference": {"losses": rows[0].losses},
        "rows": [row.to_json() for row in rows],
    }


def in_a_line(row: Row) -> str:
    """Return the line that is printed as soon as a strategy is measured."""
    against = "" if row.name == ONE_DEVICE.name else f", parameters {row.max_param_diff:.0e} from one process's"
    return f"{row.name}: {row.ms_per_step:.1f} ms per step{against}"


# ---- files -----------------------------------------------------------------------------------------------


def require_writable(path: Path) -> None:
    """Raise ValueError, before any training, if no file can be written at `path`."""
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{path} cannot be written ({reason}): name a file in a folder that is yours") from error


def write(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: until the new file is complete, a reader sees the old file."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# ---- the command -----------------------------------------------------------------------------------------


def shown() -> list[str]:
    """Return the names of the strategies that can run here: those of an extra only if it is installed."""
    others = [strategy for strategy in (*WITH_AN_EXTRA, *COMPILED) if strategy.fits(TourSettings.ranks)]
    return [strategy.name for strategy in (*STRATEGIES, *others)]


HELP = f"all, or some of {', '.join(shown())}; by default {','.join(ONE_OF_EACH)}"
HELP += f"; for a model with experts all, or some of {', '.join(row.name for row in EXPERTS)}"


@dataclass
class Tour:
    """Train the course's GPT on one process and on several ranks, strategy by strategy; measure and compare."""

    ranks: int = TourSettings.ranks  # processes of a job
    steps: int = TourSettings.steps  # steps of training
    batch: int = TourSettings.batch  # sequences per step, on all ranks
    size: Annotated[str, arg(help=f"size of the model: {', '.join(SIZES)}")] = TourSettings.size
    device: str = TourSettings.device  # auto, cpu or cuda
    strategies: Annotated[str | None, arg(metavar="A,B", help=HELP)] = None
    json: Path = Path("tour.json")  # file for all numbers
    figure: Path = Path("tour.png")  # file for a picture


def choose(names: str | None, ranks: int, size: str = TourSettings.size) -> list[Strategy | Compiled]:
    """Return the strategies with these names, in the order of the table of strategies.

    names: names separated by commas; None for ONE_OF_EACH, or "all" for every strategy; both leave out strategies that
        cannot run on so many ranks.
    Raises ValueError for a name that does not exist, or whose strategy cannot run on so many ranks.
    """
    with_experts = isinstance(MODELS[size], MoEConfig)
    table = EXPERTS if with_experts else (*STRATEGIES, *WITH_AN_EXTRA, *COMPILED)
    known = [strategy.name for strategy in table]
    if names is None or names == "all":
        wanted = ONE_OF_EACH if names is None and not with_experts else known
        return [strategy for strategy in table if strategy.name in wanted and strategy.fits(ranks)]
    wanted = {name.strip() for name in names.split(",")}
    if unknown := sorted(wanted - set(known)):
        raise ValueError(f"no strategy {', '.join(map(repr, unknown))}: choose from {', '.join(known)}, or all")
    chosen = [strategy for strategy in table if strategy.name in wanted]
    for strategy in chosen:
        try:
            strategy.axes(ranks)
        except ValueError as error:
            raise ValueError(f"{strategy.name} cannot have --ranks {ranks}: {error}") from error
    return chosen


def main(arguments: list[str]) -> int:
    """Run the tour; return 0 if every strategy agrees with its predictions, 1 if one differs, 2 if no tour was run."""
    chosen = tyro.cli(Tour, prog="python -m labs tour", args=arguments, config=(DisallowNone,))
    try:
        plan = TourSettings(chosen.size, chosen.ranks, chosen.steps, chosen.batch, chosen.device)
        strategies = choose(chosen.strategies, plan.ranks, plan.size)
        require_writable(chosen.json)
        require_writable(chosen.figure)
        print(introduction(plan), flush=True)
        with tqdm(total=len(PASSES) * (len(strategies) + 1), disable=None, leave=False, unit="pass") as bar:

            def tick(name: str, done: int) -> None:
                bar.update(done - bar.n)
                bar.set_description(f"{name:<21}")

            rows = []
            for row in tour(plan, strategies, tick):
                rows.append(row)
                bar.write(in_a_line(row))
                sys.stdout.flush()
    except (ValueError, RankError) as error:
        print(f"tour: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tour: stopped", file=sys.stderr)
        return 130
    print(f"\n{show(rows)}\n", *verdicts(rows, plan), sep="\n")
    write(chosen.json, json.dumps(summary(rows, plan), indent=1).encode())
    write(chosen.figure, picture(rows, plan))
    print(f"Saved: {chosen.json}, {chosen.figure}", flush=True)
    differs = [sentence for row in rows for sentence in row.differs]
    for sentence in differs:
        print(f"tour: {sentence}", file=sys.stderr)
    return int(bool(differs))


def introduction(plan: TourSettings) -> str:
    text, tokens = plan.corpus, f"{plan.batch} × {plan.config.context} tokens"
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    count = moe.parameters if isinstance(plan.config, MoEConfig) else parameters
    model = f"GPT {plan.size} ({count(plan.config):,} parameters, float32)"
    return (
        f"{model}, {plan.steps} steps of {tokens} with AdamW,\n"
        f"on the {text.source} ({text.size:,} bytes); one process, then {ranks} on {plan.device}"
    )
