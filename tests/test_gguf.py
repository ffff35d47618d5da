"""The demo model out of its GGUF: rows in their places, and a model that speaks English."""

import pytest
import torch
from transformers import AutoTokenizer

from lowbitrl.gguf import _hf_name, _uninterleave
from lowbitrl.models import demo_checkpoint, load_model


def test_rotary_rows_are_put_back():
    # llama.cpp's convert_hf_to_gguf.py: w.reshape(heads, 2, half, in).swapaxes(1, 2)
    original = torch.arange(2 * 8 * 3.0).view(16, 3)
    stored = original.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert torch.equal(_uninterleave(stored, 8), original)
    assert not torch.equal(stored, original)


def test_tensor_names():
    assert _hf_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert _hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    assert _hf_name("output_norm.weight") == "model.norm.weight"


ENGLISH = (
    "The river rises in the hills to the north of the town and flows slowly through the fields before it reaches "
    "the sea. In spring the water is high, and the farmers who live along its banks move their animals to the "
    "upper meadows. The old stone bridge was built more than three hundred years ago, and every summer people "
    "come from all over the country to walk across it and take photographs of the mill on the other side."
)


@pytest.fixture(scope="module")
def demo():
    torch.manual_seed(0)
    return load_model("demo", torch.bfloat16)


@pytest.mark.demo
def test_demo_is_an_ordinary_trainable_model(demo):
    model, _ = demo
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")
    assert all(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.demo
def test_demo_speaks_english(demo):
    model, tokenizer = demo
    ids = tokenizer(ENGLISH, return_tensors="pt").input_ids
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss.float()
    # 18.2 on these 85 tokens; 53 with the rotary rows left as llama.cpp stores them.
    assert 8 < loss.exp() < 25


@pytest.mark.demo
def test_demo_answers(demo):
    model, tokenizer = demo
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.demo
@pytest.mark.parametrize(
    "text",
    [
        "x  42",
        "  \n\n\tfoo(  12 )\r\n",
        "def f(x):\n    return x[ 10:200 ]\n",
        "🦙👩‍👩‍👧 naïve Ω≈ç√ 日本語 \u2212 ٣",
        " don't  stop ,  now .",
        "1234567890 3.14 1,000",
    ],
)
def test_demo_tokenizer_round_trips(demo, text):
    _, tokenizer = demo
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids == AutoTokenizer.from_pretrained(demo_checkpoint())(text).input_ids


@pytest.mark.demo
def test_demo_tokenizer_splits_digits_and_keeps_space_runs(demo):
    _, tokenizer = demo
    assert tokenizer.convert_ids_to_tokens(tokenizer("x  42 + 7").input_ids) == [
        "x",
        "ĠĠ",
        "4",
        "2",
        "Ġ+",
        "Ġ",
        "7",
    ]


@pytest.mark.demo
def test_demo_special_tokens(demo):
    _, tokenizer = demo
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(specials) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids[::4] == [1, 2]
    assert tokenizer("hi").input_ids == tokenizer("hi", add_special_tokens=False).input_ids
