"""An experiment: variants of one recipe under the same seeds and prompts, told apart by intervals.

    base = "../../recipes/quads.toml"      # beside this file
    seeds = [0, 1, 2]
    reference = "bf16"                     # what the others are compared with, seed by seed
    [common]                               # settings of every variant
    trainer.steps = 150
    [variants.bf16]
    recipe.rollout = "bf16"
    [variants.quads]                       # the base itself

Every finished run leaves its lines in metrics.csv, and figures and statistics are made of that file alone:
runs may be made one at a time, on several machines, and a second call makes those that are missing.
"""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lowbitrl.compare import Job, check_same_prompts, jobs_that_fit, run_apart
from lowbitrl.config import ConfigError, load_config
from lowbitrl.diagnose.figures import COLORS, Records, group_of, scores_figure, training_figure
from lowbitrl.engines import Say
from lowbitrl.loop import train
from lowbitrl.runs import read_metrics

# What is kept of a run's metrics: enough for every figure, a few hundred bytes a step.
COLUMNS = (
    "reward/mean", "eval/pass@1", "eval_unquantized/pass@1", "mismatch/abs_mean", "mismatch/abs_p99",
    "rollout_corr/k3_kl",
    "rollout_corr/rollout_is_eff_sample_size", "actor/pg_clipfrac", "actor/outside_band_positive",
    "actor/outside_band_negative", "actor/entropy", "actor/grad_norm", "actor/kl_loss", "quant/changed_codes",
    "routing/agreement", "rollout/tokens_mean", "rollout/low_prob_positive", "rollout/low_prob_negative",
    "rollout/repetition", "timing/gen", "timing/update", "timing/tokens_per_s",
)  # fmt: skip
HEADER = ["run", "step", *COLUMNS]
TAIL = 10  # training steps averaged at the end
LAST = 3  # evaluations averaged at the end
# What the policy did, beside how well: shown in a second table.
POLICY = {
    "KL to start, end": "actor/kl_loss",
    "entropy, end": "actor/entropy",
    "clipped, end": "actor/pg_clipfrac",
    "responses outside band, A < 0": "actor/outside_band_negative",
    "tokens below 2%, A < 0": "rollout/low_prob_negative",
    "repetition, end": "rollout/repetition",
    "codes changed, end": "quant/changed_codes",
}
# Student's t, two-sided 95%, by degrees of freedom 1, 2, ...; normal beyond.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
NORMAL95 = 1.960


class Experiment(BaseModel):
    """The file above, checked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    seeds: tuple[int, ...] = Field(min_length=1)
    reference: str = ""
    common: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = Field(min_length=1)


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file.

    Raises:
        ConfigError: it is missing, no TOML, or has other keys than the ones shown above.
    """
    try:
        experiment = Experiment.model_validate(tomllib.loads(path.read_text()))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; give an experiment's TOML file") from error
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if experiment.reference and experiment.reference not in experiment.variants:
        known = ", ".join(experiment.variants)
        raise ConfigError(f"{path}: reference={experiment.reference!r} is no variant; choose one of {known}")
    return experiment


def run_experiment(
    path: Path,
    out: Path,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    jobs: int = 0,
    redraw: bool = False,
    say: Say = print,
) -> Path:
    """Make the runs that `out` has no metrics of, then write statistics and figures of all.

    Args:
        only / seeds: a part of the variants and seeds; all by default.
        jobs: runs at a time; 0 takes one on a CPU and what fits on a GPU.
        redraw: make no runs.

    Returns:
        statistics.json.

    Raises:
        ConfigError: the file, a variant or a setting is not known.
        RuntimeError: runs failed, named with their last lines; the others' metrics are kept.
    """
    experiment = load_experiment(path)
    if unknown := set(only) - set(experiment.variants):
        raise ConfigError(f"{path} has no variant {sorted(unknown)}; it has {', '.join(experiment.variants)}")
    file = out / "metrics.csv"
    done = read_csv(file)
    planned = [job for job in plan_runs(path, experiment, out / "runs") if job.folder.name not in done]
    wanted = [j for j in planned if not redraw and _wanted(j, only or experiment.variants, seeds)]
    failed = _run(wanted, jobs, lambda job: append_csv(file, job.folder.name, read_metrics(job.folder)), say)
    statistics = write_statistics(experiment, read_csv(file), out)
    if failed:
        raise RuntimeError("runs failed:\n" + "\n".join(failed))
    return statistics


def plan_runs(path: Path, experiment: Experiment, folder: Path) -> list[Job]:
    """A job a variant and seed, every one checked before any runs.

    Raises:
        ConfigError: a setting is not known or refused. ValueError: variants with other prompts.
    """
    recipe = path.parent / experiment.base
    planned = []
    for name, own in experiment.variants.items():
        for seed in experiment.seeds:
            where = folder / f"{name}-seed{seed}"
            words = [*overrides(experiment.common), *overrides(own), "--seed", str(seed), "--out", str(where)]
            planned.append(Job(recipe, tuple(words), load_config(recipe, words)))
    check_same_prompts(planned)
    return planned


def overrides(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Nested settings as words of a command line: {"trainer": {"steps": 5}} is --trainer.steps 5."""
    words: list[str] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            words += overrides(value, f"{prefix}{key}.")
        else:
            words += [f"--{prefix}{key}", json.dumps(value)]
    return words


def _wanted(job: Job, names: Sequence[str] | Mapping[str, Any], seeds: Sequence[int]) -> bool:
    return group_of(job.folder.name) in names and (not seeds or job.config.seed in seeds)


def _run(planned: Sequence[Job], jobs: int, finished: Callable[[Job], None], say: Say) -> list[str]:
    """Run, tell `finished` of each that ended well, and return what was wrong with the others."""
    if not planned:
        return []
    count = jobs or jobs_that_fit(planned)
    say(f"{len(planned)} runs, {count} at a time")
    failed = []
    writing = Lock()

    def one(job: Job) -> None:
        try:
            train(job.config, job.resumes, say=say) if count == 1 else run_apart(job, say)
            with writing:  # runs that end together would mix their lines in one file
                finished(job)
        except RuntimeError as error:
            failed.append(str(error))

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, planned))
    return failed


def append_csv(file: Path, run: str, records: Records) -> None:
    """Add a run's lines, numbers to five digits; a file with other columns is written anew with ours."""
    earlier = read_csv(file)
    if earlier and not _has_our_columns(file):
        file.unlink()
        for name, lines in earlier.items():
            append_csv(file, name, lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", newline="") as stream:
        writer = csv.writer(stream)
        if not earlier:
            writer.writerow(HEADER)
        for record in records:
            writer.writerow([run, record["step"], *(_short(record.get(name)) for name in COLUMNS)])


def _has_our_columns(file: Path) -> bool:
    with file.open(newline="") as stream:
        return next(csv.reader(stream)) == HEADER


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def read_csv(file: Path) -> dict[str, list[dict[str, float]]]:
    """Runs by name, as `read_metrics` would give them; none where there is no file."""
    runs: dict[str, list[dict[str, float]]] = {}
    if file.exists():
        with file.open(newline="") as stream:
            for row in csv.DictReader(stream):
                values = {name: float(text) for name, text in row.items() if name != "run" and text}
                runs.setdefault(row["run"], []).append(values | {"step": int(row["step"])})
    return runs


def write_statistics(experiment: Experiment, runs: Mapping[str, Records], out: Path) -> Path:
    """statistics.json, table.md, scores.png and, where colors suffice, training.png of the runs there are."""
    order = {name: i for i, name in enumerate(experiment.variants)}
    ours = {run: r for run, r in runs.items() if group_of(run) in order}
    ours = dict(sorted(ours.items(), key=lambda item: (order[group_of(item[0])], item[0])))
    scores: dict[str, dict[int, dict[str, float]]] = {}
    for run, records in ours.items():
        scores.setdefault(group_of(run), {})[int(run.rpartition("-seed")[2])] = score(records)
    reference = scores.get(experiment.reference, {})
    statistics = {
        name: {
            figure: _interval([s[figure] for s in seeds.values()])
            | _against(seeds, reference if name != experiment.reference else {}, figure)
            for figure in next(iter(seeds.values()))
        }
        for name, seeds in scores.items()
    }
    file = out / "statistics.json"
    file.write_text(json.dumps({"reference": experiment.reference, "variants": statistics}, indent=1) + "\n")
    (out / "table.md").write_text(table(statistics, experiment.reference))
    if ours:
        scores_figure(statistics, ("held-out, end", "mismatch, end"), out / "scores.png")
    if ours and len(statistics) <= len(COLORS):
        training_figure(ours, out / "training.png")
    return file


def score(records: Records) -> dict[str, float]:
    """A run's figures: held-out pass@1 at the end and over the run, reward at the end, mismatch, `POLICY`."""
    evaluated = [r["eval/pass@1"] for r in records if "eval/pass@1" in r]
    unquantized = [r["eval_unquantized/pass@1"] for r in records if "eval_unquantized/pass@1" in r]
    rewards = [r["reward/mean"] for r in records if r["step"] >= 0]
    mismatch = [r["mismatch/abs_mean"] for r in records if "mismatch/abs_mean" in r]
    figures = {
        "held-out, end": _mean(evaluated[-LAST:]),
        "held-out, whole run": _mean(evaluated),
        "held-out, best": max(evaluated, default=math.nan),
        "held-out unquantized, end": _mean(unquantized[-1:]),
        "reward, end": _mean(rewards[-TAIL:]),
        "mismatch, start": _mean(mismatch[:TAIL]),
        "mismatch, end": _mean(mismatch[-TAIL:]),
    }
    figures |= {
        name: _mean([r[column] for r in records if column in r][-TAIL:]) for name, column in POLICY.items()
    }
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean, and half the width of Student's 95% interval; no width for one value."""
    n, mean = len(values), _mean(values)
    if n < 2:
        return {"mean": mean, "n": n}
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    t = T95[n - 2] if n - 2 < len(T95) else NORMAL95
    return {"mean": mean, "half": t * deviation / math.sqrt(n), "n": n}


def _against(
    seeds: Mapping[int, Mapping[str, float]], reference: Mapping[int, Mapping[str, float]], figure: str
) -> dict[str, Any]:
    """The paired difference to the reference over the seeds both have, and whether its interval excludes 0."""
    shared = [s for s in seeds if figure in reference.get(s, {})]
    if not shared:
        return {}
    found = _interval([seeds[s][figure] - reference[s][figure] for s in shared])
    differs = "half" in found and abs(found["mean"]) > found["half"]
    return {"difference": found | {"differs": differs}}


def table(statistics: Mapping[str, Mapping[str, Mapping[str, Any]]], reference: str) -> str:
    """Markdown tables, scores and `POLICY`: mean and 95% interval; bold where it differs from the reference."""
    figures = dict.fromkeys(name for row in statistics.values() for name in row)
    parts = [
        _one_table(statistics, [name for name in figures if (name in POLICY) == policy])
        for policy in (False, True)
    ]
    note = f"\nBold: its difference to {reference}, seed by seed, has a 95% interval without 0.\n"
    return "\n".join(part for part in parts if part) + (note if reference else "")


def _one_table(statistics: Mapping[str, Mapping[str, Mapping[str, Any]]], figures: Sequence[str]) -> str:
    if not figures:
        return ""
    lines = [f"| variant | seeds | {' | '.join(figures)} |", "|---" * (len(figures) + 2) + "|"]
    for name, row in statistics.items():
        cells = [_cell(row[figure]) if figure in row else "-" for figure in figures]
        lines.append(f"| {name} | {next(iter(row.values()))['n']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(entry: Mapping[str, Any]) -> str:
    digits = ".3f" if abs(entry["mean"]) >= 0.001 or entry["mean"] == 0 else ".1e"
    text = f"{entry['mean']:{digits}}" + (f" ± {entry['half']:{digits}}" if "half" in entry else "")
    return f"**{text}**" if entry.get("difference", {}).get("differs") else text
