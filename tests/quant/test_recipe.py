import pytest

from lowbitrl.quant import PRECISIONS, Recipe


@pytest.mark.parametrize(
    ("rollout", "weight", "activation"),
    [
        ("bf16", None, None),
        ("fp8", "fp8-channel", "fp8-token"),
        ("nvfp4", "nvfp4", "nvfp4-token"),
        ("nvfp4-w4a16", "nvfp4", None),
        ("nvfp4-w16a4", None, "nvfp4-token"),
        ("nvfp4-fp8", "nvfp4", "fp8-token"),
    ],
)
def test_rollout_names_stand_for_their_formats(rollout, weight, activation):
    assert PRECISIONS[rollout].weight == weight
    assert PRECISIONS[rollout].activation == activation


def test_alignment_decides_the_learners_side():
    assert Recipe(rollout="nvfp4", learner="bf16").learner_precision == PRECISIONS["bf16"]
    assert Recipe(rollout="nvfp4", learner="weights").learner_precision == PRECISIONS["nvfp4-w4a16"]
    assert Recipe(rollout="nvfp4", learner="full").learner_precision == PRECISIONS["nvfp4"]


def test_scope_is_token_where_both_sides_choose_channels():
    assert Recipe(rollout="nvfp4", learner="full", residual=0.5).scope == "token"
    assert Recipe(rollout="nvfp4", learner="weights", residual=0.5).scope == "batch"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout": "nvfp5"}, "rollout='nvfp5' is unknown; choose one of bf16, fp8"),
        ({"learner": "half"}, "learner='half' is unknown; choose one of bf16, weights, full"),
        ({"rollout": "nvfp4", "residual": 1.5}, "residual=1.5 is not a fraction"),
        ({"rollout": "nvfp4", "residual": float("nan")}, "residual=nan is not a fraction"),
        ({"rollout": "fp8", "residual": 0.5}, "repairs FP4 activations, but rollout='fp8'"),
        ({"rollout": "nvfp4-w4a16", "residual": 0.5}, "has BF16 activations"),
        (
            {"rollout": "nvfp4", "learner": "full", "residual": 0.5, "residual_scope": "batch"},
            "use residual_scope='token'",
        ),
    ],
)
def test_meaningless_recipes_are_refused_with_a_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**options)
