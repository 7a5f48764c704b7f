"""Tests of what a public course has: a release, forms for reports, and files to run it elsewhere, which are not run."""

import json
import re
import tomllib
from pathlib import Path

import yaml

from tools.site import pages

ROOT = Path(__file__).parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_release_has_one_version_and_one_date():
    version, date = re.search(r"^## (\d\S*) \((\S+)\)$", read("CHANGELOG.md"), re.MULTILINE).groups()
    citation = yaml.safe_load(read("CITATION.cff"))
    assert version == citation["version"] == tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert date == str(citation["date-released"])


def test_the_forms_ask_for_what_a_report_needs():
    asked = {}
    for name in ("report", "wrong_statement"):
        form = yaml.safe_load(read(f".github/ISSUE_TEMPLATE/{name}.yml"))
        needed = [each["attributes"] for each in form["body"] if each.get("validations", {}).get("required")]
        asked[name] = " ".join(f"{each['label']} {each.get('description', '')}" for each in needed)
    assert "The check's line" in asked["report"] and "seed" in asked["report"] and "`make doctor`" in asked["report"]
    assert "The statement" in asked["wrong_statement"] and "how you know" in asked["wrong_statement"]


def test_other_machines_are_set_up_by_the_script_of_the_containers():
    container = json.loads(read(".devcontainer/devcontainer.json"))
    assert container["onCreateCommand"] == "sh containers/setup.sh"
    binder = read(".binder/Dockerfile")
    assert binder.count("sh containers/setup.sh") == 1 and "apt-get" not in binder
    images = [
        re.search(r"^FROM (\S+)", read(f"{folder}/Dockerfile"), re.MULTILINE)[1] for folder in (".binder", "containers")
    ]
    assert {container["image"], *images} == {"debian:13-slim"}


def test_a_published_page_leads_to_machines_that_run_it(tmp_path, monkeypatch):
    def how():
        solved = pages.nbformat.read(ROOT / "solutions/03_ddp.ipynb", as_version=4)
        return pages.page(solved, pages.Site(tmp_path), "03_ddp").cells[1].source

    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert "http" not in how()
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/labs")
    for address in (
        "(https://mybinder.org/v2/gh/somebody/labs/HEAD?urlpath=lab/tree/notebooks/03_ddp.ipynb)",
        "(https://colab.research.google.com/github/somebody/labs/blob/HEAD/notebooks/03_ddp.ipynb)",
        "(https://codespaces.new/somebody/labs)",
    ):
        assert address in how()
