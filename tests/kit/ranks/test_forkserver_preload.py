"""Tests of the modules that ranks find imported, and of their new import after an edit."""

import shutil
import sys
from pathlib import Path

import pytest

import labs
from labs import clip
from labs.kit.launch import RankError, run
from labs.kit.ranks import team
from labs.kit.ranks.forkserver import Forkserver
from labs.kit.ranks.forkserver_preload import COURSE


def test_what_functions_of_tests_bring_along_is_there_before_the_fork():
    """Check that the imports succeed before the fork: otherwise each rank of each test would import them itself."""
    assert run(lambda: set(COURSE) - set(sys.modules), ranks=1) == [set()]


def test_an_edit_of_the_course_is_seen_by_the_next_job(tmp_path, monkeypatch):
    """Edit the course so that it does not run, and mend it; though the course is imported before the fork."""
    file = tmp_path / "labs" / "clip.py"
    shutil.copytree(Path(labs.__file__).parent, file.parent)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(team, "FORKSERVER", Forkserver())

    def outline():
        before = "labs.clip" in sys.modules
        from labs import clip

        return before, clip.__doc__

    def write(text):
        file.write_text(text)
        return run(outline, ranks=1)[0]

    text = file.read_text()
    assert run(outline, ranks=1) == [(True, clip.__doc__)]
    assert write('"""Another."""') == (False, "Another.")
    with pytest.raises(RankError, match="SyntaxError"):
        write("def")
    assert write(text) == (False, clip.__doc__)
    team.FORKSERVER.stop()
