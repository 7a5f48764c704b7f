"""Pictures with a slider: move it, and what a formula or a recording says is drawn again.

    explore(picture, ranks=[2, 4, 8])       any function that returns a picture; one control per argument
    frames(picture, "round", 7)             a slider with a Play button over the frames of a film
    collective(messages, ranks)             a collective, round by round
    replay(recording, …)                    recorded timelines, as they went by
    all_reduce_times({"ring": cost.…})      seconds by algorithm, ranks, size, latency and bandwidth
    links()                                 seconds of an all-reduce on each link of a cluster, by its size
    prefetch(talk, held, steps)             recordings by how many layers are gathered ahead
    memory(model="llama3-8b")               bytes on each rank by kind and stage, and on which cards that fits
    schedule()                              a pipeline's schedule in time: its bubble, the activations alive
    microbatches(lists)                     a pipeline's stages, moment by moment: which micro-batch is where
    crashes(moments)                        a folder while checkpoints are saved, and what a crash would leave
    placements()                            a tensor from some placements to others: who holds what, what is sent
    planner()                               a model on a cluster: the plan's choice, and the other ways
    tensor_parallel()                       which slice of each matrix lies where, and what a rank sends and holds

Where a picture comes with its formula (draw.formula), the terms that the control moved last has changed light up.

A notebook keeps only a static picture of each, with the settings it was drawn at: it looks the same where no
kernel runs, and is the same after each build. Nothing here knows a formula: they are arguments, or labs.cost's.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import ipywidgets

from labs.kit import draw
from labs.kit.drawing.diagrams import Holdings, Message, by_round
from labs.kit.drawing.figures import window
from labs.kit.drawing.formulas import Captioned
from labs.kit.explorers import algorithms, layouts
from labs.kit.explorers import links as wires
from labs.kit.explorers import microbatches as moment
from labs.kit.explorers import planner as planning
from labs.kit.explorers import schedule as pipeline
from labs.kit.explorers import split_block as split
from labs.kit.explorers import stages_of_zero as explorer
from labs.kit.explorers.ahead import picture as timeline_and_memory
from labs.kit.watch.folders import Moment
from labs.model import PRESETS, Config
from labs.pp.instructions import Lists
from labs.pp.simulation import Cost, simulate

WORDS = {  # what stands beside a control, where its name in code does not say enough
    "batch": "sequences at once",
    "context": "tokens in each",
    "card": "a card's memory",
    "tokens": "tokens on each rank",
    "size": "bytes on each rank",
    "gpus": "GPUs",
    "sequences": "sequences in a step",
    "width": "numbers per token",
    "sequence": "tokens in a sequence",
    "vocabulary": "rows in the embedding",
    "x": "x between split layers",
    "saved": "saved by, ranks",
    "loading": "loaded by, ranks",
    "microbatches": "micro-batches",
    "stages_per_rank": "stages on each rank",
    "forward": "a rank's forward takes",
    "backward": "its backward takes",
    "send": "a message takes, in forwards",
}


class Explorer(ipywidgets.VBox):
    """Controls above the picture that they set.

    picture: called with the value of each control by name; returns anything of `labs.kit.draw`.
    controls: the widgets by name, in order; beside: further widgets for the row of controls, such as a Play
    button; still: the picture that a saved notebook shows (the one at the first settings when left out).
    """

    def __init__(
        self,
        picture: Callable[..., Any],
        controls: Mapping[str, ipywidgets.Widget],
        beside: Sequence[ipywidgets.Widget] = (),
        still: Any = None,
    ):
        self.picture, self.controls = cache(picture), dict(controls)
        self.still = still or self.picture(**self.settings)
        self.stage = ipywidgets.HTML()
        for name, control in self.controls.items():
            control.observe(lambda _, name=name: self.refresh(moved=name), "value")
        self.refresh()
        row = ipywidgets.HBox([*beside, *self.controls.values()], layout={"flex_flow": "row wrap"})
        super().__init__([row, self.stage])

    @property
    def settings(self) -> dict[str, Any]:
        """The value of each control."""
        return {name: control.value for name, control in self.controls.items()}

    def refresh(self, moved: str | None = None) -> None:
        """Draw the picture at the present settings; light the terms of its formula that the control `moved` moves."""
        picture = self.picture(**self.settings)
        self.stage.value = picture.lit(moved) if isinstance(picture, Captioned) else picture.html

    def _repr_mimebundle_(self, include=None, exclude=None):
        live = super()._repr_mimebundle_(include=include, exclude=exclude)
        data, metadata = live if isinstance(live, tuple) else (live, {})
        still = self.still._repr_mimebundle_()
        picture, shown = still if isinstance(still, tuple) else (still, {})
        return {**data, **picture}, {**metadata, **shown}


def control(name: str, values: Sequence | Mapping) -> ipywidgets.Widget:
    """A slider over `values` (or pairs of label and value) in order, or a dropdown over {label: value}, at the first.

    Raises ValueError when there is nothing to choose from.
    """
    if not len(values):
        raise ValueError(f"{name} has no values to choose from: give a list with at least one")
    whole = {"description": WORDS.get(name, name), "style": {"description_width": "initial"}}  # a long name, too
    if isinstance(values, Mapping):
        return ipywidgets.Dropdown(options=list(values.items()), **whole)
    return ipywidgets.SelectionSlider(options=list(values), **whole)


def explore(picture: Callable[..., Any], **values: Sequence | Mapping) -> Explorer:
    """A picture with one control for each argument of `picture`, each at its first value to begin with.

    values: by argument name, the values to choose from: a list or range, also of pairs (label, value), which becomes a
    slider, or {label: value}, a dropdown.
    Raises ValueError when an argument has nothing to choose from, or none has values.
    """
    if not values:
        raise ValueError("there are no values to choose from: give some, such as ranks=[2, 4]")
    return Explorer(picture, {name: control(name, choices) for name, choices in values.items()})


def frames(
    picture: Callable[[int], Any], label: str, count: int, still: Any = None, pause: float = 0.8, begin: int = 0
):
    """A film of `count` frames with a slider and a Play button; `picture(frame)` draws one.

    pause: seconds between frames while it plays; still: as for Explorer; begin: the frame that is shown at first.
    Returns an Explorer.
    """
    slider = ipywidgets.IntSlider(value=begin, min=0, max=count - 1, description=label)
    button = ipywidgets.Play(value=begin, min=0, max=count - 1, interval=int(1000 * pause), show_repeat=False)
    film = Explorer(lambda frame: picture(frame), {"frame": slider}, [button], still)
    film.link = ipywidgets.jslink((button, "value"), (slider, "value"))
    return film


def collective(messages: Sequence[Message], ranks: int, held: Holdings | None = None) -> Explorer:
    """A collective round by round; saved, all rounds side by side.

    messages: (round, source, destination, piece); held: what the ranks start with (default: their own tensor).
    """
    rounds = len(by_round(messages))
    return frames(
        lambda frame: draw.step(messages, ranks, frame, held),
        "round",
        rounds + 1,
        still=draw.messages(messages, ranks),
    )


def replay(*recordings, step: int | None = None, names: Sequence[str] = (), count: int = 41) -> Explorer:
    """Recorded timelines as they went by, side by side in time, in `count` frames; saved and at first, the whole.

    recordings: labs.kit.record.Recordings; step: the one to show (all of the job when left out); names: one for each.
    """
    longest = max(end - start for start, end in (window(recording, step) for recording in recordings))
    whole = draw.timeline(*recordings, step=step, names=names)

    def frame(number: int) -> draw.Figure:
        until = number / (count - 1) * longest
        return whole if until == longest else draw.timeline(*recordings, step=step, names=names, until=until)

    film = frames(frame, "time", count, still=whole, pause=0.25, begin=count - 1)
    film.controls["frame"].readout = False  # the picture's axis tells the time
    return film


def all_reduce_times(seconds: Mapping[str, Callable[[int, int, float, float], float]]) -> Explorer:
    """Time of one all-reduce by algorithm and size, and which wins where; a dot at the slider's size.

    seconds: {"ring": f, ...} where f(bytes, ranks, latency in s, bandwidth in B/s) is a formula.
    """
    sliders = {name: control(*choice) for name, choice in algorithms.CONTROLS.items()}
    for name, value in algorithms.BEGIN.items():
        sliders[name].value = value
    return Explorer(partial(algorithms.picture, seconds), sliders)


def links(**begin: Any) -> Explorer:
    """What one all-reduce takes on NVLink, PCI Express, InfiniBand and Ethernet, by size; a dot at the slider's size.

    begin: where controls stand at first, by the names of `labs.kit.explorers.links.CONTROLS`.
    Raises ValueError for a control that does not exist, or a value that it does not have.
    """
    controls = begun("links", wires.CONTROLS, wires.BEGIN, begin)
    return Explorer(wires.picture, controls)


def prefetch(
    talk: Mapping[int | str, Any], held: Mapping[int | str, Any], steps: Mapping[int | str, int], begin: Any = None
) -> Explorer:
    """Who did what when, and what rank 0 held in a steady step, by how many layers were gathered ahead.

    talk, held: by that number, recordings of communication and of memory; steps: likewise, which step of `talk` to
    show; begin: where the slider stands at first.
    Raises ValueError when the three are not of the same jobs.
    """
    if not list(talk) == list(held) == list(steps):
        raise ValueError(
            f"timelines of {list(talk)} layers ahead, memory of {list(held)} and steps of {list(steps)}: give all "
            "three of each"
        )
    slider = control("layers ahead", list(talk))
    slider.value = slider.value if begin is None else begin
    return Explorer(lambda ahead: timeline_and_memory(talk[ahead], held[ahead], steps[ahead]), {"ahead": slider})


def memory(measured: Mapping[str, Any] | None = None, config: Config | None = None, **begin: Any) -> Explorer:
    """What each rank holds under DDP and the stages of ZeRO, and on how many ranks it fits a card of 24, ... 141 GB.

    measured: what a job of your own held, by name, for thin bars that stay as they are: a recording of memory (a steady
    step of rank 0), or bytes by kind and "peak"; "DDP", "stage 1", ... stand below the formula's bar of that name.
    config: the shape of that job's model, which is then the first in the menu, as "yours".
    begin: where controls stand at first, by the names of `labs.kit.explorers.stages_of_zero.CONTROLS`; `batch` is the
    sequences of a rank's micro-batch, `context` their tokens.
    Raises ValueError for a control that does not exist, or a value that it does not have.
    """
    held = {name: each if isinstance(each, Mapping) else each.steady() for name, each in (measured or {}).items()}
    models = {explorer.YOURS: config, **PRESETS} if config else PRESETS
    choices = {**explorer.CONTROLS, "model": {name: name for name in models}}
    first = {**explorer.BEGIN, "model": explorer.YOURS} if config else explorer.BEGIN
    controls = begun("memory", choices, first, begin)
    return Explorer(lambda **settings: explorer.picture(held, models, **settings), controls)


def crashes(moments: Sequence[Moment]) -> Explorer:
    """A folder of checkpoints, call by call, and which of them is loaded after a crash there.  Saved: in the middle.

    moments: as labs.kit.watch.folders has them.
    """
    still = draw.folder(moments, len(moments) // 2)
    return frames(lambda frame: draw.folder(moments, frame), "moment", len(moments), still)


def placements(**begin: str) -> Explorer:
    """Who holds which block of a tensor before and after a redistribution, its collectives, and what a rank sends.

    begin: where controls stand at first, by the names of `labs.kit.explorers.layouts.CONTROLS`, spaces as
    underscores: placements(mesh="4", from_a="Shard(0)").
    Raises ValueError for a control that does not exist, or a value that it does not have.
    """
    begin = {name.replace("_", " "): value for name, value in begin.items()}
    controls = begun("placement", layouts.CONTROLS, layouts.BEGIN, begin)
    explorer = Explorer(layouts.picture, controls)
    one, other = list(controls.values())[::2], list(controls.values())[1::2]
    pairs = zip(one, other, strict=True)  # tensor and mesh, from a and b, to a and b: wherever the row breaks
    explorer.children[0].children = [ipywidgets.VBox(pair) for pair in pairs]
    return explorer


def tensor_parallel(**begin: Any) -> Explorer:
    """Which slice of each matrix of a GPT lies on which rank, where collectives sit, what rank 0 sends and holds.

    begin: where controls stand at first, by the names of `labs.kit.explorers.split_block.CONTROLS`.
    Raises ValueError for a control that does not exist, or a value that it does not have.
    """
    return Explorer(split.picture, begun("tensor-parallel", split.CONTROLS, split.BEGIN, begin))


def planner(**begin: Any) -> Explorer:
    """What the plan chooses for a model on a cluster, what a step is spent on, and what the other ways would take.

    begin: where controls stand at first, by the names of `labs.kit.explorers.planner.CONTROLS`.
    Raises ValueError for a control that does not exist, or a value that it does not have.
    """
    return Explorer(planning.picture, begun("planner", planning.CONTROLS, planning.BEGIN, begin))


def schedule(**begin: Any) -> Explorer:
    """A pipeline's schedule in time, and beneath it, of how many micro-batches each rank holds the activations.

    begin: where controls stand at first, by the names of `labs.kit.explorers.schedule.CONTROLS`; `forward` and
    `backward` are what a micro-batch takes in all layers of a rank, `send` how many forwards it takes from rank to
    rank.  Another schedule comes with its usual number of stages.
    Raises ValueError for a control that does not exist, or a value that it does not have.
    """
    controls = begun("schedule", pipeline.CONTROLS, pipeline.BEGIN, begin)
    stages = controls["stages_per_rank"]
    controls["schedule"].observe(lambda change: stages.set_trait("value", pipeline.usual_stages(change.new)), "value")
    return Explorer(pipeline.picture, controls)


def microbatches(lists: Lists, **costs: Cost) -> Explorer:
    """A film of micro-batches on their way through the stages, a frame for each moment at which something begins.

    lists, costs: as labs.pp.simulate has them.  Saved: the moment in the middle.
    Raises WrongSchedule for lists that cannot be run: draw.schedule shows where.
    """
    simulation = simulate(lists, **costs)
    times = moment.moments(simulation)
    still = moment.picture(simulation, times[len(times) // 2])
    return frames(lambda frame: moment.picture(simulation, times[frame]), "moment", len(times), still)


def begun(name: str, choices: Mapping[str, Any], at_first: Mapping[str, Any], begin: Mapping[str, Any]) -> dict:
    """The controls of an explorer, each where it stands at first: a slider at a value, a menu at a label."""
    controls = {setting: control(setting, values) for setting, values in choices.items()}
    for setting, value in {**at_first, **begin}.items():
        if setting not in controls:
            raise ValueError(f"{setting} is not a control of the {name} explorer: there are {', '.join(controls)}")
        there = [each[-1] if isinstance(each, tuple) else each for each in choices[setting]]
        if value not in there:
            raise ValueError(f"{setting}={value!r}: choose one of {', '.join(map(str, there))}")
        if isinstance(choices[setting], Mapping):
            controls[setting].label = value
        else:
            controls[setting].value = value
    return controls
