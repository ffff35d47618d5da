"""Every shipped recipe is a valid run, and says in its first line what it is for."""

from pathlib import Path

import pytest

from lowbitrl.config import load_config

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_loads_and_writes_to_a_folder_of_its_own(path):
    config = load_config(path)
    assert config.out == f"runs/{path.stem}"
    assert path.read_text().startswith("# ")


def test_the_promised_recipes_ship():
    assert {"bf16", "naive-nvfp4", "quads", "qarl-fp8", "int4-tbpo", "demo-quads", "demo-naive"} <= {
        p.stem for p in RECIPES
    }


def test_the_two_demo_runs_differ_in_alignment_alone():
    quads, naive = (load_config(RECIPES[0].parent / f"demo-{n}.toml") for n in ("quads", "naive"))
    assert quads.model_copy(update={"recipe": naive.recipe, "out": naive.out}) == naive
    assert (naive.recipe.learner, naive.recipe.residual) == ("bf16", 0.0)
    assert (quads.recipe.learner, quads.recipe.residual) == ("weights", 0.5)
