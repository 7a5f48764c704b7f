"""A JupyterHub for a class: its settings, and a script that plays learners who work at once."""
