"""Draw the grids of the formats and their error on three kinds of data, with the formats themselves.

python docs/draw_formats.py        writes docs/figures/format_grids.png and format_errors.png, and prints
                                   the table of errors in docs/numerics.md
"""

from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from lowbitrl.formats import get_format
from lowbitrl.formats.grids import E2M1_VALUES, from_e4m3

FIGURES = Path(__file__).parent / "figures"
FORMATS = ["fp8-channel", "fp8-block", "mxfp8", "int8-channel", "nvfp4", "mxfp4", "int4-g32", "int4-g128"]


def grids() -> dict[str, torch.Tensor]:
    """Non-negative values of each element grid as shares of its largest."""
    e4m3 = from_e4m3(torch.arange(127, dtype=torch.uint8))
    return {
        "E2M1 (NVFP4, MXFP4)": torch.tensor(E2M1_VALUES) / 6,
        "INT4": torch.arange(8) / 7,
        "E4M3 (FP8)": e4m3 / 448,
        "INT8": torch.arange(128) / 127,
    }


def draw_grids() -> None:
    figure, axes = plt.subplots(len(grids()), 1, figsize=(8, 3.4), sharex=True)
    for axis, (name, values) in zip(axes, grids().items(), strict=True):
        axis.vlines(values, 0, 1, linewidth=0.8)
        axis.set_yticks([])
        axis.set_ylabel(name, rotation=0, ha="right", va="center")
    axes[-1].set_xlabel("share of the largest value of the block")
    figure.tight_layout()
    figure.savefig(FIGURES / "format_grids.png", dpi=150)


def data(rows: int = 1024, columns: int = 4096) -> dict[str, torch.Tensor]:
    """Three kinds of tensors, BF16, one seed."""
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(rows, columns, generator=generator)
    # Student's t with 3 degrees of freedom: a normal over the root of a mean of three squares.
    spread = torch.randn(3, rows, columns, generator=generator).square().mean(0).sqrt()
    outlier = gauss.clone()
    outlier[:, ::128] *= 50
    kinds = {
        "Gaussian": gauss,
        "heavy-tailed (t, 3 d.o.f.)": gauss / spread,
        "outlier channels (1 in 128, 50x)": outlier,
    }
    return {name: x.bfloat16() for name, x in kinds.items()}


def ordinary_error(name: str, kind: str, x: torch.Tensor) -> float:
    """Root mean square error relative to that of the data; of the ordinary channels where some are outliers."""
    error = get_format(name).fake_quantize(x).float() - x.float()
    if kind.startswith("outlier"):
        keep = torch.arange(x.shape[1]) % 128 != 0
        error, x = error[:, keep], x[:, keep]
    return (error.norm() / x.float().norm()).item()


def draw_errors() -> None:
    kinds = data()
    table = {name: [ordinary_error(name, kind, x) for kind, x in kinds.items()] for name in FORMATS}
    figure, axis = plt.subplots(figsize=(8, 3.6))
    for i, kind in enumerate(kinds):
        axis.bar(
            [j + 0.27 * (i - 1) for j in range(len(FORMATS))],
            [100 * table[n][i] for n in FORMATS],
            0.25,
            label=kind,
        )
    axis.set_xticks(range(len(FORMATS)), FORMATS, rotation=20)
    axis.set_yscale("log")
    axis.set_ylabel("relative error, %")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(FIGURES / "format_errors.png", dpi=150)
    print("| format | bits per element | " + " | ".join(kinds) + " |\n|---|---|" + "---|" * len(kinds))
    for name, errors in table.items():
        bits = get_format(name).bits_per_element
        print(f"| `{name}` | {bits:g} | " + " | ".join(f"{100 * e:.2f}%" for e in errors) + " |")


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    draw_grids()
    draw_errors()
