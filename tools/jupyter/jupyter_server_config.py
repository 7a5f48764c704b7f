"""What `make learn` asks of Jupyter: saving an untouched notebook changes no line of it, and no popup covers a page.

JupyterLab notes in each notebook which Python it was saved with; here, every notebook says "python".
"""

# ruff: noqa: F821  (Jupyter defines c)


def say_python(model: dict, **_) -> None:
    if model["type"] == "notebook":
        model["content"]["metadata"]["language_info"] = {"name": "python"}


c.ContentsManager.pre_save_hook = say_python
# Or it asks, over the first notebook, whether to fetch news, and tells of newer versions.
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
