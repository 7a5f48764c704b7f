"""nbgrader's settings for the course in marking/: the judge's verdicts take the place of running a notebook.

`verdicts/<learner>/<notebook>.json` has the points and the words for each marked cell.  nbgrader stores the points in
its gradebook, and shows the words in the feedback.
"""

import json
from pathlib import Path

from nbconvert.preprocessors import ClearMetadataPreprocessor
from nbformat.v4 import new_output
from nbgrader import preprocessors as theirs
from nbgrader.preprocessors import NbGraderPreprocessor


class Verdicts(NbGraderPreprocessor):
    """A preprocessor that puts each verdict below its marked cell, as if the cell had been run."""

    def preprocess(self, nb, resources):
        where = resources["nbgrader"]
        verdicts = json.loads(Path("verdicts", where["student"], f"{where['assignment']}.json").read_text("utf-8"))
        for number, cell in enumerate(nb.cells, 1):
            grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
            if verdict := verdicts.get(grade_id):
                points = {"text/plain": str(verdict["points"])}
                cell.execution_count = number
                cell.outputs = [
                    new_output("stream", name="stdout", text="\n".join([*verdict["lines"], ""])),
                    new_output("execute_result", points, execution_count=number),
                ]
        return nb, resources


c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "labs"
c.Autograde.autograde_preprocessors = [
    Verdicts,
    ClearMetadataPreprocessor,
    theirs.SaveAutoGrades,
    theirs.AssignLatePenalties,
    theirs.CheckCellMetadata,
]
c.GenerateAssignment.preprocessors = [
    theirs.LockCells,
    theirs.ClearOutput,
    theirs.CheckCellMetadata,
    theirs.ComputeChecksums,
    theirs.SaveCells,
]
