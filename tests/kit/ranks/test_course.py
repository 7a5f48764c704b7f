"""What ranks find imported, and when it is imported anew."""

import shutil
import sys
from pathlib import Path

import pytest

import labs
from labs import clip
from labs.kit.launch import RankError, run
from labs.kit.ranks import team
from labs.kit.ranks.course import COURSE
from labs.kit.ranks.forkserver import Forkserver


def test_what_functions_of_tests_bring_along_is_there_before_the_fork():
    """Where one of these could not be imported there, each rank of each test would take it upon itself."""
    assert run(lambda: set(COURSE) - set(sys.modules), ranks=1) == [set()]


def test_an_edit_of_the_course_is_seen_by_the_next_job(tmp_path, monkeypatch):
    """Also one that does not run, and one that mends it; though the course is imported before the fork."""
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
