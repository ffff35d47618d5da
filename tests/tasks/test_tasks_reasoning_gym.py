"""reasoning-gym tasks: reproducible and seekable, splits apart, scorers, wording, errors."""

import random
import subprocess
import sys

import pytest

from lowbitrl.tasks import TaskConfig, make_task
from lowbitrl.tasks.scorers import numbers

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


def sums(**fields):
    options = {"max_terms": 2} if fields.get("name", "chain_sum") == "chain_sum" else {}
    return make_task(TaskConfig(**{"name": "chain_sum", "options": options, **fields}))


def questions(prompts):
    return [prompt.metadata["entry"]["question"] for prompt in prompts]


def test_a_position_is_the_same_whatever_was_asked_before():
    task = sums()
    whole = task.prompts("train", 0, 200)
    assert sums().prompts("train", 137, 1) == whole[137:138]
    assert task.prompts("train", 190, 10) + task.prompts("train", 3, 2) == whole[190:200] + whole[3:5]
    assert len({prompt.id for prompt in whole}) == 200


def test_other_processes_draw_the_same_prompts():
    script = (
        "from lowbitrl.tasks import *; t = make_task(TaskConfig(name='chain_sum', seed=3));"
        "print([p.metadata['entry']['question'] for s in ('train', 'held_out') for p in t.prompts(s, 5, 4)])"
    )
    task = make_task(TaskConfig(name="chain_sum", seed=3))
    expected = questions(task.prompts("train", 5, 4)) + questions(task.prompts("held_out", 5, 4))
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin"}
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == str(expected)


def test_seeds_give_unrelated_streams_not_shifted_ones():
    # reasoning-gym draws item i from seed + i: neighbouring seeds share all but one item.
    options = {"min_digits": 4}
    first, second = (questions(sums(seed=seed, options=options).prompts("train", 0, 300)) for seed in (0, 1))
    assert not set(first) & set(second)


def test_held_out_prompts_do_not_move_with_the_seed():
    assert sums(seed=0).prompts("held_out", 0, 64) == sums(seed=7).prompts("held_out", 0, 64)


@pytest.mark.parametrize("options", [ONE_DIGIT, {"max_terms": 2}, {}])
def test_no_question_is_in_both_splits(options):
    task = sums(options=options, held_out=300)
    held_out = set(questions(task.prompts("held_out", 0, 300)))
    assert not held_out & set(questions(task.prompts("train", 0, 3000)))


def test_a_tiny_space_says_how_tiny_it_is():
    report = sums(options=ONE_DIGIT).split_report()
    # Two digits, two operators: 200 questions, about a quarter of them held out.
    assert report["overlap"] == 0
    assert 25 <= report["held_out_distinct"] <= 64 == report["held_out"]
    assert 120 <= report["train_distinct"] <= 175


def test_a_space_too_small_to_split_is_refused():
    one_question = {"min_n": 5, "max_n": 5}
    with pytest.raises(ValueError, match=r"too few different questions.*held_out = 0"):
        make_task(TaskConfig(name="count_bits", options=one_question))
    assert make_task(TaskConfig(name="count_bits", options=one_question, held_out=0)).held_out_count == 0


def test_drawing_leaves_the_global_generator_alone():
    random.seed(5)
    expected = random.Random(5).random()
    sums().prompts("train", 0, 5)
    assert random.random() == expected


def test_items_drawn_from_the_global_generator_are_reproducible_too():
    def task():
        return make_task(TaskConfig(name="list_functions"))

    whole = task().prompts("train", 0, 256)
    random.seed(99)
    assert task().prompts("train", 200, 56) == whole[200:]


@pytest.mark.parametrize("name", ["chain_sum", "products", "basic_arithmetic"])
def test_prefill_asks_for_the_expression_and_begins_the_reply(name):
    task = make_task(TaskConfig(name=name, options={"max_terms": 2}, prefill=True, scorer="first-number"))
    for prompt in task.prompts("train", 0, 50):
        expression = prompt.metadata["entry"]["metadata"]["expression"]
        assert prompt.messages == ({"role": "user", "content": f"What is {expression}?"},)
        assert prompt.prefill == f"{expression} ="
        assert eval(expression.replace("/", "//")) == int(prompt.answer)


def test_prefill_template_keeps_the_question():
    prompt = sums(prefill="So {expression} =", system="Be brief.").prompts("train", 0, 1)[0]
    question = prompt.metadata["entry"]["question"]
    assert [m["content"] for m in prompt.messages] == ["Be brief.", question]
    assert prompt.prefill == "So " + question.split(": ")[1]


def test_the_recipe_names_the_reward_and_the_others_stand_beside_it():
    completion = "The sum is 30. I checked 2 times."
    task = sums(scorer="first-number")
    prompt = next(p for p in task.prompts("train", 0, 9000) if p.answer == "30")
    scores = task.scores(prompt, completion)
    assert (scores["first-number"], scores["last-number"]) == (1.0, 0.0)
    assert 0.0 < scores["reasoning-gym"] < 0.1
    assert task.reward(prompt, completion) == 1.0
    assert sums(scorer="last-number").reward(prompt, completion) == 0.0
    assert sums().reward(prompt, completion) == scores["reasoning-gym"]


def test_its_own_scorer_reads_answer_tags():
    task = sums()
    prompt = task.prompts("train", 0, 1)[0]
    assert task.reward(prompt, f"Let me see: 4. <answer>{prompt.answer}.0</answer>") == 1.0
    assert task.reward(prompt, f" {prompt.answer}\n") == 1.0
    assert task.reward(prompt, "") == 0.0


def test_text_that_its_scorer_chokes_on_is_a_wrong_answer():
    task = make_task(TaskConfig(name="prime_factorization"))
    prompt = task.prompts("train", 0, 1)[0]
    assert task.reward(prompt, prompt.answer) == 1.0
    assert task.reward(prompt, "I cannot say") == 0.0


def test_plain_text_for_base_models():
    prompt = sums(chat=False, prefill=True).prompts("train", 0, 1)[0]
    assert prompt.text.startswith("What is ")
    assert not prompt.messages
    assert numbers(prompt.text) == numbers(prompt.prefill)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "chain_sums"}, r"'chain_sums' is no reasoning-gym dataset; did you mean chain_sum"),
        ({"name": "qqqq"}, r"there are 10\d"),
        (
            {"options": {"max_term": 2}},
            r"task.options.max_term: no option of 'chain_sum'; did you mean max_terms",
        ),
        ({"options": {"seed": 2}}, r"belongs in task.seed"),
        ({"options": {"size": 2}}, r"train prompts have no end"),
        ({"options": {"min_terms": 3, "max_terms": 2}}, r"refuses .*max_terms must be >= min_terms"),
        ({"options": {"max_terms": "two"}}, r"refuses .*'two'"),
        (
            {"name": "syllogism", "scorer": "last-number"},
            r"'syllogism' has '(Yes|No)'; use scorer = 'reasoning-gym'",
        ),
        ({"name": "gcd", "prefill": True}, r"can begin chain_sum, products, basic_arithmetic, not 'gcd'"),
        ({"prefill": "{expresion} ="}, r"KeyError 'expresion'; 'chain_sum' has the fields .*'expression'"),
        ({"held_out": 0, "reward": "math:no_such"}, r"no function 'no_such'"),
    ],
)
def test_errors_name_value_rule_and_remedy(fields, message):
    with pytest.raises(ValueError, match=message):
        sums(**fields)


def test_held_out_ends_where_it_ends():
    with pytest.raises(ValueError, match=r"held-out prompts 60 \.\. 69 asked for, there are 64"):
        sums().prompts("held_out", 60, 10)
