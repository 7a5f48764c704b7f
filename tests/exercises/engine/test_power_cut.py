"""Tests of what a power cut may leave, worked out by hand for a few calls (notebook 08)."""

from labs.exercises.checkpoint._power_cut import FlushedDisk


def left(disk):
    """Return the states that a power cut after the last call may leave, each once."""
    return [cut.left for cut in disk.cuts if len(cut.calls) == len(disk.calls)]


def test_a_new_file_has_no_name_yet_or_any_part_of_its_text():
    disk = FlushedDisk({"a": "old"})
    disk.write("b", "text")
    assert left(disk) == [{"a": "old"}, *({"a": "old", "b": text} for text in ("", "te", "text"))]
    assert disk.cuts[0].now == {"a": "old", "b": "text"}


def test_what_is_overwritten_may_be_there_still():
    disk = FlushedDisk({"a": "old"})
    disk.write("a", "text")
    assert left(disk) == [{"a": text} for text in ("old", "", "te", "text")]
    disk.flush("a")
    assert left(disk) == [{"a": "text"}]


def test_names_are_late_and_keep_their_order():
    disk = FlushedDisk({"a": "old"})
    disk.write("b", "")
    disk.rename("b", "a")
    disk.write("c", "")
    assert left(disk) == [{"a": "old"}, {"a": "old", "b": ""}, {"a": ""}, {"a": "", "c": ""}]
    disk.flush_names()
    assert left(disk) == [{"a": "", "c": ""}]


def test_a_name_comes_before_its_text():
    disk = FlushedDisk({})
    disk.write("b", "text")
    disk.rename("b", "a")
    disk.flush_names()
    assert left(disk) == [{"a": text} for text in ("", "te", "text")]


def test_what_was_removed_comes_back_until_the_names_are_flushed():
    disk = FlushedDisk({"a": "old"})
    disk.remove("a")
    assert left(disk) == [{"a": "old"}, {}] and disk.names() == []
    disk.flush_names()
    assert left(disk) == [{}]
