"""A `vllm serve` of our own: started, health-checked, fed live over HTTP and shared memory."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout.types import Sampling
from lowbitrl.rollout.vllm.planned import to_config
from lowbitrl.rollout.vllm.sealed import manifest_data
from lowbitrl.rollout.vllm.server import VllmServer, VllmServerEngine
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer.logprobs import response_logprobs
from tests.vllm.test_engine import CODES, FLOOR, PROMPTS, flipped, train
from tests.vllm.tiny import dense

FLAGS = ["--max-model-len", "96", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(1 << 26)]


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    folder = dense(tmp_path_factory.mktemp("served"))
    learner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plan = prepare(learner, Recipe(rollout="nvfp4-w4a16"), "learner")
    server = VllmServer(folder, plan, "float32", FLAGS, seconds=300)
    try:
        yield learner, VllmServerEngine(server, plan, (2,), bucket_bytes=1 << 16)
    finally:
        server.close()


@torch.no_grad()
def test_live_updates_over_http_are_at_the_floor(sides):
    learner, engine = sides
    assert len(engine.report["modules"]) == 8
    for version in range(2):
        train(learner)
        published = publish(learner, version)
        engine.update(published.stream(), published.manifest)
        done = engine.generate(PROMPTS, 2, Sampling(max_tokens=8, temperature=0.8))
        prompts = [PROMPTS[c.prompt_index] for c in done]
        ours, _ = response_logprobs(learner, prompts, [list(c.token_ids) for c in done], temperature=0.8)
        for row, completion in zip(ours, done, strict=True):
            theirs = torch.tensor(completion.rollout_logprobs)
            assert (row[: len(theirs)] - theirs).abs().mean() < FLOOR
            assert completion.version == version
        scores, _ = response_logprobs(learner, [PROMPTS[1][:1]], [PROMPTS[1][1:]], temperature=1.0)
        assert (scores[0] - engine.score(PROMPTS[1:])[0]).abs().mean() < FLOOR


def test_a_refusal_crosses_http_with_its_name(sides):
    learner, engine = sides
    state = engine.state()
    train(learner)
    published = publish(learner, 5)
    with pytest.raises(ValueError, match=f"{CODES} of version 5 arrived as"):
        engine.update(flipped(published, CODES).items(), published.manifest)
    with pytest.raises(ValueError, match="under plan 00"):
        engine.update(published.stream(), dataclasses.replace(published.manifest, plan_digest="00"))
    assert engine.state() == state
    # A publisher that died half-way leaves an open update behind; the next one takes over.
    engine.control("start_weight_update")
    assert engine.state() == state
    engine.update(published.stream(), published.manifest)
    assert engine.state() != state


def test_a_server_that_is_killed_while_it_samples_comes_back_with_its_version(sides):
    learner, engine = sides
    train(learner)
    published = publish(learner, 9)
    engine.update(published.stream(), published.manifest)
    sampling = Sampling(max_tokens=40, temperature=0.8)
    owed, state, starts = engine.generate(PROMPTS, 8, sampling), engine.state(), engine.server.starts
    keeper = engine.server._process.pid
    (server,) = map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())
    killing = threading.Timer(0.3, os.kill, (server, signal.SIGKILL))
    killing.start()
    again = engine.generate(PROMPTS, 8, sampling)
    killing.join()
    # Killed too late where the samples came first: then the next call finds it dead.
    again = engine.generate(PROMPTS, 8, sampling) if engine.server.starts == starts else again
    assert engine.server.starts == starts + 1
    assert [(c.token_ids, c.version) for c in again] == [(c.token_ids, c.version) for c in owed]
    assert engine.state() == state


PUBLISHER = """
import json, os, signal, sys
from safetensors.torch import load_file
from lowbitrl.rollout.vllm.planned import from_config
from lowbitrl.rollout.vllm.sealed import manifest_of
from lowbitrl.rollout.vllm.server import VllmServerEngine
url, folder = sys.argv[1:]
plan = from_config(json.load(open(folder + "/plan.json")))
tensors = load_file(folder + "/version.safetensors")
def stream():
    for i, named in enumerate(tensors.items()):
        if 2 * i > len(tensors):
            os.kill(os.getpid(), signal.SIGKILL)
        yield named
engine = VllmServerEngine(url, plan, (2,), bucket_bytes=1)
engine.update(stream(), manifest_of(json.load(open(folder + "/manifest.json"))))
"""


def test_a_publisher_killed_half_way_leaves_the_old_version_serving(sides, tmp_path):
    learner, engine = sides
    before = publish(learner, 6)
    engine.update(before.stream(), before.manifest)
    state, done = engine.state(), engine.generate(PROMPTS, 1, Sampling(max_tokens=8))
    train(learner)
    after = publish(learner, 7)
    save_file({name: t.clone() for name, t in after.tensors.items()}, tmp_path / "version.safetensors")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest_data(after.manifest)))
    (tmp_path / "plan.json").write_text(json.dumps(to_config(engine.plan)))
    command = [sys.executable, "-c", PUBLISHER, engine.url, str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=200).returncode == -signal.SIGKILL
    assert engine.state() == state
    # Requests over HTTP meet in batches as they come, which moves a sum's last bits.
    for again, old in zip(engine.generate(PROMPTS, 1, Sampling(max_tokens=8)), done, strict=True):
        assert (again.token_ids, again.version) == (old.token_ids, old.version)
        assert again.rollout_logprobs == pytest.approx(old.rollout_logprobs, abs=FLOOR)
    engine.update(after.stream(), after.manifest)
    assert engine.state() != state


def test_what_is_not_there_or_wears_another_plan_is_refused(sides):
    _, engine = sides
    with pytest.raises(ConnectionError, match="no healthy vLLM"):
        VllmServerEngine("http://127.0.0.1:1", engine.plan, ())
    other = dataclasses.replace(engine.plan, layers=engine.plan.layers[:-1])
    with pytest.raises(ValueError, match="wears plan"):
        VllmServerEngine(engine.url, other, ())
