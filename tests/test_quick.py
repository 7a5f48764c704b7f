"""tools.quick: which tests a change can have touched."""

from tools.quick import ROOT, chosen_for


def names(*paths):
    return [path.stem for path in chosen_for({ROOT / path for path in paths})]


def test_a_files_tests_are_those_of_its_chapter_and_those_that_import_it():
    assert names("labs/fsdp/order.py") == ["test_fsdp"]
    assert names("labs/dtensor/rules.py") == ["test_algebra", "test_dtensor"]
    assert {"test_launch", "test_ranks"} <= {*names("labs/kit/ranks/team.py")}


def test_a_changed_test_is_run_and_prose_runs_nothing():
    assert names("tests/test_data.py", "README.md", "labs/kit/recall.md") == ["test_data"]
