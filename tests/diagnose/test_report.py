"""Reports: numbers first, one file, sorted and seen in a real browser where one is installed."""

import json
import re
import shutil
import subprocess
import tomllib

import matplotlib.image
import pytest

from lowbitrl.diagnose import page
from lowbitrl.diagnose.figures import dark
from lowbitrl.diagnose.report import summary, write_report
from lowbitrl.diagnose.report_diagnosis import draw_diagnosis, lines, recipe_toml, write_diagnosis
from lowbitrl.diagnose.run import DiagnoseConfig, diagnose
from lowbitrl.quant import Recipe
from tests.diagnose.lab_helpers import PROMPTS, load

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
# Runs in the page under test and leaves what it saw as text.
PROBE = """
<script>addEventListener("load",()=>{const t=document.querySelector("table"),b=t.querySelectorAll("th button")[1];
const column=()=>[...t.tBodies[0].rows].map(r=>r.cells[1].dataset.value);
b.click();const up=column();b.click();const down=column();
const seen={tables:document.querySelectorAll("table").length,up,down,
images:[...document.images].map(i=>[i.naturalWidth,i.getBoundingClientRect().width>0]),
overflow:document.documentElement.scrollWidth-innerWidth,width:innerWidth,
paper:getComputedStyle(document.body).backgroundColor,source:document.images[0].currentSrc.length};
const out=document.createElement("pre");out.id="probe";out.textContent=JSON.stringify(seen);document.body.append(out)})
</script></body>"""


def run(name, start, steps):
    rows = [{"step": -1, "eval/pass@1": 0.1}]
    for step in range(steps):
        row = {
            "step": step,
            "reward/mean": start + 0.01 * step,
            "mismatch/abs_mean": 0.5,
            "mismatch/abs_p99": 2.0,
        }
        row |= {
            "actor/pg_clipfrac": 0.1,
            "actor/entropy": 1.0,
            "actor/grad_norm": 2.0,
            "timing/tokens_per_s": 100.0,
        }
        rows.append(row | {f"timing/{phase}": 0.5 for phase in ("gen", "update", "publish", "eval")})
    rows[-1]["eval/pass@1"] = start
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def runs(tmp_path):
    """Two recipes, one of them with two seeds."""
    folders = []
    for name, start, steps in (("quads-seed0", 0.5, 6), ("quads-seed1", 0.7, 5), ("naive", 0.1, 6)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(run(name, start, steps))
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def found():
    config = DiagnoseConfig(
        tokens=400, max_tokens=24, amplify_tokens=60, layer_tokens=60, keep_tokens=60, samples=4
    )
    numbers = diagnose(load, PROMPTS, Recipe(rollout="nvfp4", learner="weights"), config)
    return json.loads(json.dumps(numbers))


def test_everything_asked_for_is_in_the_numbers(found):
    assert found["faults"] == []
    assert found["sampled"]["tokens"] >= 400
    assert set(found["mismatch"]["own"]["total"]) == {
        "mean", "p99", "max", "k3", "token_mult_prob_error", "outside", "effective_share"
    }  # fmt: skip
    assert {"faults", "sampling", "decomposition", "tables", "amplification"} < set(found["seconds"])
    names = [row["name"] for row in found["candidates"]]
    assert found["recommendation"]["name"] in names
    assert "nvfp4, full, residual 0.5 per token" in names
    assert len(found["positions"]["by_position"]) == 12


def test_figures_come_from_the_json_alone(found, tmp_path):
    page_file = write_diagnosis(found, tmp_path)
    figures = sorted(p.name for p in (tmp_path / "figures").glob("*.png"))
    assert len(figures) == 14
    before = page_file.read_text()
    numbers = json.loads((tmp_path / "diagnosis.json").read_text())
    assert numbers == found
    shutil.rmtree(tmp_path / "figures")
    (tmp_path / "figures").mkdir()
    assert draw_diagnosis(tmp_path).read_text() == before
    numbers["recommendation"]["reasons"] = ["because of <b>this</b> & that"]
    (tmp_path / "diagnosis.json").write_text(json.dumps(numbers))
    assert "because of &lt;b&gt;this&lt;/b&gt; &amp; that" in draw_diagnosis(tmp_path).read_text()
    recommended = tomllib.loads((tmp_path / "recommended.toml").read_text())["recipe"]
    assert Recipe(**recommended) == Recipe(**found["recommendation"]["recipe"])


def test_layers_to_keep_come_as_a_recipe(found, tmp_path):
    step = {"layer": "model.layers.1", "gain": [0.2, 0.1, 0.3], "mean": [0.3, 0.2, 0.4], "bytes": 1000}
    kept = found["keep"] | {"greedy": [step], "patterns": ["lm_head", "model.layers.1.*"]}
    shown = write_diagnosis(found | {"keep": kept}, tmp_path).read_text()
    recipe = Recipe(**tomllib.loads((tmp_path / "keep.toml").read_text())["recipe"])
    assert list(recipe.keep) == ["lm_head", "model.layers.1.*"]
    assert (recipe.rollout, recipe.learner) == ("nvfp4", "weights")
    assert "model.layers.1.*" in shown
    none = tmp_path / "none"
    write_diagnosis(found | {"keep": kept | {"greedy": [], "patterns": []}}, none)
    assert not (none / "keep.toml").exists()


def test_the_headline_is_total_floor_recommendation_and_faults(found, tmp_path):
    shown = write_diagnosis(found, tmp_path).read_text()
    total, floor = found["mismatch"]["own"]["total"]["mean"][0], found["floor"][0]
    best = next(c for c in found["candidates"] if c["name"] == found["recommendation"]["name"])
    values = re.findall(r'<div class="tile">[^<]*<b>([^<]*)</b>', shown)
    assert values == [f"{total:.3f} nats", f"{floor:.3f} nats", f"{best['mean'][0]:.3f} nats", "0"]


def test_the_short_form_says_faults_first_and_the_recommendation_last(found):
    words = list(lines(found))
    assert words[0].startswith("no fault found")
    assert f"Use {found['recommendation']['name']}." in words
    assert re.match(r"\d+ s: sampling \d+, faults", words[-1])
    broken = found | {"faults": [{"fault": "wrong bytes", "where": "up_proj", "evidence": "2 not 1"}]}
    assert next(iter(lines(broken))) == "FAULT wrong bytes: up_proj (2 not 1)"


def test_a_recipe_survives_toml():
    recipe = {"rollout": "nvfp4", "residual": 0.5, "residual_sites": {"w2": 0.25}, "keep": ["lm_head", "a.*"]}
    assert tomllib.loads(recipe_toml(recipe))["recipe"] == recipe


def test_summary_and_report_of_runs_with_seeds(runs):
    file = write_report(runs, runs[0].parent)
    written = json.loads((file.parent / "summary.json").read_text())
    assert written["runs"]["quads-seed0"]["reward, last"] == pytest.approx(0.53)
    assert written["runs"]["quads-seed0"]["seconds a step"] == 2.0
    assert written["recipes"]["quads"]["held-out pass@1, last"] == pytest.approx([0.6, 0.5, 0.7])
    assert written["recipes"]["naive"]["steps"] == [6, 6, 6]
    text = file.read_text()
    assert "Recipes: mean over seeds" in text
    assert not re.search(r"(src|href|srcset)=.?https?:", text)


def test_a_run_that_goes_on_is_reported_as_far_as_it_is(runs):
    metrics = runs[0] / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    write_report([runs[0]])
    assert json.loads((runs[0] / "summary.json").read_text())["runs"]["quads-seed0"]["steps"] == 5
    metrics.write_text(json.dumps({"step": -1, "eval/pass@1": 0.1}) + "\n")
    assert summary({"new": [{"step": -1, "eval/pass@1": 0.1}]})["new"]["steps"] == 0
    write_report([runs[0]])
    metrics.write_text("")
    with pytest.raises(FileNotFoundError, match=r"no metrics\.jsonl with a complete line"):
        write_report([runs[0]])


def test_light_and_dark_figures_differ_in_paper(runs):
    write_report(runs, runs[0].parent)
    light = runs[0].parent / "figures" / "training.png"
    corners = [matplotlib.image.imread(p)[0, 0, :3].mean() for p in (light, dark(light))]
    assert corners[0] > 0.95
    assert corners[1] < 0.15


def test_cells_keep_their_numbers_for_sorting_and_escape_their_words():
    made = page.table([{"a": "<x>", "b": 0.123456789, "c": [0.5, 0.25, 0.75]}, {"a": "y", "b": None}])
    assert "<x>" not in made
    assert 'data-value="0.123456789">0.1235<' in made
    assert 'data-value="0.5">0.5 <small>[0.25, 0.75]' in made
    assert made.count('data-value="">-') == 2


def look(file, tmp_path, *options, width=1200):
    """What a headless browser sees, and its console errors."""
    probed = tmp_path / "probed.html"
    probed.write_text(file.read_text().replace("</body>", PROBE))
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},900",
        *options,
    ]
    command += [
        f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr",
        "--dump-dom",
        probed.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seen = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert seen, done.stderr[-2000:]
    return json.loads(seen.group(1)), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no chromium here (Debian: apt-get install chromium)")
def test_in_a_browser_tables_sort_figures_show_and_nothing_is_wider_than_a_phone(found, runs, tmp_path):
    reports = {
        "diagnosis": write_diagnosis(found, tmp_path),
        "runs": write_report(runs, runs[0].parent / "all"),
    }
    for file, tables, figures in ((reports["diagnosis"], 9, 7), (reports["runs"], 2, 2)):
        seen, errors = look(file, tmp_path)
        assert errors == []
        assert seen["tables"] >= tables
        assert len(seen["images"]) == figures
        assert all(width > 400 and visible for width, visible in seen["images"])
        values = [float(v) for v in seen["up"]]
        assert values == sorted(values)
        assert seen["down"] == seen["up"][::-1]
        assert len(values) > 1
        phone, errors = look(file, tmp_path, width=390)
        assert errors == []
        assert phone["width"] <= 500
        assert phone["overflow"] <= 0
    light, _ = look(reports["runs"], tmp_path)
    night, _ = look(reports["runs"], tmp_path, "--blink-settings=preferredColorScheme=0")
    assert light["paper"] == "rgb(255, 255, 255)"
    assert night["paper"] == "rgb(24, 26, 27)"
    assert light["source"] != night["source"]
