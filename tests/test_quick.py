"""Tests of tools.quick: the tests that a change can affect."""

import pytest

from tools import quick
from tools.quick import ROOT, TESTS, changed, runs_for


def runs(*paths):
    """Return the runs, with paths below tests/."""
    return [[word.removeprefix(f"{TESTS}/") for word in run] for run in runs_for({ROOT / path for path in paths})]


def test_a_change_reaches_what_is_built_on_it():
    [order, _] = runs("labs/fsdp/order.py")
    assert "fsdp/test_order.py" in order and not any(name.startswith("zero/") for name in order)
    [group, rows] = runs("labs/group.py")
    folders = {name.split("/")[0] for name in group}
    assert folders >= {"zero", "fsdp", "tp", "pp", "checkpoint"} and "test_parallel.py" in folders
    assert rows[-1] == "cp or ddp or fsdp or hsdp or pp- or tp or zero"


def test_a_file_of_the_kit_has_the_tests_of_its_folder():
    assert runs("labs/kit/draw.py") == [["kit/test_draw.py", "test_layers.py"]]
    [[*team, _]] = runs("labs/kit/ranks/team.py")
    assert team and all(name.startswith("kit/ranks/") for name in team)


def test_an_exercise_has_all_its_answers():
    for path in ("labs/exercises/resume/interval.py", "tests/exercises/resume/interval.py"):
        assert runs(path)[1] == ["exercises/engine/test_answers.py", "-m", "depth or soak", "-k", "[interval]"]


def test_the_engine_of_the_exercises_has_all_exercises():
    assert "exercises/engine/test_answers.py" in runs("labs/exercises/engine/scripts.py")[0]


def test_a_changed_test_is_run_and_prose_runs_nothing():
    assert runs("tests/mesh/test_mesh.py", "README.md", "labs/kit/recall.md") == [
        ["mesh/test_mesh.py", "test_layers.py"]
    ]


def test_a_notebooks_source_runs_both_notebooks():
    assert runs("solutions/03_ddp.py")[1][-2:] == ["solutions/03_ddp.ipynb", "notebooks/03_ddp.ipynb"]


def test_the_tests_have_the_folders_of_the_package():
    inside = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py") if path.parent != TESTS]
    assert [str(path) for path in inside if not (ROOT / "labs" / path.parent).is_dir()] == []


def test_a_copy_without_git_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(quick, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"since HEAD: not a git repository .* `make test` needs no git"):
        changed("HEAD")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this copy has no git")
def test_an_unknown_commit_is_refused():
    with pytest.raises(SystemExit, match="since no-such-commit: Needed a single revision"):
        changed("no-such-commit")
