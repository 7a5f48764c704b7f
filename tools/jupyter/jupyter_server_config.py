"""Settings of Jupyter for `make learn`: opening and saving an untouched notebook changes no line of it.

jupyter_nbconvert_config.py has the settings for pages that are exported.  JupyterLab notes in each notebook which
Python saved it; here, every notebook says "python".  Beside this file, labconfig switches off a box that asks, over the
first notebook, whether to fetch news.
"""

import warnings

# Jupyter reads this file several times, and each time it warns that the hook is another function.
warnings.filterwarnings("ignore", "Overriding existing pre_save_hook", UserWarning)


def say_python(model: dict, **_) -> None:
    if model["type"] == "notebook":
        model["content"]["metadata"]["language_info"] = {"name": "python"}


c.ContentsManager.pre_save_hook = say_python  # noqa: F821  (Jupyter defines c)
load_subconfig("jupyter_nbconvert_config.py")  # noqa: F821  (and this)
