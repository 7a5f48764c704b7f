"""Tests of tools.quick: the tests that a change can affect."""

import pytest

from tools import quick
from tools.quick import ROOT, TESTS, changed, chosen_for


def names(*paths):
    return [str(path.relative_to(TESTS)) for path in chosen_for({ROOT / path for path in paths})]


def test_a_files_tests_are_those_of_its_folder_or_those_named_after_it():
    assert names("labs/fsdp/order.py", "labs/fsdp/fsdp.py") == ["fsdp"]
    assert names("labs/clip.py", "labs/kit/draw.py") == ["kit/test_draw.py", "test_clip.py"]
    assert names("labs/kit/ranks/team.py") == ["kit/ranks"]


def test_a_changed_test_is_run_and_prose_runs_nothing():
    assert names("tests/mesh/test_mesh.py", "README.md", "labs/kit/recall.md") == ["mesh/test_mesh.py"]


def test_the_tests_have_the_folders_of_the_textbook():
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
