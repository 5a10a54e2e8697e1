"""Blocks that leave for others while the step runs that fills them: each layer once it is computed. Whatever becomes of
the request or the step, what others find is whole."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.kv_sharing import FULL, PROMPTS, ROOM, all_slots_are_back, connected_llm, decode, peer_engines, prefill
from support.kv_sharing import run_prompts as run
from support.tiny_models import tiny_config, write_checkpoint
from support.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from transformers import AutoModelForCausalLM, OlmoConfig

from tritonllm.engine.cache.host_copies import HostCopies

LAYERS = 5
ENDS = [0, 3, 4]  # the last layers of the groups
PRESSURE = {"max_num_batched_tokens": 8, "num_blocks": 16, "max_model_len": 48}  # chunks, and preemption
EAGER = {"compilation_config": {"mode": 3, "backend": "eager"}}
SIZES = {"hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 4, "num_hidden_layers": LAYERS}


@cache
def five_layers() -> Path:
    folder = Path(mkdtemp(prefix="five-layers-"))
    sizes = {"num_hidden_layers": LAYERS, "vocab_size": VOCAB_SIZE}
    write_checkpoint(folder, tiny_config("qwen3", bos_token_id=0, eos_token_id=0, **sizes))
    save_tokenizer(folder)
    return folder


@cache
def of_transformers() -> Path:
    """A model that the decoder does not describe."""
    folder = Path(mkdtemp(prefix="olmo-"))
    torch.manual_seed(0)
    config = OlmoConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=256, pad_token_id=None, eos_token_id=0, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@cache
def alone(model=five_layers):
    llm = tiny_llm(model(), num_blocks=64, max_num_seqs=1, enable_prefix_caching=False)
    return token_ids(llm.generate(PROMPTS, greedy(16), use_tqdm=False))


def sharing(folder, role="kv_both", checkpoint=None, **more):
    return connected_llm("FileStore", role, {"path": str(folder)}, checkpoint or five_layers(), **more)


def check_tier(llm):
    """Every block that the tier has, and that the device still has, is the same there."""
    tier, pool = llm.engine._scheduler.tier, llm.engine._scheduler.pool
    found = [(block, slot) for label, slot in tier._slot_of.items() for block in pool.find_leading([label])]
    runner = llm.engine._runner
    for copies, part in zip(runner.caches.copies, runner.host._parts, strict=True):
        for block, slot in found:
            assert torch.equal(copies.pool[:, :, block].flatten(2).flatten(0, 1), part.host[slot])
    slots = [*tier._slot_of.values(), *tier._free, *(slot for slot, label in tier._lent.items() if label is None)]
    assert sorted(slots) == list(range(tier.num_slots))
    return found


@pytest.fixture
def groups(monkeypatch):
    """Copies beside steps: each group, and which layers of the first model then have something in the blocks."""
    seen, copy = [], HostCopies._copy_group

    def watched(self, pairs, there, ends, group):
        layers = self._parts[0].rows.unflatten(0, (-1, 2))
        seen.append((group, [bool(layer[:, pairs[:, 0]].any()) for layer in layers]))
        copy(self, pairs, there, ends, group)

    monkeypatch.setattr(HostCopies, "_copy_group", watched)
    return seen


@pytest.mark.parametrize(
    ("model", "more"),
    [(five_layers, {}), (five_layers, EAGER), (of_transformers, {}), (of_transformers, EAGER)],
    ids=["decoder", "compiled", "transformers", "compiled transformers"],
)
def test_layers_leave_while_the_step_computes_those_behind_them(groups, model, more):
    """In a cache that is new, so that nobody has computed anything there before."""
    llm = tiny_llm(model(), kv_offloading_size=ROOM, **more)
    groups.clear()
    llm.generate(PROMPTS[3], greedy(1), use_tqdm=False)
    assert [group.after for group, _ in groups] == ENDS
    assert [layer for group, _ in groups for layer in group.rows] == list(range(LAYERS))
    for group, filled in groups:
        assert filled == [layer <= group.after for layer in range(LAYERS)]
    assert len(check_tier(llm)) == len(PROMPTS[3]) // 4 == llm.engine.stats.stored_blocks


def test_what_a_draft_model_computes_leaves_with_the_whole_step(groups):
    """The other one's layers, too: nobody says whose a layer is."""
    drafting = {"model": str(five_layers()), "num_speculative_tokens": 3, "adaptive": False}
    llm = tiny_llm(five_layers(), kv_offloading_size=ROOM, speculative_config=drafting)
    groups.clear()
    llm.generate(PROMPTS[3], greedy(1), use_tqdm=False)
    assert [(group.after, group.pool, group.rows) for group, _ in groups] == [
        (None, model, range(LAYERS)) for model in range(2)
    ]
    assert all(all(filled) for _, filled in groups) and check_tier(llm)


def test_steps_of_decodes_alone_do_not_stream(groups):
    llm = tiny_llm(five_layers(), kv_offloading_size=ROOM)
    engine = llm.engine
    engine.add_request("a", {"prompt_token_ids": PROMPTS[4]}, greedy(20))
    engine.step()
    groups.clear()
    while engine.has_unfinished_requests():
        engine.step()
    assert groups == [] and engine.stats.stored_blocks > len(PROMPTS[4]) // 4
    check_tier(llm)


@pytest.mark.parametrize("more", [{}, {"async_scheduling": True}, PRESSURE, {**PRESSURE, "async_scheduling": True}])
def test_a_folder_gets_whole_blocks(tmp_path, more):
    llm = sharing(tmp_path, **more)
    assert run(llm)[0] == alone()
    assert more.get("num_blocks") is None or llm.engine.stats.preemptions
    assert check_tier(llm)
    llm.engine._transfer.connector.close()
    assert all_slots_are_back(llm)
    other = sharing(tmp_path, "kv_consumer")
    assert run(other) == (alone(), FULL)


@pytest.mark.parametrize("more", [{}, PRESSURE])
def test_decode_goes_on_where_prefill_ended(more):
    with peer_engines() as start:
        producer, consumer = start("kv_producer", five_layers(), engine=more), start("kv_consumer", five_layers())
        assert decode(consumer, prefill(producer)) == (alone(), FULL)
        check_tier(producer)
        check_tier(consumer)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_prompt_that_is_aborted_in_its_middle_leaves_whole_blocks(tmp_path, steps, ahead):
    llm = sharing(tmp_path, max_num_batched_tokens=8, async_scheduling=ahead)
    engine = llm.engine
    engine.add_request("a", {"prompt_token_ids": PROMPTS[3]}, greedy(16))
    for _ in range(steps):
        engine.step()
    engine.abort_request("a")
    check_tier(llm)
    assert run(llm)[0] == alone()
    check_tier(llm)
    engine._transfer.connector.close()
    assert all_slots_are_back(llm)
    assert run(sharing(tmp_path, "kv_consumer")) == (alone(), FULL)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_step_that_breaks_off_between_layers_is_announced_to_nobody(tmp_path, groups, layer):
    llm = sharing(tmp_path)
    saved, save = [], llm.engine._transfer.connector.save
    llm.engine._transfer.connector.save = lambda *asked: saved.append(asked) or save(*asked)
    groups.clear()

    def break_off(*_):
        raise RuntimeError("out of order")

    hook = llm.engine._runner.model.layers[layer].register_forward_pre_hook(break_off)
    llm.engine.add_request("a", {"prompt_token_ids": PROMPTS[3]}, greedy(16))
    with pytest.raises(RuntimeError, match="out of order"):
        while True:  # steps without the request, until it is known whether the folder has its blocks
            llm.engine.step()
    hook.remove()
    assert [group.after for group, _ in groups] == [end for end in ENDS if end < layer]
    (output,) = llm.engine.step()
    assert output.outputs[0].finish_reason == "error"
    assert saved == [] and check_tier(llm) == [] and all_slots_are_back(llm)
    assert not llm.engine.stats.num_used_host_blocks
    assert run(llm)[0] == alone() and saved
    check_tier(llm)
    llm.engine._transfer.connector.close()
    assert all_slots_are_back(llm)
    assert run(sharing(tmp_path, "kv_consumer")) == (alone(), FULL)


def test_slots_are_lent_at_once_behind_a_step_that_broke_off():
    """Nothing is copied into them any more. A request would wait for its timeout else, and then be computed."""
    with peer_engines() as start:
        producer, consumer = start("kv_producer", five_layers()), start("kv_both", five_layers(), timeout=200.0)
        offers = prefill(producer)
        hook = consumer.engine._runner.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(consumer)
        hook.remove()
        assert decode(consumer, offers) == (alone(), FULL)
        check_tier(consumer)


def test_a_small_tier_keeps_what_fits(tmp_path):
    each = tiny_llm(five_layers()).engine._runner.block_bytes
    for slots in (1, 2, 5):
        llm = sharing(tmp_path / str(slots), kv_offloading_size=slots * each / (1 << 30), **PRESSURE)
        for _ in range(2):
            assert run(llm)[0] == alone()
            check_tier(llm)


def test_models_of_two_layers_stream_too(groups):
    llm = tiny_llm(tiny_checkpoint(), kv_offloading_size=ROOM)
    groups.clear()
    llm.generate(PROMPTS[3], greedy(1), use_tqdm=False)
    assert len({group.after for group, _ in groups}) == len(groups) > 1
