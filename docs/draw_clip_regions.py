"""Draw where each surrogate learns and where it stops, from the gradients of `policy_loss` itself.

    python docs/draw_clip_regions.py        writes docs/figures/clip_regions.png and gradient_by_ratio.png

Nothing here knows a formula: each pixel is a response of one token, and its colour is the gradient that
`policy_loss` gives that token. For the sequence-level objectives read the axes as geometric means.
"""

from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from lowbitrl.objectives import policy_loss

FIGURES = Path(__file__).parent / "figures"
# One set of bounds for all panels, so that shapes are compared and not tunings (GSPO's own 3e-4 is invisible).
BOUNDS = {"clip_low": 0.2, "clip_high": 0.27}
PANELS = {
    "GRPO": ("grpo", BOUNDS),
    "GRPO + dual clip 1.5": ("grpo", BOUNDS | {"dual_clip": 1.5}),
    "TBPO = GSPO + dual clip": (
        "tbpo",
        {"eps_high": 0.27, "delta_low": 0.2, "delta_high": 0.27, "tis_cap": None},
    ),
    "SAPO": ("sapo", {}),
    "CISPO, cap 1.27": ("cispo", {"clip_high": 0.27}),
    "positive only": ("positive_only", BOUNDS),
}
SIGNS = {"A = +1": 1.0, "A = -1": -1.0}


def gradient_size(name, parameters, old_prob, new_prob, advantage):
    """|d loss / d log pi| of single-token responses, same shape as `old_prob`; 1 on policy."""
    logprobs = new_prob.flatten().log().unsqueeze(-1).requires_grad_()
    out = policy_loss(
        name,
        logprobs=logprobs,
        old_logprobs=old_prob.flatten().log().unsqueeze(-1),
        advantages=torch.full((old_prob.numel(),), advantage),
        mask=torch.ones(old_prob.numel(), 1),
        aggregate="token-mean",
        denominator=1.0,
        **parameters,
    )
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    return gradient.abs().view_as(old_prob)


def draw_regions(path, resolution=256):
    """Old against new probability: grey where the token has no gradient, else the size of its gradient."""
    prob = (torch.arange(resolution) + 0.5) / resolution
    new_prob, old_prob = torch.meshgrid(prob, prob, indexing="ij")
    figure, axes = plt.subplots(
        2, len(PANELS), figsize=(3 * len(PANELS), 6), sharex=True, sharey=True, layout="constrained"
    )
    colours = plt.get_cmap("viridis").with_extremes(bad="0.85")
    for column, (title, (name, parameters)) in enumerate(PANELS.items()):
        for row, (sign, advantage) in enumerate(SIGNS.items()):
            axis = axes[row][column]
            size = gradient_size(name, parameters, old_prob, new_prob, advantage)
            image = axis.imshow(
                torch.where(size > 0, size, torch.nan).numpy(),
                origin="lower",
                extent=(0, 1, 0, 1),
                vmin=0,
                vmax=2.5,
                cmap=colours,
            )
            axis.plot([0, 1], [0, 1], color="white", linewidth=0.8, linestyle=":")
            # Learning raises the probability of a token with A > 0 and lowers it with A < 0.
            start, end = (0.35, 0.5) if advantage > 0 else (0.65, 0.5)
            axis.annotate(
                "",
                (0.5, end + 0.05 * advantage),
                (0.5, start),
                arrowprops={"arrowstyle": "->", "color": "red", "linewidth": 2},
            )
            axis.set_title(f"{title}, {sign}", fontsize=9)
            if row == 1:
                axis.set_xlabel("old probability")
            if column == 0:
                axis.set_ylabel("current probability")
    figure.colorbar(image, ax=axes, label="gradient by log-probability (grey: none)", extend="max")
    figure.savefig(path, dpi=85)
    plt.close(figure)


def draw_profiles(path):
    """The same gradient as a function of the ratio alone: what a large ratio can do to a step."""
    ratio = torch.logspace(-1.5, 1.5, 1201)
    old_prob = torch.full_like(ratio, 0.03)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for axis, (sign, advantage) in zip(axes, SIGNS.items(), strict=True):
        for order, (title, (name, parameters)) in enumerate(PANELS.items()):
            size = gradient_size(name, parameters, old_prob, old_prob * ratio, advantage)
            # Curves coincide over long stretches: the first are drawn wide so that the last do not hide them.
            axis.plot(ratio, size, label=title, linewidth=6 - order)
        axis.set(xscale="log", title=sign, xlabel="ratio, current / old", ylim=(0, 3))
    axes[0].set_ylabel("gradient by log-probability")
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=85)
    plt.close(figure)


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    draw_regions(FIGURES / "clip_regions.png")
    draw_profiles(FIGURES / "gradient_by_ratio.png")
