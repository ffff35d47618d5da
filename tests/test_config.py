import pytest

from lowbitrl.config import ConfigError, load_config, parse_overrides, validate

TASK = {"task": {"name": "chain_sum", "scorer": "last-number"}}


def test_sections_are_the_parts_own_configs(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('seed = 3\n[task]\nname = "chain_sum"\n[recipe]\nrollout = "nvfp4"\nresidual = 0.5\n')
    config = load_config(
        path,
        [
            "--trainer.steps",
            "7",
            "--recipe.residual=1.0",
            "--out",
            "runs/x",
            "--optimizer.betas",
            "[0.8, 0.9]",
        ],
    )
    assert (config.seed, config.trainer.steps, config.recipe.residual, config.out) == (3, 7, 1.0, "runs/x")
    assert config.optimizer.betas == (0.8, 0.9)
    assert validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"trainer": {"stpes": 3}}, r"trainer\.stpes is not a known key; did you mean 'steps'\?"),
        ({"recipe": {"residul": 0.5}}, r"recipe\.residul is not a known key; did you mean 'residual'\?"),
        ({"recpie": {}}, r"recpie is not a known key; did you mean 'recipe'\?"),
        ({"task": {"name": "chain_sum", "zzz": 1}}, r"task\.zzz is not a known key; known keys: "),
        ({"trainer": {"steps": "many"}}, r"trainer\.steps = 'many'"),
        ({"trainer": {"steps": 0}}, r"trainer\.steps = 0: .*greater than or equal to 1"),
        ({"recipe": {"rollout": "fp8", "residual": 0.5}}, r"recipe: residual=0\.5 repairs FP4 activations"),
        (
            {"recipe": {"rollout": "int8", "activation_scale": "static"}},
            r"recipe: activation_scale='static' needs",
        ),
        ({"recipe": {"activation_scale": "tensor"}}, r"recipe\.activation_scale"),
        ({"objective": {"name": "tbop"}}, r"objective: .*tbpo"),
        ({"objective": {"parameters": {"eps_hihg": 1}}}, r"objective: .*eps_high"),
        ({"rollout": {"samples": 1}}, r"rollout\.samples=1 makes every group's advantage 0"),
        (
            {"trainer": {"mini_batch": 7}},
            r"mini_batch=7 does not divide the batch of 256.*: set it to 8, or to 0",
        ),
        (
            {"rollout": {"resample": 2}},
            r"rollout\.resample=2 fills up.*set objective\.drop_uninformative=true",
        ),
        ({"rollout": {"resample": -1}}, r"rollout\.resample = -1: .*greater than or equal to 0"),
        (
            {"objective": {"overlong_buffer": 129}},
            r"overlong_buffer=129 is more than rollout\.max_tokens=128",
        ),
        ({"objective": {"overlong_coef": 0}}, r"objective\.overlong_coef = 0"),
        ({"objective": {"kl_in": "both"}}, r"objective\.kl_in = 'both'"),
        ({"objective": {"entropy_coef": -1}}, r"objective\.entropy_coef = -1"),
        ({"objective": {"max_tokens": 9}}, r"objective: max_tokens belongs to 'seq-mean-token-sum-norm'"),
        ({"objective": {"aggregate": "seq-mean-token-sum-norm"}}, r"objective: .*needs max_tokens"),
        (
            {"objective": {"module": "no.such"}},
            r"objective: module: importing 'no\.such' failed with ModuleNotFound",
        ),
        ({"evaluation": {"k": 9}}, r"k=9 of pass@k is more than samples=4"),
        ({"rollout": {"temperature": float("inf")}}, r"rollout\.temperature = inf: .*finite"),
        ({"rollout": {"temperature": 1e-40}}, r"rollout\.temperature = 1e-40: .*0\.00001"),
        ({"sentinel": {"factor": float("nan")}}, r"sentinel\.factor = nan"),
        ({"objective": {"correction": "tsi"}}, r"objective: unknown correction 'tsi'; did you mean 'tis'"),
        ({"optimizer": {"betas": [1.5, 0.9]}}, r"optimizer\.betas\.0 = 1\.5: .*less than 1"),
        ({"model": {"device": "gpu"}}, r"model\.device = 'gpu': .*auto\|cpu\|cuda"),
        ({"threads": 10**12}, r"threads = 1000000000000: .*1024"),
        ({"out": ""}, r"out = ''"),
        ({"out": 2024}, r"out = 2024: .*quote it twice on a command line, as in --out '\"2024\"'"),
        (
            {"task": {"name": "chain_sum", "held_out": 0}, "evaluation": {"every": 5}},
            r"evaluates all held-out prompts, task\.held_out=0 keeps fewer; raise task\.held_out",
        ),
        ({"evaluation": {"every": 5, "count": 65}}, r"evaluates 65 held-out prompts, task\.held_out=64"),
        (
            {"recipe": {"rollout": "nvfp4", "residual": 0.5}, "rollout": {"scheduler": "continuous"}},
            r"use scheduler='batch' or recipe\.residual_scope='token'",
        ),
    ],
)
def test_mistakes_are_named_with_the_remedy(data, message):
    with pytest.raises(ConfigError, match=message):
        validate(TASK | data)


def test_a_missing_task_is_named():
    with pytest.raises(
        ConfigError, match=r"task is missing; a recipe needs a \[task\] with a name or a path"
    ):
        validate({})


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 3")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml cannot be read as TOML: 'utf-8'"):
        load_config(tmp_path / "binary.toml")
    with pytest.raises(
        ConfigError, match=r"without config\.json, .*one recipe file: it has bad\.toml, binary\.toml"
    ):
        load_config(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"without config\.json, so it holds no run.*recipes ship in"):
        load_config(tmp_path / "empty")
    for nothing in ("", "\n\n", "# to do\n"):
        (tmp_path / "empty.toml").write_text(nothing)
        with pytest.raises(
            ConfigError, match=r"empty\.toml sets nothing; a recipe needs at least a \[task\]"
        ):
            load_config(tmp_path / "empty.toml")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as a run's settings"):
        load_config(tmp_path)


def test_recipes_are_utf8_with_or_without_a_byte_order_mark(tmp_path):
    text = 'out = "runs/\N{SNOWMAN}"\n[task]\nname = "chain_sum"\n'
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "r.toml").write_text(text, encoding=encoding)
        assert load_config(tmp_path / "r.toml").out == "runs/\N{SNOWMAN}"


def test_overrides_are_toml_values_or_strings():
    pairs = parse_overrides(
        ["--a.b", "3", "--a.c=true", "--a.d", "word", "--a.e", "[1, 2]", "--seed", "-1", "--a.g", "1e-5"]
    )
    assert dict(pairs) == {"a.b": 3, "a.c": True, "a.d": "word", "a.e": [1, 2], "seed": -1, "a.g": 1e-5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps", "3"], "is not an option"),
        (["--a.b"], "needs a value"),
        (["--a.b", "--c.d", "1"], "needs a value"),
        (["--resum"], r"--resum is not an option; did you mean --resume\?"),
        (["--resum", "true"], r"--resum is not an option; did you mean --resume\?"),
        (["--steps", "3"], r"--steps is not an option; did you mean --trainer\.steps\?"),
        (["--sede", "3"], r"--sede is not an option; did you mean --seed\?"),
        (["--samples", "3"], r"did you mean --evaluation\.samples or --rollout\.samples\?"),
        (["--xyzzy", "3"], r"--xyzzy is not an option; see --help"),
    ],
)
def test_overrides_that_are_none(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse_overrides(arguments)


def test_overriding_a_value_as_if_it_were_a_section(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('seed = 3\n[task]\nname = "chain_sum"\n')
    with pytest.raises(ConfigError, match="seed is a value, not a section"):
        load_config(path, ["--seed.x", "1"])


@pytest.mark.parametrize("value", ["3", "true", "fast", "[1]"])
def test_overriding_a_section_as_if_it_were_a_value(tmp_path, value):
    path = tmp_path / "r.toml"
    path.write_text('[task]\nname = "chain_sum"\n[recipe]\nrollout = "fp8"\n')
    for section in ("rollout", "recipe"):
        with pytest.raises(
            ConfigError, match=rf"--{section} .*: {section} is a section, not a value; set one of"
        ):
            load_config(path, [f"--{section}", value])
    assert load_config(path, ["--rollout", "{samples = 3}"]).rollout.samples == 3
