"""Tests of the notebooks against the sources in solutions/, and the design's template. nbval runs the notebooks."""

import re

import pytest

from tools import notebooks, rules

SOURCES = notebooks.sources(notebooks.ROOT)
STRATEGIES = [source for source in SOURCES if int(source.stem[:2]) >= 2]
LEAN = ["09b", "11", "12b", "13", "14", "15"]  # notebooks whose helper code is in the kit
HELPERS = 160  # lines of code in cells that are neither an exercise nor the subject of their section
PAGES = sorted([*notebooks.ROOT.glob("*.md"), *notebooks.ROOT.glob("teaching/*.md")])
FIVE_MINUTES = 1000  # words, at the 200 per minute of tools/minutes.py


def shown(text: str) -> str:
    """Return what the comparison of outputs sees of a text."""
    return notebooks.without_noise(text)


def test_the_notebooks_are_what_their_sources_say():
    assert notebooks.check() == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_have_no_dead_link_and_no_open_figure(page):
    text = page.read_text(encoding="utf-8")
    assert list(rules.broken_prose(text, page.parent)) == []
    assert re.findall("<<.*?>>", text) == []


def test_a_teacher_reads_the_page_for_teachers_in_five_minutes():
    assert len((notebooks.ROOT / "TEACHING.md").read_text(encoding="utf-8").split()) <= FIVE_MINUTES


def test_the_readme_lists_the_notebooks_that_exist():
    listed = re.findall(r"\(notebooks/(\w+)\.ipynb\)", (notebooks.ROOT / "README.md").read_text(encoding="utf-8"))
    assert set(listed) == {source.stem for source in SOURCES}


@pytest.mark.parametrize("source", STRATEGIES, ids=lambda source: source.stem)
def test_a_strategy_has_at_least_two_exercises(source):
    solved = notebooks.read(source)
    exercises = sum(cell.source.count("### BEGIN SOLUTION") for cell in notebooks.code_cells(solved))
    assert exercises >= 2


@pytest.mark.parametrize("number", LEAN)
def test_helper_code_is_in_the_kit(number):
    (source,) = notebooks.sources(notebooks.ROOT, [number])
    cells = notebooks.code_cells(notebooks.read(source))
    helpers = [cell for cell in cells if not {"subject", "exercise"} & {*cell.metadata.get("tags", ())}]
    assert sum(bool(line.strip()) for cell in helpers for line in cell.source.splitlines()) <= HELPERS
    assert not [cell.source for cell in cells if "_flatten()" in cell.source or 'removeprefix("mesh_")' in cell.source]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_says_what_it_needs_and_how_to_reset_it(source):
    cells = notebooks.read(source).cells
    assert cells[0].cell_type == cells[-1].cell_type == "markdown"
    assert all(re.search(need, cells[0].source) for need in (r"Minutes\*\*, by estimate: \d+", r"\d+ [MG]i?B"))
    assert f"git restore notebooks/{source.stem}.ipynb" in cells[-1].source


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_asks_of_those_before_it_and_leads_to_the_next(source):
    cells, number = notebooks.read(source).cells, SOURCES.index(source)
    if number:
        assert cells[1].source.endswith('recall.ask("{}")'.format(source.stem.partition("_")[0]))
    words = cells[-1].source.split("**Next.**")[1]
    assert source == SOURCES[-1] or f"]({SOURCES[number + 1].stem}.ipynb)" in words


def test_the_last_notebook_asks_ten_across_all():
    assert "recall.ten()" in [cell.source for cell in notebooks.code_cells(notebooks.read(SOURCES[-1]))]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("done in 0.31 s", "done in 12.5 s"),
        ("took 12 ms", "took 1,450.2 ms"),
        ("<td>3.1 ms</td>", "<td>4 ms</td>"),
        ("loss 2.417", "loss 2.5"),
        ("Loss: 2.417e-1", "Loss: 0.3"),
        ("loss=2.4", "loss=2.6"),
        ("3.21 nats", "3.2 nats"),
        ("sha256 3f9a0c11", "sha256 99ab12cd"),
        ("sha256=3f9a0c11", "sha256=99ab12cd"),
        ("library of Python 3.11: 11,066,182 bytes,", "library of Python 3.13: 9,066,182 bytes,"),
        ("torch 2.13.0+cpu", "torch 2.11.0"),
        ("8.1 GB/s", "12 GB/s"),
        ("1,200 tokens/s", "900.5 tokens/s"),
        ("1.07 × torch's time", "1.12 × torch's time"),
        ("21 × quicker", "34.5 × quicker"),
        ("pid 123", "pid 4567"),
        ("http://127.0.0.1:8888/", "http://127.0.0.1:9999/"),
        ("<f at 0x7f00aa11bb22>", "<f at 0x7f00aa11bb33>"),
        ("ipykernel_12/345.py", "ipykernel_99/1.py"),
        ("12.5\N{NO-BREAK SPACE}ms", "3\N{NO-BREAK SPACE}s"),
        (
            '<img alt="2 &gt; 1" src="data:image/png;base64,AA==">',
            '<img alt="3 &gt; 1" src="data:image/png;base64,BB==">',
        ),
        ("100%|###| 3/3 [00:01<00:00,  2.1it/s]", "100%|###| 3/3 [00:02<00:00,  1.9it/s]"),
    ],
)
def test_noise_is_not_compared(one, other):
    assert shown(one) == shown(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("sent 1,234 bytes", "sent 1,236 bytes"),
        ("held 3.1 MiB", "held 3.2 MiB"),
        ("2.1 GB", "2.2 GB"),
        ("4 ranks, 3 steps", "4 ranks, 4 steps"),
        ("20 buckets", "21 buckets"),
        ("shape (4, 64)", "shape (4, 65)"),
        ("✓ averaged", "✗ averaged"),
        ("you sent 1.50 × the tensor", "you sent 2.00 × the tensor"),
        ("you sent 1.50 × the tensor in less time", "you sent 2.00 × the tensor in less time"),
        ("largest difference 0.0", "largest difference 1e-3"),
        ("0.2M parameters", "0.8M parameters"),
        ('<img alt="a" src="data:image/svg+xml;base64,AA==">', '<img alt="a" src="data:image/svg+xml;base64,BB==">'),
        ('<img src="data:image/png;base64,AA=="> ✓', '<img src="data:image/png;base64,AA=="> ✗'),
        ('✓ <img src="data:image/png;base64,AA==">', '✗ <img src="data:image/png;base64,AA==">'),
        ("KeyError: 'weight'", "KeyError: 'bias'"),
        ("405,000,000,000", "405,000,000,001"),
    ],
)
def test_verdicts_counts_bytes_and_shapes_are_compared(one, other):
    assert shown(one) != shown(other)
