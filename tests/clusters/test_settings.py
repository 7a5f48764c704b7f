"""Tests of the settings of a training: files, flags, meshes, and the sentence for what cannot be."""

import dataclasses
from pathlib import Path

import pytest

from labs.clusters.settings import Settings, read

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_file_in_configs_is_a_training_that_can_be(path):
    settings = read(path)
    assert settings.axes()
    assert settings.strategy == path.stem or path.stem.startswith("llama3")


def test_flags_are_stronger_than_the_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('strategy = "zero-2"\nsteps = 7\n[optimizer]\nbetas = [0.8, 0.9]\nwarmup = 3\n')
    settings = read(path, ["--steps", "9", "--optimizer.lr", "0.5"])
    assert (settings.strategy, settings.steps, settings.optimizer.betas) == ("zero-2", 9, (0.8, 0.9))
    assert (settings.optimizer.warmup, settings.optimizer.lr) == (3, 0.5)


def test_the_mesh_names_the_strategy():
    named = {
        "dp=4": ("fsdp", {"dp": 4}),
        "replicate=2,shard=2": ("hsdp", {"replicate": 2, "shard": 2}),
        "pp=2,dp=2": ("pp-fsdp", {"pp": 2, "replicate": 1, "shard": 2, "tp": 1}),
        "pp=2,dp=2,tp=2": ("pp-fsdp-tp", {"pp": 2, "replicate": 1, "shard": 2, "tp": 2}),
    }
    for mesh, (name, axes) in named.items():
        settings = Settings(mesh=mesh)
        assert (settings.row.name, settings.axes()) == (name, axes)
    assert Settings().row.name == "fsdp"
    assert Settings(precision="bfloat16").row.name == "fsdp-bf16"


REFUSED = [
    ({"strategy": "fsdb"}, "strategy 'fsdb' is not known: the nearest is 'fsdp'"),
    ({"model": "llama2-7b"}, "model 'llama2-7b' is not known: the nearest is 'llama3-8b'"),
    ({"schedule": "2f2b"}, "schedule '2f2b' is not known: the nearest is '1f1b'"),
    ({"steps": 0}, "steps is 0: give 1 or more"),
    ({"context": 65}, "context is 65, and the model's is 64: give that or less"),
    ({"batch": 6}, "a batch of 6 is not divisible by 4 parts of 1 micro-batches: take 8"),
    ({"strategy": "fsdp", "mesh": "tp=4"}, "fsdp has the axes dp, not tp: choose a strategy with these axes, tp"),
    ({"mesh": "dp=2"}, "mesh dp=2 has 2 ranks, not 4"),
    ({"strategy": "tp"}, "4 ranks were started, and tp takes tp=2: start as many, or --mesh"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_cannot_be_is_refused_in_a_sentence(fields, sentence):
    with pytest.raises(ValueError) as error:
        Settings(**fields).axes(ranks=4)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("stepz = 3", "'stepz', which is no setting: the nearest is 'steps'"), ("steps 3", "is not TOML")],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, sentence):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path / "a.toml")


def test_each_setting_of_the_toml_reaches_a_flag(tmp_path):
    """Every field, also of the inner tables, can stand in a file."""
    default = Settings(data=tmp_path, report=tmp_path)
    lines, tables = [], []
    for key, value in dataclasses.asdict(default).items():
        if isinstance(value, dict):
            tables += [f"[{key}]", *(line(*pair) for pair in value.items())]
        else:
            lines.append(line(key, value))
    (tmp_path / "all.toml").write_text("\n".join([*lines, *tables]))
    assert read(tmp_path / "all.toml") == default


def line(key: str, value: object) -> str:
    plain = str(value) if isinstance(value, Path) else value
    return f"{key} = {list(plain) if isinstance(plain, tuple) else repr(plain)}"
