"""The command line: `lowbitrl COMMAND`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# Before torch loads OpenMP: threads that spin while they wait slow a shared machine down many times over.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Plain help: rich would read "[recipe]" as markup, and leave it out.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="""Low-bit rollouts for reinforcement learning of language models.

    Exit codes: 0 done; 1 the run went wrong; 2 something to mend in what was asked; 3 an engine hung. Start
    with `lowbitrl demo`,
    `lowbitrl plan demo --recipe recipes/quads.toml` or `lowbitrl doctor`.""",
)
console = Console(soft_wrap=True)
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
RecipeFile = Annotated[Path, typer.Argument(help="a TOML recipe, as in recipes/*.toml, or a run's folder")]


@app.command(context_settings=PASS_THROUGH)
def train(
    context: typer.Context,
    recipe: RecipeFile,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint")] = False,
    restarts: Annotated[
        int,
        typer.Option(min=0, help="run in a process of its own, resumed so often if it is killed or hangs"),
    ] = 0,
) -> None:
    """Run a recipe. Any setting can be overridden: --trainer.steps 50 --recipe.residual 1.0.

    On several GPUs: torchrun --nproc-per-node 2 -m lowbitrl train recipe.toml.
    """
    from lowbitrl.config import load_config
    from lowbitrl.distributed import ranks

    if restarts:
        raise SystemExit(_supervised(recipe, context.args, resume, restarts))
    from lowbitrl.diagnose.report import write_report
    from lowbitrl.loop import train as run

    with ranks.together():
        config = load_config(recipe, context.args)
        folder = run(config, resume or _restarted(Path(config.out)), say=_say)
        if ranks.is_first():
            _say(f"report {write_report([folder])}")


@app.command(context_settings=PASS_THROUGH)
def evaluate(
    context: typer.Context,
    recipe: RecipeFile,
    checkpoint: Annotated[Path | None, typer.Option(help="a run's checkpoint folder")] = None,
) -> None:
    """Score a recipe's model on its held-out prompts, as the rollout engine serves it."""
    from lowbitrl.assemble import evaluate_recipe
    from lowbitrl.config import load_config

    result = evaluate_recipe(load_config(recipe, context.args), checkpoint, say=_say)
    figures = result.metrics()
    for name, value in figures.items():
        if not name.endswith("_error"):
            error = figures.get(f"{name}_error")
            _say(
                f"{name:28} {value:.4f}" + (f" +- {error:.4f} (standard error)" if error is not None else "")
            )


@app.command(context_settings=PASS_THROUGH)
def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="checkpoint folder, config's .json, hub id, or demo")],
    recipe: Annotated[Path | None, typer.Option(help="a TOML recipe; needed without --size")] = None,
    size: Annotated[
        bool, typer.Option("--size", help="memory and bytes a step, from the config alone")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(help="with --size: processes of torchrun; 1 by default")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="with --size: of a prompt; 512 by default")
    ] = None,
) -> None:
    """Print every module of a model with its formats on both sides, or why it is left alone.

    With --size: what learner and rollout hold and what a step moves, for a recipe part by part, without one for
    every rollout precision (docs/scale.md).

    Takes overrides as train does: --recipe.residual 0.5.
    """
    from lowbitrl.config import load_config, unnamed_run
    from lowbitrl.models import load_skeleton
    from lowbitrl.quant import resolve

    if size:
        from lowbitrl.sizing import SizeRequest, size_lines

        config = load_config(recipe, context.args) if recipe else unnamed_run(context.args)
        asked = {k: v for k, v in {"ranks": ranks, "prompt_tokens": prompt_tokens}.items() if v is not None}
        request = SizeRequest.of(config=config, **asked)
        for line in size_lines(model, request, every_precision=recipe is None):
            typer.echo(line)
        return
    if ranks is not None or prompt_tokens is not None:
        raise ValueError(
            "--ranks and --prompt-tokens are for plan --size: a plan itself does not depend on them"
        )
    if recipe is None:
        raise ValueError(
            "plan prints what a recipe does to a model: give --recipe recipes/quads.toml, or --size"
        )
    console.print(
        resolve(load_config(recipe, context.args).recipe, load_skeleton(model)).table(),
        highlight=False,
        markup=False,
    )


@app.command(context_settings=PASS_THROUGH)
def quantize(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="checkpoint folder, hub id, or demo")],
    recipe: Annotated[Path, typer.Option(help="a TOML recipe; only its recipe section is used")],
    out: Annotated[Path, typer.Option(help="folder to write; must not exist, or be empty")],
    layout: Annotated[str, typer.Option(help="or modelopt (NVFP4 only)")] = "compressed-tensors",
    calibration: Annotated[Path | None, typer.Option(help="texts, one a line: static W4A4 scales")] = None,
) -> None:
    """Write a model's weights, encoded by a recipe, as a checkpoint that vLLM and transformers load.

    Takes overrides as train does: --recipe.rollout fp8. A run's weights: lowbitrl export.
    """
    from lowbitrl.checkpoints import quantize_checkpoint
    from lowbitrl.config import load_config

    texts = calibration.read_text().splitlines() if calibration else ()
    texts = [text for text in texts if text.strip()]
    written = quantize_checkpoint(
        model, load_config(recipe, context.args).recipe, out, layout, calibration=texts
    )
    for line in (written.plan.summary(), *written.notes, f"checkpoint {written.folder}"):
        _say(line)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="a run folder, as train wrote it")],
    out: Annotated[Path, typer.Option(help="folder to write; must not exist, or be empty")],
    step: Annotated[str, typer.Option(help="last, best (held-out pass@1), or a number")] = "last",
    layout: Annotated[str, typer.Option(help="bf16, compressed-tensors or modelopt")] = "bf16",
    recipe: Annotated[Path | None, typer.Option(help="a TOML recipe in place of the run's own")] = None,
) -> None:
    """Write a run's checkpoint as a Hugging Face checkpoint, in BF16 or in the bytes that the run served."""
    from lowbitrl.export import export_run

    for line in (*export_run(run, out, step, layout, recipe), f"checkpoint {out}"):
        _say(line)


@app.command(context_settings=PASS_THROUGH)
def diagnose(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="checkpoint folder, hub id, or demo")] = "demo",
    recipes: Annotated[
        list[Path] | None, typer.Option(help="TOML recipes, a.toml b.toml; the first is diagnosed")
    ] = None,
    rollout: Annotated[str, typer.Option(help="rollout precision, where no recipe is given")] = "nvfp4",
    learner: Annotated[str, typer.Option(help="alignment, where no recipe is given")] = "weights",
    residual: Annotated[float, typer.Option(help="residual, where no recipe is given")] = 0.0,
    prompts: Annotated[
        Path | None, typer.Option(help=".jsonl, .parquet, or .txt with a prompt a line")
    ] = None,
    task: Annotated[str | None, typer.Option(help="a reasoning-gym dataset that gives the prompts")] = None,
    engine: Annotated[str, typer.Option(help="what samples; vllm scores its tokens everywhere")] = "embedded",
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("runs/diagnosis"),
    tokens: Annotated[int, typer.Option(help="sampled tokens to measure on, about")] = 2000,
    max_tokens: Annotated[int, typer.Option(help="longest response")] = 128,
    temperature: Annotated[float, typer.Option(help="of sampling")] = 1.0,
    seed: Annotated[int, typer.Option(help="of sampling and noise")] = 0,
    device: Annotated[str, typer.Option(help="auto takes CUDA where there is one")] = "auto",
    dtype: Annotated[str, typer.Option(help="compute dtype")] = "bfloat16",
) -> None:
    """How far sampler and learner are apart on a model, which part comes from where, and what would help.

    Takes whole recipes, without overrides.
    """
    from lowbitrl.diagnose.command import Request, recipe_files, run_diagnose
    from lowbitrl.diagnose.run import DiagnoseConfig
    from lowbitrl.engines import pick_device
    from lowbitrl.quant import Recipe

    recipe = Recipe(rollout=rollout, learner=learner, residual=residual)  # type: ignore[arg-type]
    files = recipe_files(recipes or (), context.args)
    request = Request(
        model=model,
        out=out,
        recipe=recipe,
        recipes=files,
        prompts=prompts,
        task=task,
        engine=engine,
        dtype=dtype,
    )
    config = DiagnoseConfig(
        tokens=tokens,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        keep_tokens=min(DiagnoseConfig().keep_tokens, tokens // 3),
    )
    run_diagnose(request, config, pick_device(device), _say)


@app.command(context_settings=PASS_THROUGH)
def compare(
    arguments: Annotated[list[str], typer.Argument(help="TOML recipes, then overrides for all of them")],
    out: Annotated[Path, typer.Option(help="folder of the runs and their report")] = Path("runs/compare"),
    seeds: Annotated[str, typer.Option(help="0,1,2 or 0-2; each recipe runs with each")] = "0",
    jobs: Annotated[int, typer.Option(help="runs at a time; 0: one on a CPU, what fits on a GPU")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="continue the runs that out holds")] = False,
) -> None:
    """Run recipes with the same seeds and prompts, and report on them side by side."""
    from lowbitrl.compare import parse_seeds, run_compare

    first = next((i for i, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    files = [Path(word) for word in arguments[:first]]
    _say(f"report {run_compare(files, out, parse_seeds(seeds), arguments[first:], jobs, resume, say=_say)}")


@app.command()
def experiment(
    file: Annotated[Path, typer.Argument(help="an experiment's TOML: base recipe, seeds, variants")],
    out: Annotated[Path, typer.Option(help="folder of metrics, statistics and figures")],
    only: Annotated[list[str] | None, typer.Option(help="a variant; repeatable; all by default")] = None,
    seeds: Annotated[str, typer.Option(help="0,1,2 or 0-2; by default the file's")] = "",
    jobs: Annotated[int, typer.Option(help="runs at a time; 0: one on a CPU, what fits on a GPU")] = 0,
    redraw: Annotated[bool, typer.Option("--redraw", help="from the metrics that out holds")] = False,
) -> None:
    """Run the variants of an experiment that are missing, and say which differ beyond their seeds."""
    from lowbitrl.compare import parse_seeds
    from lowbitrl.experiment import run_experiment

    chosen = parse_seeds(seeds) if seeds else ()
    _say(
        f"statistics {run_experiment(file, out, only=only or (), seeds=chosen, jobs=jobs, redraw=redraw, say=_say)}"
    )


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders side by side, or one diagnosis")],
) -> None:
    """Redraw figures and report.html from the numbers of runs, finished or not, or of a diagnosis."""
    from lowbitrl.diagnose.report import write_report
    from lowbitrl.diagnose.report_diagnosis import draw_diagnosis

    if len(runs) == 1 and (runs[0] / "diagnosis.json").is_file():
        _say(f"report {draw_diagnosis(runs[0])}")
    else:
        _say(f"report {write_report(runs)}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder of the two runs and their report")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(help="training steps of each run; 0 takes the recipes' own")] = 0,
    recipes: Annotated[Path, typer.Option(help="folder of demo-quads.toml and demo-naive.toml")] = Path(
        "recipes"
    ),
) -> None:
    """Train SmolLM2-135M twice with 4-bit rollouts, QUADS and naive, and compare."""
    from lowbitrl.demo import run_demo

    run_demo(out, steps, recipes, say=_say)


@app.command()
def upcycle(
    dense: Annotated[str, typer.Argument(help="checkpoint folder, hub id, or demo")],
    out: Annotated[Path, typer.Option(help="folder of the new checkpoint")],
    experts: Annotated[int, typer.Option(help="copies of every MLP")] = 8,
    top_k: Annotated[int, typer.Option(help="experts a token takes")] = 2,
    noise: Annotated[
        float, typer.Option(help="noise on each expert, in standard deviations of its weights")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="of the router and the noise")] = 0,
) -> None:
    """Make a dense checkpoint a mixture of experts that computes the same function."""
    from lowbitrl.upcycle import upcycle_checkpoint

    _say(f"checkpoint {upcycle_checkpoint(dense, out, experts, top_k, noise, seed)}")


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="kernels, rollout, step or sync")],
    out: Annotated[Path, typer.Option(help="folder of rows, findings and figures")] = Path("runs/bench"),
    only: Annotated[list[str] | None, typer.Option(help="one benchmark of the suite; repeatable")] = None,
) -> None:
    """Measure the library next to the limits of the device it runs on."""
    from lowbitrl.bench.command import run_suite

    run_suite(suite, out, only or ())
    _say(f"results {out}")


@app.command()
def settings(
    section: Annotated[str, typer.Argument(help="top, model, task, recipe, ...; all by default")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="as docs/settings.md")] = False,
) -> None:
    """List what a recipe can set: type, default, bounds and meaning of each key."""
    from lowbitrl import settings as listing

    if markdown:
        typer.echo(listing.markdown(), nl=False)
        return
    for name in [section] if section else listing.sections():
        for setting in listing.settings(name):
            _say(f"{setting.name} = {setting.default}   {setting.type}  {setting.bounds}".rstrip())
            _say(f"    {setting.meaning}")


verl_app = typer.Typer(no_args_is_help=True, help="verl as the trainer: docs/verl.md.", rich_markup_mode=None)
app.add_typer(verl_app, name="verl")


@verl_app.command("overrides", context_settings=PASS_THROUGH)
def verl_overrides(
    context: typer.Context,
    recipe: RecipeFile,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", help="where the resolved plan goes; by default in the recipe's out"),
    ] = None,
) -> None:
    """Print a recipe as verl's Hydra overrides, one a line, and write its plan to a file that they name.

    python -m verl.trainer.main_ppo data.train_files=... $(lowbitrl verl overrides recipe.toml)
    Takes overrides as train does: --recipe.residual 1.0.
    """
    from lowbitrl.config import load_config
    from lowbitrl.integrations.verl.overrides import overrides

    config = load_config(recipe, context.args)
    for line in overrides(config, plan_file or Path(config.out) / "verl-plan.json"):
        typer.echo(line)


@verl_app.command("check")
def verl_check() -> None:
    """Prove that every piece of ours is active in the verl of this environment; exit code 1 where one is not."""
    from lowbitrl.integrations.verl.check import check

    findings = check()
    for finding in findings:
        _say(finding.line())
    if any(finding.needed and not finding.active for finding in findings):
        raise SystemExit(1)


@app.command()
def doctor() -> None:
    """Say what can run here, and why the rest can't."""
    from lowbitrl.doctor import diagnose_machine

    for line in diagnose_machine():
        console.print(line, highlight=False)


def _supervised(recipe: Path, overrides: list[str], resume: bool, restarts: int) -> int:
    from lowbitrl.config import load_config
    from lowbitrl.supervise import supervise

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(
            "--restarts under torchrun: torchrun restarts its processes itself, with --max-restarts"
        )
    command = [sys.executable, "-m", "lowbitrl", "train", str(recipe), *overrides]
    out = Path(load_config(recipe, overrides).out)
    return supervise([*command, "--resume"] if resume else command, out, restarts, _say)


def _restarted(folder: Path) -> bool:
    """Whether torchrun has started these processes again (--max-restarts), after a run had begun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and (folder / "config.json").is_file()


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False)


def main() -> None:
    """Entry point: errors that a user can mend are one red message, everything else is a traceback."""
    # "Loading weights" bars of the libraries below would bury what is said here.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        _complain(f"error: {error}")
        raise SystemExit(2) from error
    except RuntimeError as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        _complain(f"error: {error}\n{notes}")
        raise SystemExit(1) from error


def _complain(message: str) -> None:
    """Print an error once, whichever of several processes met it first: it stops them all."""
    if "RANK" in os.environ:
        from lowbitrl.distributed import ranks

        if not ranks.first_to_fail():
            return
        message = f"rank {ranks.rank()}: {message}" if ranks.rank() else message
    console.print(message, style="red", highlight=False, markup=False)
