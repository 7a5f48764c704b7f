"""Tests of every picture: it is as its snapshot, says what it shows, and its words are legible.

Whether words fit is told by the metrics of DejaVu Sans, the widest of the usual fonts.
"""

import base64
import difflib
import re
import xml.etree.ElementTree as xml

import pytest

from tests.kit.drawing import gallery
from tests.kit.pictures import SVG, require_legible
from tools import images

IMAGES = {picture.__name__: picture for picture in images.PICTURES}


@pytest.mark.parametrize("name", [*gallery.DRAWINGS, *gallery.FIGURES])
def test_a_picture_is_as_its_snapshot(name):
    kept, now = gallery.path_of(name).read_text(encoding="utf-8"), gallery.snapshot(name)
    changes = "\n".join(difflib.unified_diff(kept.splitlines(), now.splitlines(), "snapshot", "now", lineterm="", n=0))
    assert not changes, f"{name!r} has changed; if it is meant, python -m tests.kit.drawing.gallery {name!r}\n{changes}"


def test_every_snapshot_has_its_picture():
    assert {*gallery.SNAPSHOTS.iterdir()} == {*map(gallery.path_of, [*gallery.DRAWINGS, *gallery.FIGURES])}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_up_to_date(name):
    kept = (images.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == IMAGES[name]().svg, "run `make images`"


@pytest.mark.parametrize("name", gallery.DRAWINGS | IMAGES)
def test_a_drawing_stands_alone_and_is_legible(name):
    """Check an <img>:

    JupyterLab shows neither image/svg+xml nor <svg> of an untrusted notebook (test_browser sees to that).
    """
    drawing = (gallery.DRAWINGS | IMAGES)[name]()
    image = xml.fromstring(re.match("<img .*?>", drawing.html)[0].replace('">', '"/>'))
    kind, data = image.get("src").split(",")
    assert kind == "data:image/svg+xml;base64" and base64.b64decode(data).decode() == drawing.svg
    assert "max-width:" in image.get("style")
    root = xml.fromstring(drawing.svg)
    title, description = root.find(f"{SVG}title").text.strip(), root.find(f"{SVG}desc").text.split()
    assert image.get("alt").startswith(title) and image.get("alt").endswith(description[-1])
    assert root.get("role") == "img" and drawing.text and str(drawing) == drawing.text
    assert not [element for element in root.iter() if element.get("id") or element.get("href")]
    assert not list(root.iter(f"{SVG}style")) and not list(root.iter(f"{SVG}script"))
    require_legible(drawing)
    assert min(float(text.get("font-size")) for text in root.iter(f"{SVG}text")) >= 10
