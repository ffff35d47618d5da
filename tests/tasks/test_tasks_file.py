"""Tasks from files: rows in, splits apart, rewards held to their promise."""

import json
import math
import sys
from collections import Counter

import datasets
import numpy as np
import pytest
from pyarrow import Table, parquet

from lowbitrl.tasks import TaskConfig, make_task
from lowbitrl.tasks.rewards import call_reward, import_reward

ROWS = [{"prompt": f"What is {i} + 1?", "answer": i + 1, "level": i % 3} for i in range(20)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with prompts.jsonl, and nothing of it left importable afterwards."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_rewards", None)


def task(**fields):
    return make_task(
        TaskConfig(**{"path": "prompts.jsonl", "scorer": "last-number", "held_out": 4, **fields})
    )


def test_rows_become_prompts(folder):
    prompts = {p.id: p for p in task(held_out=0, prefill="{level}:").prompts("train", 0, 20)}
    seven = prompts["prompts.jsonl/7"]
    assert seven.messages == ({"role": "user", "content": "What is 7 + 1?"},)
    assert (seven.answer, seven.prefill, seven.metadata["level"]) == ("8", "1:", 1)


def test_parquet_reads_as_jsonl_does(folder):
    parquet.write_table(Table.from_pylist(ROWS), folder / "prompts.parquet")
    from_parquet = task(path="prompts.parquet").prompts("train", 0, 30)
    assert [p.messages for p in from_parquet] == [p.messages for p in task().prompts("train", 0, 30)]


def test_splits_are_apart_and_epochs_complete(folder):
    reader = task(seed=3)
    held_out = {p.id for p in reader.prompts("held_out", 0, 4)}
    epochs = [[p.id for p in reader.prompts("train", 16 * epoch, 16)] for epoch in range(3)]
    assert len(held_out) == 4
    assert all(Counter(epoch) == Counter(epochs[0]) and not held_out & set(epoch) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert task(seed=3).prompts("train", 37, 1) == reader.prompts("train", 37, 1)


def test_another_seed_changes_the_order_not_the_held_out_prompts(folder):
    assert task(seed=1).prompts("held_out", 0, 4) == task(seed=2).prompts("held_out", 0, 4)
    assert task(seed=1).prompts("train", 0, 16) != task(seed=2).prompts("train", 0, 16)


def test_duplicates_of_a_held_out_prompt_leave_training_too(folder):
    with open("prompts.jsonl", "a") as file:
        file.write("\n".join(json.dumps(row) for row in ROWS))
    report = task().split_report()
    assert report == {"held_out": 4, "train": 32, "train_distinct": 16, "overlap": 0}


def test_messages_and_system(folder):
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "1"},
    ]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": chat, "answer": "1"}))
    prompt = task(path="chat.jsonl", held_out=0, system="S").prompts("train", 0, 1)[0]
    assert list(prompt.messages) == [{"role": "system", "content": "S"}, *chat]


def test_a_reward_in_the_working_folder_is_given_the_whole_row(folder):
    (folder / "my_rewards.py").write_text(
        "def near(completion, prompt):\n    return len(completion) / 10 + prompt['level'] + 0.0 * len(prompt['id'])\n"
    )
    reader = task(scorer=None, reward="my_rewards:near")
    prompt = next(p for p in reader.prompts("train", 0, 16) if p.metadata["level"] == 2)
    assert reader.scorer == "reward"
    assert reader.reward(prompt, "abcde") == 2.5
    assert reader.scores(prompt, str(prompt.answer))["last-number"] == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "none.jsonl"}, r"'none.jsonl': no such file in"),
        ({"path": "prompts.csv"}, r"no such file"),
        ({"scorer": None}, r"'prompts.jsonl' has no reward: set reward = "),
        ({"scorer": "reasoning-gym"}, r"needs a reasoning-gym name"),
        ({"reward": "a:b"}, r"keep one of them"),
        ({"name": "gcd"}, r"give exactly one"),
        ({"held_out": 20}, r"held_out = 20, 'prompts.jsonl' has 20 different prompts.*below 20"),
        ({"options": {"split": "train"}}, r"a local file has none"),
        ({"prefill": True}, r"row 0: .*KeyError: 'prefill'; the row has \['answer', 'level', 'prompt'\]"),
        ({"chat": False, "system": "S"}, r"needs the chat template"),
    ],
)
def test_errors_of_the_config(folder, fields, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        task(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no rows"),
        ("\n\n", r"has no rows"),
        ('{"prompt": "a", "answer": 1}\n{oops', r"line 2 is not JSON"),
        ("[1]", r"line 1 is \[1\], not an object"),
        ('{"question": "a"}', r"row 0: .*needs a number as answer, not None"),
        ('{"prompt": "a", "answer": "Yes"}', r"row 0: .*needs a number as answer, not 'Yes'"),
        (
            '{"question": "a", "answer": 1}',
            r"row 0 has neither prompt nor messages; it has \['answer', 'question'\]",
        ),
        ('{"prompt": "", "answer": 1}', r"row 0 has neither prompt nor messages"),
        ('{"messages": [{"role": "user"}], "answer": 1}', r"row 0: messages must be a list"),
        ('{"messages": {"role": "user"}, "answer": 1}', r"row 0: messages must be a list"),
    ],
)
def test_errors_of_the_rows(folder, text, message):
    (folder / "bad.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        task(path="bad.jsonl", held_out=0)


def test_files_that_are_not_what_their_name_says(folder):
    (folder / "bad.parquet").write_text("PAR1 not")
    with pytest.raises(ValueError, match=r"'bad.parquet' is not parquet"):
        task(path="bad.parquet")
    (folder / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"line 1 is not JSON"):
        task(path="latin.jsonl")


def test_a_hub_dataset_is_asked_for_with_the_options(folder, monkeypatch):
    asked = []

    def load_dataset(path, **options):
        asked.append((path, options))
        if path == "no/such":
            raise FileNotFoundError("offline")
        rows = datasets.Dataset.from_list(ROWS)
        return rows if options["split"] else datasets.DatasetDict(train=rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = task(path="owner/sums", options={"name": "main"}).prompts("train", 0, 1)
    assert asked == [("owner/sums", {"split": "train", "name": "main"})]
    assert rows[0].metadata in ROWS
    with pytest.raises(
        OSError, match=r"'no/such' is no local file and load_dataset.* failed: offline; check"
    ):
        task(path="no/such")
    with pytest.raises(ValueError, match=r"give no single split; name one"):
        task(path="owner/sums", options={"split": None})


def test_a_prefill_from_the_command_line_is_text(folder):
    assert (TaskConfig(name="gcd", prefill="false").prefill, TaskConfig(name="gcd", prefill="=").prefill) == (
        False,
        "=",
    )


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (
            "no_such_module:f",
            ImportError,
            r"importing 'no_such_module' failed with ModuleNotFoundError.*run from",
        ),
        ("my_rewards:f", ImportError, r"failed with ZeroDivisionError"),
        ("math", ValueError, r"write it as 'package.module:function'"),
        ("math:", ValueError, r"write it as"),
        (":f", ValueError, r"write it as"),
        ("math:pi", ValueError, r"math has no function 'pi'"),
    ],
)
def test_a_reward_that_cannot_be_had(folder, spec, error, message):
    (folder / "my_rewards.py").write_text("1 / 0\n")
    with pytest.raises(error, match=message):
        import_reward(spec)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"returned None, a NoneType"),
        ("1.0", r"returned '1.0', a str"),
        ([1.0], r"returned \[1.0\], a list"),
        (math.nan, r"returned nan; it must return a finite number"),
        (math.inf, r"returned inf; it must return a finite"),
        (1e39, r"returned 1e\+39; it must return a finite number, in fp32 too"),
        (10**400, r"returned 1000+, which is no single number"),
        (np.ones(2), r"returned array\(\[1., 1.\]\), which is no single number"),
    ],
)
def test_a_reward_that_returns_no_number(value, message):
    with pytest.raises(ValueError, match=r"reward 'm:f' on prompt 'p/3' " + message):
        call_reward("m:f", lambda completion, prompt: value, "text", {"id": "p/3"})


def test_a_reward_that_raises_is_found_before_training(folder):
    (folder / "my_rewards.py").write_text(
        "def last(completion, prompt):\n    return float(completion.split()[-1])\n"
    )
    with pytest.raises(
        ValueError, match=r"my_rewards:last' on prompt .* raised IndexError.*the empty one included"
    ):
        task(scorer=None, reward="my_rewards:last")


def test_a_reward_that_exits_does_not_end_the_run(folder):
    def exits(completion, prompt):
        sys.exit(0)

    with pytest.raises(ValueError, match=r"'m:f' on prompt 'p/3' raised SystemExit"):
        call_reward("m:f", exits, "text", {"id": "p/3"})
    (folder / "my_rewards.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ImportError, match=r"importing 'my_rewards' failed with SystemExit"):
        import_reward("my_rewards:f")


@pytest.mark.parametrize("value", [True, 1, 1.0, -0.5, np.float32(0.5), np.array(2)])
def test_numbers_of_any_kind_are_rewards(value):
    assert call_reward("m:f", lambda completion, prompt: value, "", {}) == float(value)
