"""The chain telescopes exactly, each term holds what it is named after, and intervals mean what they say."""

from dataclasses import replace

import pytest
import torch

from lowbitrl.diagnose import chain, statistics
from lowbitrl.diagnose.lab import Lab
from lowbitrl.diagnose.mismatch import compare, differences, estimates
from lowbitrl.quant import Recipe
from tests.diagnose.lab_helpers import bench, load
from tests.moe_models import tiny_moe

FULL = Recipe(rollout="nvfp4", learner="full", residual=0.5)
RECIPES = [
    Recipe(rollout="nvfp4", learner="bf16", residual=0.5),
    Recipe(rollout="nvfp4", learner="weights", residual=0.5),
    FULL,
    Recipe(rollout="fp8", learner="bf16"),
    Recipe(rollout="int4", learner="bf16"),
    Recipe(rollout="nvfp4-w16a4", learner="bf16"),
    Recipe(),
]


def load_moe(attention, dtype):
    model = tiny_moe("qwen3_moe", dtype or torch.bfloat16, max_position_embeddings=128)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_terms_sum_to_the_mismatch_of_every_token(recipe):
    lab = bench(recipe).lab()
    terms = chain.decompose(lab, recipe)
    total = terms.pop("total")
    for i, whole in enumerate(total):
        parts = torch.stack([values[i] for values in terms.values()]).double().sum(0)
        torch.testing.assert_close(parts.float(), whole, rtol=1e-6, atol=4e-6)
    learner = lab.scores(recipe, "learner")
    assert all(torch.equal(a, b) for a, b in zip(total, differences(learner, lab.drawn.words), strict=True))


def test_which_terms_there_are():
    names = {str(r): list(chain.decompose(bench(r).lab(), r)) for r in RECIPES[:4]}
    assert list(names.values()) == [
        ["weights", "activations", "residual", "engine", "total"],
        ["activations", "residual", "engine", "total"],
        ["engine", "total"],
        ["weights", "activations", "engine", "total"],
    ]


def test_routing_is_a_term_of_a_mixture():
    recipe = Recipe(rollout="nvfp4", learner="bf16")
    planted = bench(recipe, loading=load_moe)
    lab = Lab(load_moe, planted.sample())
    terms = chain.decompose(lab, recipe)
    assert list(terms) == ["routing", "weights", "activations", "engine", "total"]
    assert float(torch.cat(terms["routing"]).abs().mean()) > 0
    parts = torch.stack([torch.cat(v).double() for k, v in terms.items() if k != "total"]).sum(0)
    torch.testing.assert_close(parts.float(), torch.cat(terms["total"]), rtol=1e-6, atol=4e-6)


def test_full_alignment_is_the_rollouts_arithmetic_to_the_bit_under_equal_kernels():
    planted = bench(FULL)
    lab = Lab(load, planted.sample(), learner_attention="sdpa")
    pairs = zip(lab.scores(FULL, "learner"), lab.scores(FULL, "rollout"), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_an_arithmetic_is_measured_once_however_it_is_written(monkeypatch):
    lab = bench(RECIPES[1]).lab()
    first = lab.scores(RECIPES[1], "learner")
    monkeypatch.setattr(lab, "model", None)
    assert lab.scores(Recipe(rollout="nvfp4", learner="weights"), "learner") is first


def test_only_weights_differ_in_the_weights_term():
    recipe = Recipe(rollout="nvfp4-w4a16", learner="bf16")
    terms = chain.describe(chain.decompose(bench(recipe).lab(), recipe))["terms"]
    assert terms["weights"]["share"].value > 0.95
    assert terms["engine"]["mean_abs"].value < 0.1 * terms["weights"]["mean_abs"].value


def test_shares_sum_to_one_and_means_to_the_mean():
    found = chain.describe(chain.decompose(bench(RECIPES[0]).lab(), RECIPES[0]))["terms"]
    parts = [row for name, row in found.items() if name != "total"]
    assert sum(row["share"].value for row in parts) == pytest.approx(1, abs=1e-5)
    assert sum(row["mean"].value for row in parts) == pytest.approx(found["total"]["mean"].value, abs=1e-5)


def test_estimates_agree_with_the_metrics_of_training():
    diffs = [torch.randn(n) for n in (3, 50, 7, 20)]
    found = estimates(diffs)
    same = compare(diffs, [torch.zeros_like(d) for d in diffs])
    for name in ("mean", "p99", "max", "k3", "token_mult_prob_error"):
        assert found[name].value == pytest.approx(getattr(same, name), rel=1e-4)
        assert found[name].low <= found[name].value <= found[name].high
    ratios = torch.cat(diffs).exp()
    assert found["outside"].value == pytest.approx(float(((ratios - 1).abs() > 0.2).float().mean()))
    weights = torch.stack([d.sum().exp() for d in diffs]).double()
    share = float(weights.sum() ** 2 / (4 * (weights**2).sum()))
    assert found["effective_share"].value == pytest.approx(share, rel=1e-4)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    torch.manual_seed(0)
    # Responses have means of their own: intervals over tokens alone would be far too narrow.
    covered = 0
    for _ in range(200):
        rows = [torch.randn(20) + torch.randn(1) for _ in range(30)]
        found = statistics.bootstrap(rows)
        covered += found.low <= 0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_intervals_of_a_paired_gain_and_of_a_share_cover_the_truth_too():
    torch.manual_seed(1)
    gains = shares = 0
    for _ in range(200):
        lengths = torch.randint(1, 40, (40,)).tolist()
        before = [1 + torch.rand(n) + torch.rand(1) for n in lengths]
        # Truth: a gain of 0.25 a token; half of each total from this term, half from another.
        gain = statistics.paired_gain(before, [b - 0.5 * torch.rand(len(b)) for b in before])
        gains += gain.low <= 0.25 <= gain.high
        parts = [(torch.randn(n), torch.randn(n)) for n in lengths]
        share = statistics.share_of([a for a, _ in parts], [a + b for a, b in parts])
        shares += share.low <= 0.5 <= share.high
    assert 0.88 <= gains / 200 <= 0.99
    assert 0.88 <= shares / 200 <= 0.99


@pytest.mark.slow
def test_intervals_of_a_99th_percentile_cover_it_a_little_less_often():
    torch.manual_seed(0)

    def response():
        return (torch.randn(60) * torch.rand(1)).abs()

    values = torch.cat([response() for _ in range(20_000)])
    truth = float(values.kthvalue(int(0.99 * len(values))).values)
    covered = 0
    for _ in range(150):
        found = statistics.bootstrap([response() for _ in range(30)], "p99")
        covered += found.low <= truth <= found.high
    assert 0.8 <= covered / 150 <= 0.97


def test_a_paired_gain_sees_what_unpaired_intervals_hide():
    torch.manual_seed(0)
    rows = [torch.rand(20) + 3 * torch.rand(1) for _ in range(30)]
    gain = statistics.paired_gain(rows, [r - 0.05 for r in rows])
    assert gain.value == pytest.approx(0.05, abs=1e-4)
    assert gain.low > 0


def test_nothing_sampled_is_refused():
    drawn = bench(Recipe()).sample()
    empty = replace(drawn.completions[0], token_ids=())
    for completions in ([], [empty]):
        with pytest.raises(ValueError, match="needs sampled tokens"):
            Lab(load, replace(drawn, completions=completions))
    with pytest.raises(ValueError, match="no responses"):
        statistics.bootstrap([])
