"""The listing of settings is complete and docs/settings.md is what it prints; snippets of the docs compile."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from lowbitrl.loop import train
from lowbitrl.runs import read_metrics
from lowbitrl.settings import markdown, sections, settings
from tests.tiny_run import config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [(p.name, code) for p in PAGES for code in re.findall(r"```python\n(.*?)```", p.read_text(), re.S)]


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == markdown(), "run: lowbitrl settings --markdown > docs/settings.md"


@pytest.mark.parametrize("section", sections())
def test_every_setting_has_a_meaning_and_a_type(section):
    listed = settings(section)
    assert listed
    for setting in listed:
        assert setting.meaning, setting.name
        assert setting.type, setting.name


def test_an_unknown_section_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'rollout'"):
        settings("rolout")


@pytest.mark.parametrize(("page", "code"), SNIPPETS)
def test_snippets_compile_and_import_what_exists(page, code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("lowbitrl"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), (page, node.module)


def test_the_guide_or_the_page_on_faults_names_every_metric_of_a_run(tmp_path):
    logged = {key for line in read_metrics(train(config(tmp_path), say=lambda line: None)) for key in line}
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("guide.md", "faults.md"))
    named = set(re.findall(r"`([\w/@]+)`", pages))
    named |= {"step", "reward/reward", "eval/score/reward"}  # NAME stands for a scorer
    generic = {
        re.sub(r"(pass@)(?!1\b)\d+|(avg@)\d+", lambda m: (m[1] and "pass@K") or "avg@N", key)
        for key in logged
    }
    assert {key.removesuffix("_error") if key.startswith("eval/") else key for key in generic} <= named
