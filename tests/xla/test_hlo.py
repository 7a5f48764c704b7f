"""Tests of labs.xla.hlo with lines as XLA prints them, and groups and bytes worked out by hand."""

import pytest

from labs.mesh.grid import Grid
from labs.xla.hlo import bytes_of, collectives, counted, groups_of

GRID = Grid((2, 2), ("dp", "tp"))
TP, DP, ALL = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("written", "groups", "axis"),
    [
        ("{{0,1},{2,3}}", TP, "tp"),
        ("{{0,2},{1,3}}", DP, "dp"),
        ("{{1,0},{2,3}}", ((1, 0), (2, 3)), "tp"),
        ("{{0,3},{1,2}}", ((0, 3), (1, 2)), ""),
        ("[2,2]<=[4]", TP, "tp"),
        ("[2,2]<=[2,2]T(1,0)", DP, "dp"),
        ("[1,4]<=[4]", ALL, "all"),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_0'}", DP, "dp"),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_1'}", TP, "tp"),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_0','axis_1'}", ALL, "all"),
        ("mesh['axis_0'=4] {'axis_0'}", ALL, "all"),
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}", TP, "tp"),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", DP, "dp"),
    ],
)
def test_groups_in_every_spelling(written, groups, axis):
    [one] = collectives(
        f"  %a.1 = f32[4]{{0}} all-gather(%b), channel_id=1, replica_groups={written}, dimensions={{0}}"
    )
    assert one.groups == groups and one.axis(GRID) == axis


def test_axes_of_a_larger_mesh():
    groups = groups_of("replica_groups=mesh['a'=2,'b'=3,'c'=2] {'a','c'}")
    assert groups == ((0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11))


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-gather", 192),
        ("all-reduce", 384),
        ("reduce-scatter", 768),
        ("all-to-all", 192),
    ],
)
def test_what_a_device_sends_for_a_result_of_256_bytes(kind, sent):
    [one] = collectives(f"ROOT %x = f32[8,8]{{1,0}} {kind}(%y), replica_groups=[1,4]<=[4]")
    assert (one.bytes, one.sent) == (256, sent)


def test_a_permutation_sends_its_bytes_once():
    [one] = collectives("%x = f32[8]{0} collective-permute(%y), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}")
    assert (one.kind, one.sent, one.groups[3]) == ("collective-permute", 32, (3, 0))


def test_several_arrays_that_travel_together_are_one_collective():
    line = "%x = (f32[8]{0}, bf16[2,3]{1,0}, /*index=2*/pred[]) all-reduce(%a, %b, %c), replica_groups={{0,1}}"
    [one] = collectives(line)
    assert one.bytes == 32 + 12 + 1


def test_what_is_no_collective_is_left_out():
    text = """
      %all-gather.1 = f32[4]{0} copy(%x)
      %y = f32[4]{0} add(%all-reduce.1, %all-gather.2)
      %z = f32[4]{0} all-reduce-done(%all-reduce.1), replica_groups={{0,1}}
      %one = f32[4]{0} all-reduce(%x), replica_groups={{0},{1}}
      %s = f32[4]{0} all-reduce-start(%x), replica_groups={{0,1}}
    """
    assert counted(collectives(text)) == {"all-reduce": 1}


@pytest.mark.parametrize("groups", ["", ", replica_groups={}", ", replica_groups=what"])
def test_groups_that_cannot_be_read_are_reported(groups):
    with pytest.raises(ValueError, match="the groups of devices cannot be read in '%x = f32"):
        collectives(f"%x = f32[4]{{0}} all-gather(%y){groups}")


def test_a_dtype_whose_size_is_not_known_is_reported():
    with pytest.raises(ValueError, match=r"the size of f4 in 'f4\[2\]' is not known"):
        bytes_of("f4[2]")
