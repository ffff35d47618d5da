"""A run's checkpoint as a Hugging Face checkpoint: in BF16, or in the bytes that the run published."""

from __future__ import annotations

from pathlib import Path

from lowbitrl.checkpoints import write_dense, write_quantized
from lowbitrl.config import RunConfig, load_config, validate
from lowbitrl.models import load_model
from lowbitrl.runs import read_json, read_metrics
from lowbitrl.trainer import checkpoint

BF16 = "bf16"
SCORE = "eval/pass@1"


def export_run(
    run: Path, out: Path, step: str = "last", layout: str = BF16, recipe: Path | None = None
) -> tuple[str, ...]:
    """Write the weights of a run after `step` steps, with tokenizer and generation config, to `out`.

    Quantized weights are encoded from the compute dtype by the run's recipe, as the run published them
    at that version: equal to the byte.

    Args:
        step: "last", "best" (highest held-out pass@1 among the checkpoints kept), or a number.
        layout: "bf16", "compressed-tensors" or "modelopt".
        recipe: a TOML file whose recipe section replaces the run's.

    Returns:
        Notes: what of the recipe the layout cannot say.

    Raises:
        ValueError, OSError: no run, no such checkpoint, or it is damaged; what the writers refuse.
    """
    config = _config(run)
    chosen = _choose(run, step)
    model, tokenizer = load_model(config.model.name, config.model.dtype)
    checkpoint.load_masters(chosen, model)
    if layout == BF16:
        write_dense(model.bfloat16(), tokenizer, out)
        return (f"weights of {chosen}",)
    wanted = load_config(recipe).recipe if recipe else config.recipe
    # Another recipe's sites are others; its static scales would need texts.
    scales = None if recipe else checkpoint.state_of(chosen).get("input_amax", [{}])[0]
    written = write_quantized(model, tokenizer, wanted, out, layout, input_amax=scales)
    return (f"weights of {chosen}", written.plan.summary(), *written.notes)


def _config(run: Path) -> RunConfig:
    file = run / "config.json"
    if not file.is_file() or not (run / "plan.json").is_file():
        raise FileNotFoundError(
            f"{run} is no run folder (config.json and plan.json are expected in it); give the folder that "
            "`lowbitrl train` wrote, or use `lowbitrl quantize` for a model"
        )
    return validate(read_json(file))


def _choose(run: Path, step: str) -> Path:
    kept = checkpoint.steps(run / "checkpoints")
    if not kept:
        raise FileNotFoundError(
            f"{run} holds no checkpoint; train with checkpoint.final=true or checkpoint.every"
        )
    if step == "last":
        return kept[max(kept)]
    if step == "best":
        return kept[_best(run, set(kept))]
    if not step.isdigit() or int(step) not in kept:
        raise ValueError(
            f"step={step!r} is not among the checkpoints of {run}: {', '.join(map(str, kept))}; give one "
            "of them, last or best"
        )
    return kept[int(step)]


def _best(run: Path, kept: set[int]) -> int:
    """The kept checkpoint that scored highest; the earliest of equals. Line s describes the state after s + 1 steps."""
    scores = {m["step"] + 1: m[SCORE] for m in read_metrics(run) if SCORE in m and m["step"] + 1 in kept}
    if not scores:
        raise ValueError(
            f"no checkpoint of {run} was evaluated, so none is best; give a number or last, or train with "
            "evaluation.every and checkpoint.every equal"
        )
    return max(scores, key=lambda s: (scores[s], -s))
