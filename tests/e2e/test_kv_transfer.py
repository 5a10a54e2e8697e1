"""Engines that share blocks through a folder: tokens stay what they are, whatever happens to the folder or to them."""

import fcntl
import gc
import os
import signal
import subprocess
import sys

import pytest
from support import forked_programs
from support.engines import greedy, similar_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.kv_sharing import FULL, PROMPTS, ROOM, all_slots_are_back, computed_alone, connected_llm
from support.kv_sharing import run_prompts as run

from tritonllm import LLM, SamplingParams
from tritonllm.engine.transfer import folder as kv_folder


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return computed_alone()


def sharing(folder, role="kv_both", checkpoint=None, store=(), **more) -> LLM:
    return connected_llm("FileStore", role, {"path": str(folder), **dict(store)}, checkpoint, **more)


def saved(llm: LLM):
    """End an engine once all that it saves is saved."""
    llm.engine._transfer.connector.close()
    del llm
    gc.collect()


@pytest.mark.parametrize(
    "more",
    [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 8, "num_blocks": 16, "max_model_len": 48}],
)
def test_a_prefix_is_found_after_a_restart(alone, tmp_path, more):
    first = sharing(tmp_path, **more)
    tokens, cached = run(first)
    assert cached == [0] * 6
    saved(first)
    again = sharing(tmp_path, **more)
    assert run(again) == (tokens, FULL)
    assert tokens == alone
    stats = again.engine.stats
    assert stats.kv_fetched_blocks == sum(FULL) // 4 and stats.kv_missed_blocks == 0
    assert stats.prefix_cache_hit_tokens == sum(FULL) and stats.num_free_blocks == stats.num_blocks
    again.engine._transfer.connector.close()
    assert all_slots_are_back(again)


def test_the_last_step_of_a_prompt_is_saved_although_none_follows(tmp_path):
    first = sharing(tmp_path)
    first.generate(PROMPTS[3], greedy(1), use_tqdm=False)
    saved(first)
    (output,) = sharing(tmp_path).generate([PROMPTS[3]], greedy(2), use_tqdm=False)
    assert output.num_cached_tokens == FULL[3]


def test_two_engines_share_a_folder(alone, tmp_path):
    one, other = sharing(tmp_path), sharing(tmp_path)
    for _ in range(2):
        for llm in (one, other):
            assert run(llm)[0] == alone
            llm.reset_prefix_cache()  # of its own memory: the folder stays
    assert other.engine.stats.kv_fetched_blocks >= sum(FULL) // 4


def test_roles(alone, tmp_path):
    consumer = sharing(tmp_path, "kv_consumer")
    assert run(consumer) == (alone, [0] * 6)
    saved(consumer)
    producer = sharing(tmp_path, "kv_producer")
    assert run(producer)[0] == alone
    saved(producer)
    assert run(sharing(tmp_path, "kv_producer"))[1] == [0] * 6
    assert run(sharing(tmp_path, "kv_consumer")) == (alone, FULL)


@pytest.mark.parametrize(
    "other",
    [{"checkpoint": similar_checkpoint}, {"dtype": "bfloat16"}, {"block_size": 8, "kv_offloading_size": 2 * ROOM}],
)
def test_blocks_of_another_model_are_not_found(tmp_path, other):
    first = sharing(tmp_path)
    run(first)
    saved(first)
    checkpoint = other.pop("checkpoint", tiny_checkpoint)()
    apart = sharing(tmp_path, checkpoint=checkpoint, **other)
    tokens, cached = run(apart)
    assert cached == [0] * 6 and apart.engine.stats.kv_fetched_blocks == 0
    settings = {name: value for name, value in other.items() if name != "kv_offloading_size"}
    assert tokens == run(tiny_llm(checkpoint, **settings))[0]


def test_other_weights_in_the_same_engine_have_other_blocks(alone, tmp_path):
    llm = sharing(tmp_path, enable_sleep_mode=True)
    assert run(llm)[0] == alone
    llm.engine.reload_weights(str(similar_checkpoint()))
    tokens, cached = run(llm)
    assert cached == [0] * 6 and tokens == run(tiny_llm(similar_checkpoint()))[0] != alone
    llm.engine.sleep(2)
    llm.engine.wake_up()
    llm.engine.reload_weights()
    assert run(llm)[0] == alone
    saved(llm)
    assert run(sharing(tmp_path)) == (alone, FULL)


def test_salts_and_siblings(tmp_path):
    prompt, params = PROMPTS[3], SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    salted = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    first = sharing(tmp_path)
    expected = token_ids(first.generate([salted], params, use_tqdm=False))
    saved(first)
    other = sharing(tmp_path)
    cached = [other.generate([one], params, use_tqdm=False)[0].num_cached_tokens for one in (prompt, salted)]
    assert cached == [0, FULL[3]]
    assert token_ids(sharing(tmp_path).generate([salted], params, use_tqdm=False)) == expected


@pytest.mark.parametrize("damage", ["flip", "cut", "swap"])
def test_damaged_files_are_misses(alone, tmp_path, damage, caplog):
    first = sharing(tmp_path)
    run(first)
    saved(first)
    files = sorted(tmp_path.glob("??/*"))
    contents = [path.read_bytes() for path in files]
    for at, path in enumerate(files):
        if damage == "flip":
            data = bytearray(contents[at])
            data[(at * 7919) % len(data)] ^= 1 << at % 8
        else:
            data = {"cut": contents[at][:-1], "swap": contents[at - 1]}[damage]
        path.write_bytes(data)
    llm = sharing(tmp_path)
    assert run(llm) == (alone, [0] * 6)
    stats = llm.engine.stats
    assert stats.kv_fetched_blocks == 0 and stats.kv_missed_blocks and "is damaged" in caplog.text
    saved(llm)
    assert run(sharing(tmp_path)) == (alone, FULL)  # good ones are in their places


def test_a_folder_that_vanishes(alone, tmp_path, caplog):
    folder = tmp_path / "store"
    llm = sharing(folder)
    folder.rename(tmp_path / "gone")
    assert run(llm)[0] == alone
    llm.engine._transfer.connector.close()
    assert "cannot be saved" in caplog.text


def test_a_folder_that_another_process_keeps(alone, tmp_path, monkeypatch):
    """It may have been stopped: the engine starts, finds what is there, saves nothing and ends."""
    first = sharing(tmp_path)
    assert run(first)[0] == alone
    saved(first)
    monkeypatch.setattr(kv_folder, "PATIENCE", 0.01)  # from now on: the first engine needs its time
    with open(tmp_path / kv_folder.MARKER) as marker:
        fcntl.flock(marker, fcntl.LOCK_SH)
        llm = sharing(tmp_path)
        assert run(llm) == (alone, FULL) and llm.engine.stats.kv_saved_blocks == 0
        saved(llm)


def test_a_small_folder_and_a_small_tier(alone, tmp_path):
    each = tiny_llm().engine._runner.block_bytes
    llm = sharing(
        tmp_path,
        store={"max_bytes": 6 * each},
        num_blocks=16,
        max_model_len=48,
        kv_offloading_size=3 * each / (1 << 30),
    )
    for _ in range(3):
        assert run(llm)[0] == alone
    llm.engine._transfer.connector.close()
    assert 0 < sum(path.stat().st_size for path in tmp_path.glob("??/*")) <= 6 * each


ENGINE = """
import sys
sys.path[:0] = sys.argv[5:]
from support.engines import greedy, tiny_llm
from pathlib import Path
transfer = {"kv_connector": "FileStore", "kv_connector_extra_config": {"path": sys.argv[2]}}
llm = tiny_llm(Path(sys.argv[1]), kv_offloading_size=0.001, kv_transfer_config=transfer)
while llm.engine.stats.kv_saved_blocks < int(sys.argv[4]):
    llm.generate([eval(sys.argv[3])], greedy(2), use_tqdm=False)
print("ready", flush=True)
for seed in range(10**6):
    prompts = [[1 + (seed * 7 + i * j) % 90 for j in range(40)] for i in range(6)]
    llm.generate(prompts, greedy(2), use_tqdm=False)
    print(llm.engine.stats.kv_saved_blocks, flush=True)
"""


@pytest.mark.long
def test_an_engine_that_is_killed_while_it_saves(alone, tmp_path):
    where = [path for path in sys.path if path]
    wanted = repr(PROMPTS[3]), str(FULL[3] // 4)
    command = [sys.executable, "-c", ENGINE, str(tiny_checkpoint()), str(tmp_path), *wanted, *where]
    with forked_programs.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout.readline() == "ready\n"
        while int(engine.stdout.readline()) < 20:
            pass
        os.kill(engine.pid, signal.SIGKILL)
    llm = sharing(tmp_path)
    tokens, cached = run(llm)
    assert tokens == alone and cached[3] == FULL[3]
    assert llm.engine.stats.kv_missed_blocks == 0


def test_a_connector_that_never_answers_delays_and_no_more(alone):
    transfer = {"kv_connector": "support.kv_connectors:SilentConnector", "kv_connector_extra_config": {"timeout": 0.05}}
    llm = tiny_llm(kv_offloading_size=ROOM, kv_transfer_config=transfer, num_blocks=16, max_model_len=48)
    assert run(llm)[0] == run(llm)[0] == alone
    tier = llm.engine._scheduler.tier
    assert len(tier._lent) <= tier.num_slots // 2
    assert len([one for one in llm.engine._transfer.connector.asked if one.kind == "lookup"]) <= len(PROMPTS)


def test_a_connector_that_raises_changes_nothing(alone):
    transfer = {"kv_connector": "support.kv_connectors:FailingConnector"}
    llm = tiny_llm(kv_offloading_size=ROOM, kv_transfer_config=transfer)
    assert run(llm)[0] == alone
    assert all_slots_are_back(llm)


def test_a_request_can_be_aborted_while_it_waits(alone):
    transfer = {"kv_connector": "support.kv_connectors:SilentConnector"}
    llm = tiny_llm(kv_offloading_size=ROOM, kv_transfer_config=transfer)
    engine = llm.engine
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, greedy(16))
    assert engine.step() == [] and engine.stats.num_waiting == 1
    (output,) = engine.abort_request("a")
    assert output.outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished_requests() and engine.stats.num_waiting == 0
    engine._transfer.connector.asked[0].future.set_result(0)
    asked = engine._transfer.connector.asked
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, greedy(16))
    asked[-1].future.set_result(0)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert list(outputs[0].outputs[0].token_ids) == alone[0]


def test_a_step_that_breaks_off_leaves_no_trace(alone, tmp_path, monkeypatch):
    llm = sharing(tmp_path)
    monkeypatch.setattr(llm.engine._runner, "launch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(llm)
    monkeypatch.undo()
    assert run(llm)[0] == alone
    saved(llm)
    assert run(sharing(tmp_path)) == (alone, FULL)


def test_a_draft_models_blocks_travel_too(alone, tmp_path):
    drafting = {"model": str(tiny_checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    first = sharing(tmp_path, speculative_config=drafting)
    assert run(first)[0] == alone
    saved(first)
    again = sharing(tmp_path, speculative_config=drafting)
    assert run(again) == (alone, FULL)
    assert again.engine.stats.num_accepted_tokens == again.engine.stats.num_draft_tokens
    assert run(sharing(tmp_path))[1] == [0] * 6  # without one they are other blocks
