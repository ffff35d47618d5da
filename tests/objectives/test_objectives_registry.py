"""Names, their errors, a researcher's own objective, and the tower's imports."""

import subprocess
import sys

import pytest
import torch
from objective_cases import BUILT_IN, hand_2x3, random_batch, run

from lowbitrl.objectives import get_objective, objective_names, policy_loss, register_objective, registry


@pytest.fixture
def scratch_registry(monkeypatch):
    monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))


def test_every_promised_name_is_there_and_runs_with_no_parameters():
    assert objective_names() == BUILT_IN
    for name in BUILT_IN:
        assert run(name, random_batch(0, dtype=torch.float32))[0].loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("tpbo", {}, "did you mean 'tbpo'. Known: grpo, dr_grpo"),
        ("gspo ", {}, "did you mean 'gspo'"),
        ("grpo", {"clip_hi": 0.3}, "did you mean 'clip_high'. Known: clip_low, clip_high, dual_clip"),
        (
            "tbpo",
            {"tis_clip": 2.0},
            "did you mean 'tis_cap'. Known: eps_high, delta_low, delta_high, tis_cap",
        ),
        ("reinforce", {"clip_low": 0.2}, "objective 'reinforce'.*Known: none"),
    ],
)
def test_an_unknown_name_or_parameter_names_the_nearest_and_all(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        run(name, hand_2x3(), **parameters)


def test_a_researchers_objective_is_one_pure_function(scratch_registry):
    @register_objective("squared", aggregate="token-mean")
    def squared(logprobs_BT, old_logprobs_BT, advantages_B1, mask_BT, *, scale: float = 1.0):
        ratio_BT = (logprobs_BT - old_logprobs_BT).exp()
        return -ratio_BT * advantages_B1 + scale * (ratio_BT - 1) ** 2

    # -[1.5, 1, 0.5] + 2 [0.25, 0, 0.25] and 2 [1.5, 0.5] + 2 [0.25, 0.25]
    out, _ = run("squared", hand_2x3(), scale=2.0)
    assert out.loss.item() == pytest.approx((-3 + 1 + 4 + 1) / 5)
    out, gradient = run("squared", hand_2x3(), correction="mis")
    assert (gradient[0] == 0).all()
    with pytest.raises(ValueError, match="Known: scale"):
        run("squared", hand_2x3(), scales=2.0)
    assert get_objective("squared").parameters == {"scale": 1.0}


def test_registering_refuses_what_would_surprise_later(scratch_registry):
    with pytest.raises(ValueError, match="already registered"):
        register_objective("grpo", aggregate="token-mean")
    with pytest.raises(ValueError, match="token-mean, "):
        register_objective("new", aggregate="mean")
    with pytest.raises(ValueError, match="give scale a default"):

        @register_objective("new", aggregate="token-mean")
        def new(logprobs_BT, old_logprobs_BT, advantages_B1, mask_BT, *, scale):
            return logprobs_BT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(3, dtype=torch.float64)}, r"shapes \(B, T\) and \(B,\)"),
        ({"mask": torch.ones(2, 1)}, "mask has shape"),
        ({"old_logprobs": torch.zeros(3, dtype=torch.float64)}, "old_logprobs has shape"),
        ({"rollout_logprobs": torch.zeros(2, 3, dtype=torch.bfloat16)}, "rollout_logprobs is torch.bfloat16"),
    ],
)
def test_tensors_of_the_wrong_shape_or_precision_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        policy_loss("grpo", **(hand_2x3() | change))


def test_the_tower_imports_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); import lowbitrl.objectives; "
        "print(*sorted(m for m in set(sys.modules) - before if m.split('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = done.stdout.split()
    assert new
    assert all(name == "lowbitrl" or name.startswith("lowbitrl.objectives") for name in new)
