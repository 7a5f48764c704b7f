"""What `make learn` asks of Jupyter: that to open and save an untouched notebook changes no line of it.
jupyter_nbconvert_config.py has what it asks of a page that is exported.

JupyterLab notes in each notebook which Python it was saved with; here, every notebook says "python".
(Beside this file, labconfig switches off a box that asks, over the first notebook, whether to fetch news.)
"""

import warnings

# Jupyter reads this file several times, and the hook of the second time is another function to it.
warnings.filterwarnings("ignore", "Overriding existing pre_save_hook", UserWarning)


def say_python(model: dict, **_) -> None:
    if model["type"] == "notebook":
        model["content"]["metadata"]["language_info"] = {"name": "python"}


c.ContentsManager.pre_save_hook = say_python  # noqa: F821  (Jupyter defines c)
load_subconfig("jupyter_nbconvert_config.py")  # noqa: F821  (and this)
