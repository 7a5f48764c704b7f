-- A module file of Lmod: the course in one folder that all nodes see, set up there by `make learn` (not run).
help("Training large models across many devices: notebooks, and `python -m labs`")
whatis("Name: labs")
local course = "/shared/labs"
prepend_path("PATH", pathJoin(course, ".venv/bin"))
setenv("LABS_COURSE", course)
