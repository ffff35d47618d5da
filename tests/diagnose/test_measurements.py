"""Table and recommendation, amplification, per-layer and per-channel figures, layers to keep, positions."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowbitrl.diagnose import amplification, keep, positions, probes, table
from lowbitrl.diagnose.lab import Drawn, Lab
from lowbitrl.diagnose.statistics import Estimate
from lowbitrl.formats import get_format
from lowbitrl.quant import Recipe, attachment, resolve
from lowbitrl.rollout import Completion
from tests.diagnose.lab_helpers import bench, load
from tests.diagnose.test_telescoping_chain import load_moe
from tests.moe_models import tiny_moe

W4A4 = Recipe(rollout="nvfp4", learner="weights")
REPAIRED = replace(W4A4, residual=0.5)


@pytest.fixture(scope="module")
def lab():
    return bench(W4A4).lab()


def candidate(learner, residual, values):
    recipe = Recipe(rollout="nvfp4", learner=learner, residual=residual)
    diffs = [torch.full((4,), v) for v in values]
    return table.Candidate(recipe, table.bootstrap([d.abs() for d in diffs]), diffs, residual)


def test_the_floor_is_lower_than_any_quantized_cell_and_the_grid_has_every_pair(lab):
    cells = table.grid(lab, W4A4)
    names = ["bf16", "nvfp4-w4a16", "nvfp4-w16a4", "nvfp4"]
    assert [(c["learner"], c["rollout"]) for c in cells] == [(a, n) for a in table.ALIGNMENTS for n in names]
    means = {(c["learner"], c["rollout"]): c["mean"] for c in cells}
    assert means["bf16", "bf16"] == pytest.approx(table.floor(lab).value, rel=1e-5)
    assert means["bf16", "bf16"] < 0.1 * means["bf16", "nvfp4"]
    # The diagonal of weights is the floor again: aligned weights cost nothing.
    assert means["weights", "nvfp4-w4a16"] < 2 * means["bf16", "bf16"]


def test_the_recommendation_wins_when_the_same_tokens_are_scored_again(lab):
    candidates = table.measure_all(lab, table.variants(W4A4))
    chosen = table.recommend(candidates)
    again = Lab(load, lab.drawn)
    means = {c.name: table.measure_all(again, [c.recipe])[0].mean.value for c in candidates}
    assert means[chosen.name] == pytest.approx(chosen.mean.value)
    tolerance = chosen.mean.high - chosen.mean.low
    assert means[chosen.name] <= min(means.values()) + tolerance
    assert means[chosen.name] < means["nvfp4, bf16"]


def test_the_cheaper_of_two_equals_is_recommended_and_the_closer_of_two_unequals():
    near, far = [0.1, 0.2, 0.1, 0.2], [0.4, 0.5, 0.4, 0.5]
    cheap, dear, naive = (
        candidate("weights", 0.25, near),
        candidate("weights", 1.0, near),
        candidate("bf16", 0.0, far),
    )
    assert table.recommend([naive, dear, cheap]) is cheap
    assert table.recommend([naive, dear]) is dear
    full = candidate("full", 1.0, [0.1, 0.2, 0.1, 0.19])
    assert table.recommend([naive, dear, full]) is dear
    assert table.recommend([naive, full]) is full
    words = table.reasons(dear, [naive, dear], Estimate(0.1, 0.1, 0.1), {})
    assert "1.5x the floor" in words[0]
    assert "100% more activation work" in words[0]
    assert "nvfp4, bf16 would be worse here: 0.4500 nats, +0.3000" in words[1]
    assert words[2] == "For less work: nvfp4, bf16, 0.4500 nats at 0%."
    with pytest.raises(ValueError, match="no recipes"):
        table.recommend([])


def test_extra_work_counts_products_of_the_inputs_that_are_quantized():
    def model():
        return nn.ModuleDict(
            {"q_proj": nn.Linear(64, 32), "down_proj": nn.Linear(32, 64), "lm_head": nn.Linear(64, 512)}
        )

    def work(**options):
        return table.extra_work(resolve(Recipe(rollout="nvfp4", keep=("lm_head",), **options), model()))

    assert work() == 0
    assert work(residual=0.5) == 0.5
    assert work(residual=0.5, residual_scope="token") == 1
    # 64 x 32 products at either: half of them at a quarter of the channels.
    assert work(residual=0.0, residual_sites={"w2": 0.25}) == pytest.approx(0.125)
    assert table.extra_work(resolve(Recipe(), model())) == 0
    moe = tiny_moe("qwen3_moe")
    stacks = 2 * 2 * (64 * 64 + 64 * 32)
    layers = [layer for layer in resolve(W4A4, moe).layers if layer.activation and "self_attn" in layer.name]
    whole = sum(layer.shape[0] * layer.shape[1] for layer in layers)
    found = table.extra_work(resolve(replace(W4A4, residual=0.5), moe), 2)
    assert found == pytest.approx(0.5 * 2 * 2 * 64 * 64 / (whole + stacks))


def test_a_mixture_is_offered_the_residual_at_every_site():
    names = [table.label(r) for r in table.variants(W4A4, moe=True)]
    assert "nvfp4, weights, residual 0.5 per batch at every site" in names
    assert "nvfp4, weights, residual 1 at every site" in names
    assert not any("every site" in table.label(r) for r in table.variants(W4A4))
    assert len(set(names)) == len(names)


def test_recipes_that_differ_have_names_that_differ():
    recipes = [
        REPAIRED,
        replace(REPAIRED, residual_sites={"w2": 0.25}),
        replace(REPAIRED, keep=("lm_head", "model.layers.0.*")),
        replace(REPAIRED, residual_scope="token"),
    ]
    assert [table.label(r) for r in recipes] == [
        "nvfp4, weights, residual 0.5 per batch",
        "nvfp4, weights, residual 0.5 per batch, w2 0.25",
        "nvfp4, weights, residual 0.5 per batch, keep lm_head, model.layers.0.*",
        "nvfp4, weights, residual 0.5 per token",
    ]


def test_distances_by_hand():
    ours, theirs = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert probes.token_distance(ours, theirs) == pytest.approx(3.5)
    assert probes.relative(ours, theirs) == pytest.approx((29 / 5) ** 0.5)


def test_precisions_without_fp4_activations_have_no_residual_to_offer():
    assert {r.residual for r in table.variants(Recipe(rollout="fp8"))} == {0.0}
    assert [r.rollout for r in table.neighbours(Recipe(rollout="int4"))] == ["bf16", "int4"]


def test_quantized_activations_amplify_and_continuous_arithmetic_does_not(lab):
    recipes = [Recipe(), Recipe(rollout="nvfp4-w4a16"), W4A4, replace(W4A4, residual=1.0)]
    rows = amplification.amplify(lab, recipes, tokens=300)
    moved = {(r["rollout"], r["noise"]): r["moved"].value for r in rows}
    for continuous in ("bf16", "nvfp4-w4a16"):
        assert moved[continuous, 1e-7] < 1e-5
        assert 10 < moved[continuous, 1e-4] / moved[continuous, 1e-6] < 1000
    assert moved["nvfp4", 1e-4] > 20 * moved["nvfp4-w4a16", 1e-4]
    assert moved["nvfp4, residual 1", 1e-4] < moved["nvfp4", 1e-4]
    layers = next(r["layers"] for r in rows if r["rollout"] == "nvfp4" and r["noise"] == 1e-4)
    assert len(layers) == 2
    assert amplification.first_layer([1e-6, 5e-6, 0.1], 1e-6) == 2
    assert amplification.first_layer([1e-6], 1e-6) is None


def test_noise_is_the_same_for_the_same_seed_and_gone_after_the_block():
    model = load("sdpa", torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    model.requires_grad_(False)
    clean = model.get_input_embeddings()(ids)
    with amplification.embedding_noise(model, 1e-3, 0):
        one = model.get_input_embeddings()(ids)
    with amplification.embedding_noise(model, 1e-3, 0):
        same = model.get_input_embeddings()(ids)
    assert torch.equal(one, same)
    assert torch.equal(model.get_input_embeddings()(ids), clean)
    assert 2e-4 < float((one - clean).norm() / clean.norm()) < 3e-3


def test_layer_errors_are_the_distances_of_the_blocks_outputs(lab):
    aligned = [replace(REPAIRED, learner=a, residual_scope="token") for a in table.ALIGNMENTS]
    rows = probes.layer_errors(lab, REPAIRED, aligned, tokens=100)
    assert [r["block"] for r in rows] == [
        f"model.layers.{i}.{b}" for i in (0, 1) for b in ("self_attn", "mlp")
    ]
    first = rows[0]
    # The first block's input is an embedding, the same on all sides, in BF16.
    assert first["rollout against bf16, input"] == 0
    assert (
        first["bf16 learner against rollout, output"] > first["weights learner against rollout, output"] > 0
    )
    exact, rollout = lab.model(Recipe(), "rollout"), lab.model(REPAIRED, "rollout")
    drawn = lab.drawn.head(100)
    a, b = (probes.traces(m, drawn, ["model.layers.1.mlp"])["model.layers.1.mlp"] for m in (rollout, exact))
    distance = float((a.output - b.output).norm() / b.output.norm())
    assert rows[3]["rollout against bf16, output"] == pytest.approx(distance)
    assert len(a.input) == sum(
        len(drawn.prompts[c.prompt_index]) + len(c.token_ids) for c in drawn.completions
    )


def test_a_full_learner_under_equal_kernels_is_nowhere_apart_from_its_rollout():
    full = replace(REPAIRED, learner="full")
    same = Lab(load, bench(full).sample(), learner_attention="sdpa")
    rows = probes.layer_errors(same, full, [full], tokens=100)
    assert all(r["full learner against rollout, output"] == 0 for r in rows)


def test_channel_profiles_find_the_planted_channel(lab):
    found = probes.channel_profiles(lab, W4A4, tokens=100)
    assert len(found["sites"]) == 8
    assert all(0 < row["error"] < 0.3 for row in found["sites"])
    energies = [found["sites"][0][f"energy at {share:.1%}"] for share in probes.ENERGY_AT]
    assert energies == sorted(energies)
    worst = found["worst"]
    assert worst["scores"] == sorted(worst["scores"], reverse=True)
    assert worst["energy"][-1] == pytest.approx(1)
    error = torch.full((10, 64), 0.01)
    error[:, 7] = 5.0
    assert probes.energy(error, 1 / 64) > 0.99
    assert torch.tensor(probes._profile(error)["heat"]).amax(0).argmax() == 7
    assert probes.channel_profiles(lab, Recipe(rollout="int4"), 100) == {}


def test_a_mixture_has_profiles_at_the_input_of_its_experts_and_block_errors():
    moe = Lab(load_moe, bench(REPAIRED, loading=load_moe).sample())
    sites = [row["site"] for row in probes.channel_profiles(moe, REPAIRED, 100)["sites"]]
    assert "model.layers.1.mlp.experts.gate_up_proj" in sites
    assert not any(site.endswith("down_proj") for site in sites)
    rows = probes.layer_errors(moe, REPAIRED, [REPAIRED], 100)
    assert [r["block"] for r in rows][-1] == "model.layers.1.mlp"
    kept = keep.search(moe, REPAIRED, tokens=100, steps=1)
    assert [row["layer"] for row in kept["alone"]] == ["model.layers.0", "model.layers.1"]


def test_a_kept_layer_is_what_a_recipe_that_keeps_it_means(lab):
    search = keep.Search(lab, REPAIRED)
    drawn = lab.drawn.head(60)
    swapped = search.mismatch(["model.layers.1"], drawn)
    afresh = search._afresh(search.units["model.layers.1"], drawn)
    assert all(torch.equal(a, b) for a, b in zip(swapped, afresh, strict=True))
    before = search.mismatch((), drawn)
    plain = keep.Search(lab, REPAIRED).mismatch((), drawn)
    assert all(torch.equal(a, b) for a, b in zip(before, plain, strict=True))
    classes = {type(m) for n, m in search.rollout.named_modules() if n in search.units["model.layers.1"]}
    assert nn.Linear not in classes


def test_the_layer_that_does_the_damage_is_the_one_to_keep():
    def broken(attention, dtype):
        model = load(attention, dtype)
        # Layer 0 lies on the grid already, so that quantizing it costs next to nothing.
        with torch.no_grad():
            for p in model.model.layers[0].parameters():
                if p.ndim == 2:
                    p.copy_(get_format("nvfp4").fake_quantize(p))
        return model

    recipe = Recipe(rollout="nvfp4-w4a16", learner="bf16")
    found = keep.search(Lab(broken, bench(recipe, loading=broken).sample()), recipe, tokens=250, steps=2)
    assert max(found["alone"], key=lambda row: row["gain"].value)["layer"] == "model.layers.1"
    assert found["greedy"][0]["layer"] == "model.layers.1"
    assert found["greedy"][0]["gain"].low > 0
    recipe = replace(recipe, keep=tuple(found["patterns"]))
    plan = attachment(Lab(broken, bench(recipe, loading=broken).sample()).model(recipe, "rollout")).plan
    assert {layer.name.split(".")[2] for layer in plan.quantized} == {"0"}


def test_nothing_is_kept_where_nothing_is_gained(lab):
    aligned = Recipe(rollout="nvfp4-w4a16", learner="full")
    found = keep.search(Lab(load, lab.drawn, learner_attention="sdpa"), aligned, tokens=100)
    assert (found["greedy"], found["patterns"]) == ([], [])
    with pytest.raises(ValueError, match="leave none to confirm on"):
        keep.search(lab, aligned, tokens=10**6)


def test_positions_lengths_and_onsets():
    diffs = [torch.tensor([0.1, 0.1, 2.0, 0.1]), torch.tensor([-0.1, 0.3])]
    rows = positions.by_position(diffs, bins=2)
    assert [(r["first"], r["last"], r["tokens"]) for r in rows] == [(0, 1, 4), (2, 3, 2)]
    assert rows[0]["mean"].value == pytest.approx(0.15)
    assert positions.by_length(diffs)[0] == {
        "length": 4,
        "mean": pytest.approx(0.575),
        "sum": pytest.approx(2.3),
    }
    assert positions.repetition_onset([1, 2, 3, 1, 2, 3], ngram=2) == 3
    assert positions.repetition_onset([4] * 9) == 1
    assert positions.repetition_onset(range(20)) is None
    long = Completion(0, 0, (5,) * 12, (-0.1,) * 12, "length", 0)
    short = Completion(0, 1, (6, 2), (-0.1, -0.2), "stop", 0)
    learner = [torch.tensor([-0.1] * 4 + [-5.0] * 8), torch.tensor([-0.1, -0.2])]
    found = positions.onsets(learner, Drawn([[1]], [long, short]))
    assert found["error_onset"] == [4, None]
    assert found["repetition_onset"] == [1, None]
    assert found["error_tokens"] == pytest.approx(8 / 14)
    assert found["responses_with_errors"] == 0.5
