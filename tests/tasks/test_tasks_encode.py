"""Prompts to ids, with a byte-level tokenizer whose every id can be checked by hand."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowbitrl.tasks import Prompt, TaskConfig, check_lengths, completion_text, encode_prompt, make_task

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
CHAT = ({"role": "user", "content": "What is 7 + 5?"},)


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=TEMPLATE)


def test_template_then_prefill_as_one_text(tokenizer):
    ids = encode_prompt(tokenizer, Prompt(id="p", messages=CHAT, prefill="7 + 5 ="), 64)
    assert tokenizer.decode(ids) == "<s>user:What is 7 + 5?</s><s>assistant:7 + 5 ="
    assert all(type(i) is int for i in ids)
    assert [ids.count(256), ids.count(257)] == [2, 1]


def test_text_goes_as_it_is(tokenizer):
    assert (
        tokenizer.decode(encode_prompt(tokenizer, Prompt(id="p", text="7 +", prefill=" 5 ="), 64))
        == "7 + 5 ="
    )


def test_a_prompt_over_the_limit_is_named_with_both_lengths(tokenizer):
    prompt = Prompt(id="chain_sum/train/3", messages=CHAT)
    length = len(encode_prompt(tokenizer, prompt, 64))
    assert len(encode_prompt(tokenizer, prompt, length)) == length
    with pytest.raises(
        ValueError, match=rf"'chain_sum/train/3' has {length} tokens, .* is {length - 1}; raise"
    ):
        encode_prompt(tokenizer, prompt, length - 1)


def test_a_chat_needs_a_template(tokenizer):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=r"no chat template; set task.chat = false"):
        encode_prompt(tokenizer, Prompt(id="p", messages=CHAT), 64)


def test_completion_text_drops_special_tokens_and_nothing_else(tokenizer):
    text = " 12 .\n\n it ' s  é🦙 "
    assert completion_text(tokenizer, (*tokenizer(text).input_ids, tokenizer.eos_token_id)) == text
    assert completion_text(tokenizer, ()) == ""


def test_lengths_are_checked_before_any_work(tokenizer):
    options = {"min_digits": 1, "max_digits": 30}
    task = make_task(TaskConfig(name="chain_sum", options=options, max_prompt_tokens=150))
    with pytest.raises(
        ValueError, match=r"'chain_sum/held_out/\d+' has \d+ tokens, task.max_prompt_tokens is 150"
    ):
        check_lengths(task, tokenizer, 100)
    roomy = make_task(TaskConfig(name="chain_sum", options=options))
    assert check_lengths(roomy, tokenizer, 100) == max(
        len(roomy.encode(tokenizer, p))
        for p in roomy.prompts("held_out", 0, 64) + roomy.prompts("train", 0, 100)
    )


def test_every_prompt_of_a_file_is_checked(tokenizer, tmp_path):
    rows = [{"prompt": f"{i}" * (200 if i == 29 else 1), "answer": i} for i in range(30)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"path": str(tmp_path / "p.jsonl"), "scorer": "last-number", "held_out": 0}
    task = make_task(TaskConfig(max_prompt_tokens=100, **settings))
    assert "p.jsonl/29" not in [prompt.id for prompt in task.prompts("train", 0, 2)]
    with pytest.raises(ValueError, match=r"'p.jsonl/29' has \d+ tokens, task.max_prompt_tokens is 100"):
        check_lengths(task, tokenizer, 2)


def test_a_prompt_without_tokens_or_of_broken_text_is_named(tokenizer):
    backend = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(ValueError, match=r"prompt 'p' has no tokens: its text is '  '; drop it"):
        encode_prompt(words, Prompt(id="p", text="  "), 64)
    with pytest.raises(ValueError, match="prompt 'p' holds text that is no Unicode"):
        encode_prompt(tokenizer, Prompt(id="p", text="\ud800"), 64)


@pytest.mark.parametrize("fields", [{}, {"messages": CHAT, "text": "both"}, {"text": ""}])
def test_a_prompt_is_a_chat_or_a_text(fields):
    with pytest.raises(ValueError, match="exactly one of messages and text"):
        Prompt(id="p", **fields)
