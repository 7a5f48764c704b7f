"""Sphinx's settings for the site.  A page loads nothing from elsewhere: no script, no font, no picture."""

from pathlib import Path

import imagesize
from docutils.nodes import SkipNode, image
from latex2mathml.converter import convert

project = "Training labs"
html_title = "Training labs"
copyright = "the course's contributors, MIT licence"
language = "en"

extensions = ["myst_nb"]
nb_execution_mode = "off"  # pages show the stored outputs
nb_merge_streams = True
nb_ipywidgets_js = {}  # every widget has left its picture
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4
highlight_language = "python"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js", ("explorer.js", {"defer": "defer"})]
html_favicon = "static/icon.svg"
html_use_index = False  # there are no terms to list
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_math_renderer = "mathml"  # which browsers draw by themselves


def setup(app):
    app.add_html_math_renderer("mathml", (formula("inline"), None), (formula("block"), None))
    app.connect("doctree-read", give_pictures_a_size)
    app.connect("html-page-context", give_captions_a_level, priority=900)  # after the theme's own


def formula(display):
    """Return what Sphinx calls for each formula: write it as MathML, and skip its text."""

    def visit(writer, node):
        writer.body.append(convert(node.astext(), display=display))
        raise SkipNode

    return visit


def give_captions_a_level(app, page, template, context, tree):
    """Tell screen readers the level of the headings in the navigation, which Sphinx leaves out."""
    navigation = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = navigation.replace('role="heading"', 'role="heading" aria-level="2"')


def give_pictures_a_size(app, tree):
    """Tell browsers the size of each drawing, so that the text below stays where it is when the drawing arrives."""
    for drawing in tree.findall(image):
        if drawing["uri"].endswith(".svg"):
            drawing["width"], drawing["height"] = map(str, imagesize.get(Path(app.srcdir, drawing["uri"])))
