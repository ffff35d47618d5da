"""The documentation's figures come from the functions they show: the script runs, and shows what it says."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
SCRIPT = Path(__file__).parents[2] / "docs" / "draw_clip_regions.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("draw_clip_regions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_are_drawn(script, tmp_path):
    script.draw_regions(tmp_path / "regions.png", resolution=8)
    script.draw_profiles(tmp_path / "profiles.png")
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


def test_the_garbled_corner_is_open_in_grpo_and_closed_in_tbpo(script):
    old, new = torch.tensor([0.02]), torch.tensor([0.05])
    open_corner = script.gradient_size(*script.PANELS["GRPO"], old, new, -1.0)
    closed_corner = script.gradient_size(*script.PANELS["TBPO = GSPO + dual clip"], old, new, -1.0)
    assert open_corner.item() == pytest.approx(2.5, rel=1e-5)
    assert closed_corner.item() == 0
