"""A test of the course's batch script without Slurm: it runs as in the check of the exercise, which sends it USR1."""

from pathlib import Path

from labs.exercises.clusters._rehearsal import rehearsed

SCRIPT = Path(__file__).parents[2] / "labs" / "clusters" / "train.sbatch"


def test_the_courses_script_survives_its_signal_and_would_not_without_its_trap():
    text = SCRIPT.read_text()
    seen = rehearsed(text, ["n1", "n2"], "n[1-2]")
    assert (seen.status, seen.flaw, len(seen.starts)) == (0, "", 2), seen
    assert rehearsed(text.replace("trap '", ": '"), ["n1", "n2"], "n[1-2]").flaw == "killed"
