"""Explorers, which are pictures with sliders: when a slider moves, the picture is drawn again.

    explore(picture, ranks=[2, 4, 8])       any function that returns a picture; one control per argument
    frames(picture, "round", 7)             a slider with a Play button over the frames of a film
    collective(messages, ranks)             a collective, round by round
    replay(recording, …)                    recorded timelines as a film
    all_reduce_times({"ring": cost.…})      seconds by algorithm, ranks, size, latency and bandwidth
    links()                                 seconds of an all-reduce on each link of a cluster, by its size
    prefetch(talk, held, steps)             recordings by the number of layers that are prefetched
    memory(model="llama3-8b")               bytes on each rank by kind and stage of ZeRO, beside GPUs' memory sizes
    schedule()                              a pipeline's schedule in time: its bubble, the activations held
    microbatches(lists)                     a pipeline's stages, moment by moment, and the micro-batches in them
    crashes(moments)                        the files of a checkpoint during a save, and what a crash would leave
    placements()                            a tensor before and after a redistribution, and the bytes sent
    propagation(graph, sizes, given, names) the layouts of a program, as they follow from the given ones
    to_deepspeed()                          settings of fully_shard, and the configuration of DeepSpeed for them
    to_fsdp()                               a configuration of DeepSpeed, and the settings of fully_shard for it
    planner()                               the layout that labs.plan chooses for a model on a cluster, and others
    tensor_parallel()                       each rank's slice of each matrix, and the bytes that a rank sends and holds

If a picture comes with its formula (draw.formula), the terms that the last control has changed are highlighted.

A notebook stores only a static picture of each explorer, at its first settings: the picture looks the same without a
kernel, and is the same after each build.  The site has the pictures at other settings, too (tools/explorers.py).  This
module has no formulas: formulas are arguments, or come from labs.cost.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import ipywidgets

from labs.gspmd.tracing import Graph, Value
from labs.kit import draw
from labs.kit.drawing.collective_messages import Holdings, Message, by_round
from labs.kit.drawing.figures import window
from labs.kit.drawing.formulas import Captioned
from labs.kit.explorers import all_reduce_algorithms, redistribution
from labs.kit.explorers import deepspeed_words as words
from labs.kit.explorers import fastest_layout as planning
from labs.kit.explorers import links as wires
from labs.kit.explorers import microbatches as moment
from labs.kit.explorers import pipeline_schedule as pipeline
from labs.kit.explorers import stages_of_zero as explorer
from labs.kit.explorers import tensor_parallel_block as split
from labs.kit.explorers.layouts_that_travel import Film, Given
from labs.kit.explorers.prefetch import picture as timeline_and_memory
from labs.kit.watch.folder_snapshots import FolderSnapshot
from labs.model import PRESETS, Config
from labs.pp.instructions import Lists
from labs.pp.simulation import Cost, simulate

__all__ = [
    "all_reduce_times", "collective", "crashes", "explore", "frames", "links", "memory", "microbatches", "placements",
    "planner", "prefetch", "propagation", "replay", "schedule", "tensor_parallel",
    "to_deepspeed", "to_fsdp",
]  # fmt: skip

WORDS = {  # {name of a control in code: its label, if the name does not say enough}
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
    """A picture below the controls that change it.

    picture: a function that takes the value of each control by name, and returns a picture of `labs.kit.draw`.
    controls: the widgets by name, in order.
    beside: further widgets for the row of controls, such as a Play button.
    still: the picture that a saved notebook shows; the picture at the first settings when left out.
    slow: whether "computing …" replaces the old picture until the new one is drawn.
    """

    def __init__(
        self,
        picture: Callable[..., Any],
        controls: Mapping[str, ipywidgets.Widget],
        beside: Sequence[ipywidgets.Widget] = (),
        still: Any = None,
        slow: bool = False,
    ):
        self.slow = slow
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
        """The values of the controls, by name."""
        return {name: control.value for name, control in self.controls.items()}

    def refresh(self, moved: str | None = None) -> None:
        """Draw the picture at the current settings; highlight the terms of its formula that depend on `moved`.

        moved: the name of the control that was moved, if one was.
        """
        if self.slow and moved:
            self.stage.value = "computing …"
        picture = self.picture(**self.settings)
        self.stage.value = picture.lit(moved) if isinstance(picture, Captioned) else picture.html

    def _repr_mimebundle_(self, include=None, exclude=None):
        live = super()._repr_mimebundle_(include=include, exclude=exclude)
        data, metadata = live if isinstance(live, tuple) else (live, {})
        still = self.still._repr_mimebundle_()
        picture, shown = still if isinstance(still, tuple) else (still, {})
        return {**data, **picture}, {**metadata, **shown}


def control(name: str, values: Sequence | Mapping) -> ipywidgets.Widget:
    """Return a control that is set to the first of its values.

    values: a list of values, or of pairs (label, value), becomes a slider; {label: value} becomes a dropdown menu.
    Raises ValueError if there is no value.
    """
    if not len(values):
        raise ValueError(f"{name} has no values to choose from: give a list with at least one")
    whole = {"description": WORDS.get(name, name), "style": {"description_width": "initial"}}  # shows all of a name
    if isinstance(values, Mapping):
        return ipywidgets.Dropdown(options=list(values.items()), **whole)
    return ipywidgets.SelectionSlider(options=list(values), **whole)


def explore(picture: Callable[..., Any], **values: Sequence | Mapping) -> Explorer:
    """Return an explorer with one control for each argument of `picture`, each at its first value.

    values: the values of each argument, by its name.  A list or range, also of pairs (label, value), becomes a slider;
        {label: value} becomes a dropdown.
    Raises ValueError when an argument has no values, or there are no arguments.
    """
    if not values:
        raise ValueError("there are no values to choose from: give some, such as ranks=[2, 4]")
    return Explorer(picture, {name: control(name, choices) for name, choices in values.items()})


def frames(
    picture: Callable[[int], Any], label: str, count: int, still: Any = None, pause: float = 0.8, begin: int = 0
):
    """Return a film of `count` frames with a slider and a Play button, as an Explorer.

    picture: a function that draws a frame, picture(number of the frame).
    still: the picture that a saved notebook shows; the first frame when left out.
    pause: seconds between frames while the film plays.
    begin: the frame that is shown at first.
    """
    slider = ipywidgets.IntSlider(value=begin, min=0, max=count - 1, description=label)
    button = ipywidgets.Play(value=begin, min=0, max=count - 1, interval=int(1000 * pause), show_repeat=False)
    film = Explorer(lambda frame: picture(frame), {"frame": slider}, [button], still)
    film.link = ipywidgets.jslink((button, "value"), (slider, "value"))
    return film


def collective(messages: Sequence[Message], ranks: int, held: Holdings | None = None) -> Explorer:
    """Return a film of a collective, round by round; a saved notebook shows all rounds side by side.

    messages: the messages between ranks, each as (round, source, destination, piece).
    held: the pieces that the ranks hold at the start; if left out, each rank holds its own tensor.
    """
    rounds = len(by_round(messages))
    return frames(
        lambda frame: draw.step(messages, ranks, frame, held),
        "round",
        rounds + 1,
        still=draw.messages(messages, ranks),
    )


def replay(*recordings, step: int | None = None, names: Sequence[str] = (), count: int = 41) -> Explorer:
    """Return a film of recorded timelines, which start together; a saved notebook shows the last frame.

    recordings: labs.kit.record.Recordings.
    step: the step to show, the whole job when left out.
    names: one name per recording.
    count: the number of frames.
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
    """Return an explorer of the seconds of one all-reduce, by algorithm and size; a dot marks the slider's size.

    seconds: {"ring": f, ...} where f(bytes, ranks, latency in s, bandwidth in B/s) is a formula.
    """
    sliders = {name: control(*choice) for name, choice in all_reduce_algorithms.CONTROLS.items()}
    for name, value in all_reduce_algorithms.BEGIN.items():
        sliders[name].value = value
    return Explorer(partial(all_reduce_algorithms.picture, seconds), sliders)


def links(**begin: Any) -> Explorer:
    """Return an explorer of the seconds of one all-reduce on NVLink, PCI Express, InfiniBand and Ethernet, by size.

    A dot marks the slider's size.

    begin: the first values of controls, by the names of `labs.kit.explorers.links.CONTROLS`.
    Raises ValueError for a control that does not exist, or for a value that the control does not have.
    """
    controls = set_controls("links", wires.CONTROLS, wires.BEGIN, begin)
    return Explorer(wires.picture, controls)


def prefetch(
    talk: Mapping[int | str, Any], held: Mapping[int | str, Any], steps: Mapping[int | str, int], begin: Any = None
) -> Explorer:
    """Return an explorer of timelines and of rank 0's memory in a steady step, by the number of layers prefetched.

    talk: {number of layers: a recording of communication}.
    held: {number of layers: a recording of memory}.
    steps: {number of layers: the step of `talk` to show}.
    begin: the number of layers at which the slider starts.
    Raises ValueError if talk, held and steps do not have the same numbers of layers.
    """
    if not list(talk) == list(held) == list(steps):
        raise ValueError(
            f"talk has {list(talk)} prefetched layers, held has {list(held)}, and steps has {list(steps)}: give all "
            "three for each number"
        )
    slider = control("layers ahead", list(talk))
    slider.value = slider.value if begin is None else begin
    return Explorer(lambda ahead: timeline_and_memory(talk[ahead], held[ahead], steps[ahead]), {"ahead": slider})


def memory(measured: Mapping[str, Any] | None = None, config: Config | None = None, **begin: Any) -> Explorer:
    """Return an explorer of the bytes that each rank holds under DDP and the stages of ZeRO.

    A table below the bars has the smallest number of ranks on which each strategy fits a GPU of 24, 40, 80 or 141 GB.

    measured: {name: the bytes that a job of your own held}, drawn as thin bars that do not depend on the controls: a
        recording of memory, of which a steady step of rank 0 is drawn, or bytes by kind and "peak".  A bar with the
        name "DDP", "stage 1", ... stands below the formula's bar of that name.
    config: the shape of the measured job's model, which is then the first model in the menu, as "yours".
    begin: the first values of controls, by the names of `labs.kit.explorers.stages_of_zero.CONTROLS`; `batch` is the
        number of sequences in a rank's micro-batch, and `context` is the number of tokens of a sequence.
    Raises ValueError for a control that does not exist, or for a value that the control does not have.
    """
    held = {name: each if isinstance(each, Mapping) else each.steady() for name, each in (measured or {}).items()}
    models = {explorer.YOURS: config, **PRESETS} if config else PRESETS
    choices = {**explorer.CONTROLS, "model": {name: name for name in models}}
    first = {**explorer.BEGIN, "model": explorer.YOURS} if config else explorer.BEGIN
    controls = set_controls("memory", choices, first, begin)
    return Explorer(lambda **settings: explorer.picture(held, models, **settings), controls)


def crashes(moments: Sequence[FolderSnapshot]) -> Explorer:
    """Return a film of a checkpoint folder during a save, with the checkpoint that would be loaded after a crash.

    The film has a frame for each call that changes the folder.  A saved notebook shows the frame in the middle.

    moments: the snapshots that labs.kit.record.watch_folder has taken.
    """
    still = draw.folder(moments, len(moments) // 2)
    return frames(lambda frame: draw.folder(moments, frame), "moment", len(moments), still)


def placements(**begin: str) -> Explorer:
    """Return an explorer of a tensor's blocks before and after a redistribution, its collectives, and the bytes sent.

    begin: the first values of controls, by the names of `labs.kit.explorers.redistribution.CONTROLS`, with
        underscores in place of spaces: placements(mesh="4", from_a="Shard(0)").
    Raises ValueError for a control that does not exist, or for a value that the control does not have.
    """
    begin = {name.replace("_", " "): value for name, value in begin.items()}
    controls = set_controls("placement", redistribution.CONTROLS, redistribution.BEGIN, begin)
    explorer = Explorer(redistribution.picture, controls)
    one, other = list(controls.values())[::2], list(controls.values())[1::2]
    pairs = zip(one, other, strict=True)  # tensor and mesh, from a and b, to a and b: each pair stays in one column
    explorer.children[0].children = [ipywidgets.VBox(pair) for pair in pairs]
    return explorer


def tensor_parallel(**begin: Any) -> Explorer:
    """Return an explorer of a GPT under tensor parallelism: each rank's slices, the collectives, and rank 0's bytes.

    begin: the first values of controls, by the names of `labs.kit.explorers.tensor_parallel_block.CONTROLS`.
    Raises ValueError for a control that does not exist, or for a value that the control does not have.
    """
    return Explorer(split.picture, set_controls("tensor-parallel", split.CONTROLS, split.BEGIN, begin))


def propagation(
    graph: Graph, sizes: Mapping[str, int], given: Given, names: Mapping[Value, str], beside: str = ""
) -> Explorer:
    """Return a film of products, with a frame for each layout that labs.gspmd works out.

    The last frame has the collectives of each product.  A saved notebook shows all changes, and that frame.

    graph: products as labs.gspmd.trace records them.
    given: the layouts of the arguments and the results.
    sizes: the mesh, as {axis: size}, with one axis or two.
    names: {value: its name in the picture}.
    beside: a sentence below the last frame, such as what XLA sends in these layouts.
    """
    film = Film(graph, sizes, given, names, beside)
    return frames(film.picture, "change", film.frames, film.still())


def to_deepspeed() -> Explorer:
    """Return an explorer of settings of PyTorch's `fully_shard`, and of the file with which DeepSpeed does the same."""
    return explore(words.in_its_words, **words.FSDPS)


def to_fsdp() -> Explorer:
    """Return an explorer of DeepSpeed's files for a model of 7 billion parameters, and `fully_shard`'s settings."""
    return explore(words.in_fsdps_words, **words.ITS)


def planner(**begin: Any) -> Explorer:
    """Return an explorer of the layout that labs.plan chooses for a model on a cluster, and of the alternatives.

    begin: the first values of controls, by the names of `labs.kit.explorers.fastest_layout.CONTROLS`.
    Raises ValueError for a control that does not exist, or for a value that the control does not have.
    """
    controls = set_controls("planner", planning.CONTROLS, planning.BEGIN, begin)
    for each in controls.values():
        each.continuous_update = False
    return Explorer(planning.picture, controls, slow=True)


def schedule(**begin: Any) -> Explorer:
    """Return an explorer of a pipeline schedule in time, and of the activations that each rank holds.

    When another schedule is chosen, its default number of stages per rank is set.

    begin: the first values of controls, by the names of `labs.kit.explorers.pipeline_schedule.CONTROLS`; `forward` and
        `backward` are the times of a micro-batch in all layers of a rank, and `send` is the time of a message, as a
        multiple of `forward`.
    Raises ValueError for a control that does not exist, or for a value that the control does not have.
    """
    controls = set_controls("schedule", pipeline.CONTROLS, pipeline.BEGIN, begin)
    stages = controls["stages_per_rank"]
    controls["schedule"].observe(lambda change: stages.set_trait("value", pipeline.usual_stages(change.new)), "value")
    return Explorer(pipeline.picture, controls)


def microbatches(lists: Lists, **costs: Cost) -> Explorer:
    """Return a film of micro-batches on their way through a pipeline's stages.

    The film has a frame for each start of an instruction.  A saved notebook shows the frame in the middle.

    lists, costs: the arguments of labs.pp.simulate.
    Raises WrongSchedule for a schedule that cannot be run; draw.schedule shows the wrong instruction.
    """
    simulation = simulate(lists, **costs)
    times = moment.moments(simulation)
    still = moment.picture(simulation, times[len(times) // 2])
    return frames(lambda frame: moment.picture(simulation, times[frame]), "moment", len(times), still)


def set_controls(name: str, choices: Mapping[str, Any], defaults: Mapping[str, Any], begin: Mapping[str, Any]) -> dict:
    """Return the controls of an explorer, each set to its value in `begin` or, without one, in `defaults`."""
    controls = {setting: control(setting, values) for setting, values in choices.items()}
    for setting, value in {**defaults, **begin}.items():
        if setting not in controls:
            raise ValueError(f"{setting} is not a control of the {name} explorer: choose from {', '.join(controls)}")
        there = [each[-1] if isinstance(each, tuple) else each for each in choices[setting]]
        if value not in there:
            raise ValueError(f"{setting}={value!r}: choose one of {', '.join(map(str, there))}")
        if isinstance(choices[setting], Mapping):
            controls[setting].label = value
        else:
            controls[setting].value = value
    return controls
