"""Sleep, wake-up and other weights, of an engine on the CPU; on a GPU see tests/e2e/test_sleep_gpu.py."""

from dataclasses import replace
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.ranks import run_ranks
from support.tiny_models import tiny_config, write_checkpoint
from support.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

from tritonllm.dist.exchange import Exchange
from tritonllm.dist.group import Group
from tritonllm.dist.pipeline import ALONE, Team
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.data.asleep import AsleepError
from tritonllm.models.loading import load_model, read_spec

LOADED = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
PROMPTS = [list(range(5, 25)), list(range(40, 47))]


def answers(llm):
    return token_ids(llm.generate(PROMPTS, greedy(), use_tqdm=False))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same architecture with other weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    copytree(tiny_checkpoint(), folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}, file)
    return folder


@pytest.fixture(scope="module")
def expected():
    return answers(tiny_llm())


def test_level_1_brings_everything_back(expected):
    llm = tiny_llm(enable_sleep_mode=True)
    assert answers(llm) == expected
    memory = llm.engine._memory
    before = memory.mapped
    addresses = [p.data_ptr() for p in memory._model.parameters()]
    llm.sleep()
    assert llm.is_sleeping and memory.mapped == {"weights": 0, "kv_cache": 0}
    assert not any(p.any() for p in memory._model.parameters())
    with pytest.raises(AsleepError, match="the engine sleeps \\(weights, kv_cache\\): wake it up"):
        answers(llm)
    llm.wake_up()
    assert not llm.is_sleeping and memory.mapped == before
    assert [p.data_ptr() for p in memory._model.parameters()] == addresses
    assert answers(llm) == expected
    assert llm.engine.stats.prefix_cache_hit_tokens == 0, "what was cached before is gone"


def test_level_2_needs_weights_again(expected, other):
    llm = tiny_llm(enable_sleep_mode=True)
    llm.sleep(level=2)
    with pytest.raises(AsleepError, match="wake_up\\(tags=\\['weights'\\]\\) first"):
        llm.reload_weights()
    llm.wake_up(tags=["weights"])
    assert llm.is_sleeping, "the cache does"
    assert llm.collective_rpc("reload_weights") == [None]
    llm.wake_up(tags=["kv_cache"])
    assert answers(llm) == expected
    llm.sleep(level=2)
    llm.wake_up()
    assert not llm.is_sleeping and not llm.engine.stats.takes_requests
    with pytest.raises(AsleepError, match="reload_weights"):
        answers(llm)
    llm.reload_weights(str(other))
    assert answers(llm) == answers(tiny_llm(other)) != expected


def test_weights_that_are_lost_are_not_kept(expected):
    llm = tiny_llm(enable_sleep_mode=True)
    llm.sleep(level=2)
    llm.sleep(level=1)
    llm.wake_up()
    llm.sleep(level=1)
    llm.wake_up()
    with pytest.raises(AsleepError, match="reload_weights"):
        answers(llm)


@pytest.mark.parametrize("enabled", [True, False])
def test_other_weights_of_the_same_architecture(expected, other, enabled):
    llm = tiny_llm(enable_sleep_mode=enabled)
    assert answers(llm) == expected
    llm.reload_weights(str(other))
    found = answers(llm)
    assert found == answers(tiny_llm(other)) != expected, "no key of the old weights is read"
    llm.reload_weights()
    assert answers(llm) == expected


def test_a_folder_that_does_not_fit_changes_nothing(expected, other, tmp_path):
    llm = tiny_llm()
    longer = tmp_path / "longer"
    longer.mkdir()
    write_checkpoint(longer, tiny_config("qwen3", vocab_size=VOCAB_SIZE, num_hidden_layers=5))
    family = tmp_path / "family"
    family.mkdir()
    write_checkpoint(family, tiny_config("llama", vocab_size=VOCAB_SIZE))
    nan, cut = tmp_path / "nan", tmp_path / "cut"
    for folder in (nan, cut):
        copytree(other, folder)
    for file in nan.glob("*.safetensors"):
        tensors = load_file(file)
        last = sorted(tensors)[-1]
        save_file({**tensors, last: torch.full_like(tensors[last], float("nan"))}, file)
    for file in cut.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    for folder, message in (
        (tmp_path / "nothing", "there is no such folder"),
        (longer, "another model: its layers differ"),
        (family, "another model: its"),
        (nan, "NaN or infinite"),
        (cut, "model.safetensors"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.reload_weights(str(folder))
        assert answers(llm) == expected
    assert llm.engine.stats.prefix_cache_hit_tokens > 0, "prompts of the weights that stay are still known"


def test_packed_weights_are_replaced(tmp_path):
    """On the CPU a larger model's products lie as oneDNN reads them."""
    folders = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        torch.manual_seed(seed)
        sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}
        write_checkpoint(folder, tiny_config("qwen3", vocab_size=VOCAB_SIZE, **sizes), seed=seed)
        save_tokenizer(folder)
        folders.append(folder)
    one, two = (tiny_llm(folder, enable_sleep_mode=True) for folder in folders)
    before, expected = answers(one), answers(two)
    one.sleep()
    one.wake_up()
    assert answers(one) == before != expected
    one.reload_weights(str(folders[1]))
    assert answers(one) == expected


def test_an_engine_with_requests_does_neither(expected):
    llm = tiny_llm(enable_sleep_mode=True)
    llm.engine.add_request("a", PROMPTS[0], greedy())
    for change in (llm.sleep, llm.reload_weights):
        with pytest.raises(RuntimeError, match="requests are unfinished: let them end, or abort them"):
            change()
    llm.engine.abort_request("a")
    llm.sleep()
    assert llm.is_sleeping


def test_steps_that_were_launched_ahead_end_first(expected):
    """The last request stops by itself, and the step after it has been launched already."""
    llm = tiny_llm(enable_sleep_mode=True, async_scheduling=True)
    stop = replace(greedy(), stop_token_ids=[expected[0][3]])
    llm.generate([PROMPTS[0]], stop, use_tqdm=False)
    assert llm.engine._in_flight
    llm.sleep()
    assert not llm.engine._in_flight
    llm.wake_up()
    assert answers(llm) == expected


def test_mistakes(expected):
    llm = tiny_llm()
    with pytest.raises(ValueError, match="enable_sleep_mode=True"):
        llm.sleep()
    llm = tiny_llm(enable_sleep_mode=True)
    for call, message in (
        (lambda: llm.sleep(3), "level must be 1"),
        (lambda: llm.wake_up(["cache"]), "tags must be some of weights, kv_cache, got 'cache'"),
        (lambda: llm.collective_rpc("save"), "method must be 'reload_weights'"),
        (lambda: tiny_llm(enable_sleep_mode=1), "enable_sleep_mode must be of type bool"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not llm.is_sleeping and answers(llm) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_a_draft_model_sleeps_too(expected, level):
    """Nobody reloads its weights: they are kept at either level."""
    drafts = {"model": str(tiny_checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    llm = tiny_llm(enable_sleep_mode=True, speculative_config=drafts)
    assert answers(llm) == expected
    llm.sleep(level)
    assert llm.engine._memory.mapped == {"weights": 0, "kv_cache": 0}
    llm.wake_up()
    if level == 2:
        llm.reload_weights()
    accepted = llm.engine.stats.num_accepted_tokens
    assert answers(llm) == expected
    assert llm.engine.stats.num_accepted_tokens >= 2 * accepted > 0, "its guesses are as good as before"


def test_blocks_on_the_host_are_forgotten(expected, other):
    """They hold the old weights' keys."""
    size = 2**20 / 2**30
    llm = tiny_llm(enable_sleep_mode=True, num_blocks=16, kv_offloading_size=size)
    for number in range(8):  # more than the pool holds: some go to the host
        llm.generate([[number + 3] * 40], greedy(4), use_tqdm=False)
    assert answers(llm) == expected
    llm.reload_weights(str(other))
    found = token_ids(llm.generate([[number + 3] * 40 for number in range(8)], greedy(4), use_tqdm=False))
    plain = tiny_llm(other)
    assert found == token_ids(plain.generate([[number + 3] * 40 for number in range(8)], greedy(4), use_tqdm=False))
    llm.sleep()
    llm.wake_up()
    llm.reload_weights()
    assert answers(llm) == expected


def test_engines_that_share_experts_keep_their_weights():
    config, team = tiny_llm().engine.config.model, ALONE._replace(exchange=Exchange(Group(0, 2)))
    with pytest.raises(ValueError, match="engines that share experts keep their weights"):
        EngineMemory(None, config, team=team).reload_weights(None)


def test_ranks_take_other_weights_together_or_not_at_all(other):
    config = tiny_llm().engine.config.model
    spec = read_spec(tiny_checkpoint())

    def work(group):
        model = load_model(tiny_checkpoint(), spec, **LOADED, group=group)
        memory = EngineMemory(model, config, team=Team(group))
        before = [parameter.clone() for parameter in model.parameters()]
        why = "another rank cannot take them" if group.leads else "nowhere"
        with pytest.raises(ValueError, match=why):
            memory.reload_weights(str(other) if group.leads else "nowhere/at/all")
        assert all(map(torch.equal, before, model.parameters()))
        memory.reload_weights(str(other))
        fresh = load_model(other, spec, **LOADED, group=group)
        assert all(map(torch.equal, fresh.parameters(), model.parameters()))
        return not all(map(torch.equal, before, model.parameters()))

    assert run_ranks(2, work) == [True, True]
