"""The README's snippet is what it claims to be: it runs, and alignment shrinks the mismatch it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPET = re.search(r"```python\n(.*?)```", README, re.S).group(1)


def test_snippet_is_short():
    assert (
        len([line for line in SNIPPET.splitlines() if line and not line.startswith(("from", "import"))]) <= 12
    )


def test_links_and_figures_exist():
    root = Path(__file__).parents[1]
    prose = re.sub(r"```.*?```", "", README, flags=re.S)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", prose):
        assert (root / target).exists(), target


@pytest.mark.demo
@pytest.mark.slow
def test_snippet_prints_a_mismatch_that_shrinks():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(SNIPPET, {})
    naive, aligned = (float(value) for value in re.findall(r"mean ([\d.]+)", printed.getvalue()))
    assert naive > 1.7 * aligned
