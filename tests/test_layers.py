"""Tests of the layers that the design draws. Imports are read from the source; nothing is executed."""

import re
import sys
from collections import Counter
from graphlib import TopologicalSorter
from importlib import import_module
from itertools import accumulate

import pytest

from tools.imports import EMPTY, FILES, LABS, ROOT, imports, name_of, own

# A chapter is a file or a folder.  Its files import only from lower levels, and from their own folder.
LEVELS = [
    {"rope", "data", "cost", "collectives", "group", "hooks", "dropped", "clip"},
    {"model", "agree"},
    {"generate", "llama", "memory", "mesh", "unaveraged", "optimizer_probe"},
    {"ddp", "dtensor", "zero", "moe"},
    {"fsdp", "tp", "cp", "pp", "gspmd"},
    {"checkpoint", "parallel", "plan", "xla", "deepspeed"},
    {"native"},  # and every file of the kit that is not named below
    {"kit.rows"},
    {"exercises"},
    {
        "kit.beat",
        "kit.check",
        "kit.play",
        "kit.train",
        "kit.commands",
        "kit.simulated.strategy_steps",
        "kit.training.calibration",
        "kit.training.strategies",
        "kit.training.side_by_side",
        "kit.training.expert_steps",
    },
    {"clusters", "__main__"},
]
WAYS_OUT = {"native", "deepspeed", "xla"}  # the same, as others ship it
TEXTBOOK = set().union(*LEVELS[:6]) - WAYS_OUT
# What notebooks import from the kit.
FACES = ("launch", "record", "draw", "play", "check", "beat", "recall", "dry", "train", "sockets")
# A notebook that trains by the same settings as the command line imports the trainer, too, which is above the kit.
TRAINER = {"clusters.settings", "clusters.trainer"}
GENERATED = ("check", "beat")  # their docstrings are made from what they offer
# Other packages that a file may import.
OTHERS = {
    "data": {"datasets"},  # a corpus from a hub, for those online, inside the function that needs it
    "llama.weights": {"safetensors"},  # the format of the weights
    "moe.mixtral": {"safetensors"},
    "checkpoint.saving": {"safetensors"},
    "checkpoint.loading": {"safetensors"},
}


def folder(name: str) -> str:
    return name.split(".")[0]


def is_textbook(name: str) -> bool:
    return folder(name) in TEXTBOOK


def level(name: str) -> int:
    around = {*accumulate(name.split("."), "{}.{}".format)}  # "kit", "kit.rows", "kit.rows.ddp"
    for number, names in enumerate(LEVELS):
        if names & around:
            return number
    assert name.startswith("kit."), f"give labs/{name}.py its level in this test"
    return level("native")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path):
    name = name_of(path)
    for module in own(imports(path)):
        beside = level(module) == level(name) and folder(module) == folder(name)
        entry = name == "__main__" and module.startswith(("kit.", "clusters."))
        assert level(module) < level(name) or beside or entry, f"{name} imports {module}, which is not below it"


def test_no_import_goes_in_a_circle():
    """Check lazy imports, too: an import inside a function couples two files as much as one at their top."""
    TopologicalSorter({name_of(path): own(imports(path)) for path in FILES}).prepare()


@pytest.mark.parametrize("path", [path for path in FILES if is_textbook(name_of(path))], ids=name_of)
def test_a_textbook_file_needs_torch_and_files_below_only(path):
    modules = imports(path)
    assert all(map(is_textbook, own(modules))), "a textbook file never imports the kit or native: it can be copied out"
    others = {module.split(".")[0] for module in modules} - {"labs", "torch"} - sys.stdlib_module_names
    others -= OTHERS.get(name_of(path), set())
    assert not others, f"a textbook file needs torch and the standard library only, not {others}"


def test_only_xla_needs_jax():
    """Check JAX, which is not installed with the course."""
    anywhere, needs = (
        {name_of(path) for path in FILES if "jax" in {module.split(".")[0] for module in imports(path, at_top)}}
        for at_top in (False, True)
    )
    assert {folder(name) for name in needs} == {"xla"}
    in_another_process = {
        "kit.extras.jax_devices",
        *(f"exercises.gspmd.{name}" for name in ("fewest_bytes", "pipelined", "sharded_gradients")),
    }
    assert anywhere - needs == in_another_process
    for path in FILES:
        assert not (own(imports(path, at_top=True)) & needs) or name_of(path) in needs, f"{path} cannot do without JAX"


def test_the_map_names_every_chapter_after_what_it_imports():
    outline = (LABS / "__init__.py").read_text(encoding="utf-8")
    order = re.findall(r"^    (\w+)  ", outline, re.MULTILINE)
    assert set(order) == TEXTBOOK | WAYS_OUT
    for path in FILES:
        if (name := folder(name_of(path))) in TEXTBOOK:
            below = {folder(module) for module in own(imports(path))}
            assert all(order.index(each) <= order.index(name) for each in below), f"{path.name}: {below}"


def test_an_outline_names_every_file_of_its_chapter():
    for outline in (path for path in LABS.glob("*/__init__.py") if folder(name_of(path)) in TEXTBOOK | WAYS_OUT):
        named = re.findall(r"^    (\w+)  ", outline.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(named) >= {path.stem for path in outline.parent.glob("*.py")} - {"__init__"}, outline


def test_only_the_faces_stand_directly_in_the_kit():
    assert {path.stem for path in (LABS / "kit").glob("*.py")} == {*FACES, "__init__"}


@pytest.mark.parametrize("name", FACES)
def test_a_face_lists_what_it_offers(name):
    """Compare `__all__` with the first list of the docstring, in which names stand before two spaces or a bracket."""
    face = import_module(f"labs.kit.{name}")
    lists = re.findall(r"(?:^    .*\n)+", face.__doc__, re.MULTILINE)
    if name in GENERATED:  # a row for each notebook, below the text
        listed = {"ALL", "Answer", "predict", "course_map", *re.findall(r"\w+(?=,|\n)", lists[-1])}
        assert {*face.__all__} <= listed
    else:
        rows = re.findall(r"^    (.*?)(?:  |\()", lists[0], re.MULTILINE)
        assert sorted(", ".join(rows).split(", ")) == sorted(face.__all__)
    assert all(hasattr(face, each) for each in face.__all__)


@pytest.mark.parametrize("path", sorted((ROOT / "solutions").glob("*.py")), ids=lambda path: path.stem)
def test_a_notebook_imports_the_textbook_other_peoples_ways_and_the_faces(path):
    for module in own(imports(path)):
        face = module.removeprefix("kit.")
        offered = folder(module) in TEXTBOOK | WAYS_OUT or module in TRAINER or (module != face and face in FACES)
        assert offered, f"{path.name}: labs.{module}"


def test_no_two_files_share_a_name():
    """An exercise bears the name of the learner's function, and may share it with a file of the textbook."""
    stems = Counter(path.stem for path in FILES if path.stem != "__init__" and folder(name_of(path)) != "exercises")
    assert [stem for stem, files in stems.items() if files > 1] == []


def test_contributing_draws_the_same_layers():
    text = (LABS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^    (\d+) +(.*)", text, re.MULTILINE)
    drawn = {name: int(number) for number, names in rows for name in re.sub(r"\(.*?\)", "", names).split()}
    assert all(level(name) == number for name, number in drawn.items())
    assert not (missing := set().union(*LEVELS) - drawn.keys()), f"CONTRIBUTING.md does not draw {missing}"


def test_the_package_itself_imports_nothing():
    assert not any(imports(path) for path in EMPTY)
