"""Transformers models with our attention: the same logits as on their own, or an error that says why not."""

import json
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.compare import relative_error
from support.engines import greedy
from support.tiny_models import (
    PagedRunner,
    PagedSequence,
    build_reference,
    random_tokens,
    reference_logits,
    reference_model,
    tiny_config,
    write_checkpoint,
)
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, OlmoForCausalLM
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from tritonllm import LLM
from tritonllm.models.fallback import FallbackSpec, check_rope, fallback_spec, load_fallback
from tritonllm.models.fallback_attention import LayerCall, Mask, PagedStep, register
from tritonllm.models.fallback_decoder import TransformersDecoder, common_shape

# said by every load; test_warning looks for it
pytestmark = pytest.mark.filterwarnings("ignore:.*does not run natively:UserWarning")

CPU = torch.device("cpu")
LIMIT = 1e-5  # of the logits of a whole model; sums in another order are some 1e-6 off
PROMPT = 45

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0] * 8,
    "short_mscale": 1.1,
    "long_mscale": 1.2,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
}
# Each brings something of its own: windows and biases, (1 + w) norms, norms without weights and clamped products, norms
# after the blocks with every other layer unrotated, partial rotation and squared ReLU, experts, one head for all keys
# with learned positions, longrope below its trained length; then three native families with caps, windows and sinks.
CASES: dict[str, dict[str, Any]] = {
    "starcoder2": {**SMALL, "sliding_window": 9},
    "gemma": {**SMALL, "head_dim": 24},
    "olmo": {**SMALL, "clip_qkv": 1.5},
    "exaone4": {**SMALL, "sliding_window": 7, "layer_types": MIXED_LAYERS},
    "persimmon": SMALL,
    "olmoe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_bigcode": {"vocab_size": 101, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": 2},
    "phimoe": {**SMALL, "num_local_experts": 4, "rope_scaling": LONGROPE, "sliding_window": None},
    "qwen3": {**SMALL, "head_dim": 16},
    "gemma2": {
        **SMALL,
        "head_dim": 16,
        "sliding_window": 7,
        "layer_types": MIXED_LAYERS,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gpt_oss": {**SMALL, "head_dim": 16, "num_local_experts": 4, "sliding_window": 7, "layer_types": MIXED_LAYERS},
}


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **CASES.get(model_type, SMALL), **changes}


def load(folder: Path, **changes: Any) -> TransformersDecoder:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": CPU,
        "trust_remote_code": False,
        "load_format": "auto",
        "seed": 0,
        "max_model_len": 128,
        **changes,
    }
    return load_fallback(folder, fallback_spec(folder, settings["trust_remote_code"]), **settings)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=sorted(CASES))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """``(theirs, ours)`` of one case."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_checkpoint(folder, config_of(request.param), config_style=5)
    return theirs, load(folder)


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert relative_error(ours, theirs) < LIMIT


@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("chunked", [False, True], ids=["full", "chunked"])
def test_prefill(models, block_size, chunked):
    theirs, ours = models
    tokens = random_tokens(PROMPT, 101, seed=block_size)
    chunks = [b - a for a, b in pairwise(sorted({0, PROMPT, *random_tokens(5, PROMPT, seed=1)}))] if chunked else None
    logits = PagedRunner(ours, block_size=block_size).prefill(PagedSequence(), tokens, chunks)
    assert_same_logits(logits, reference_logits(theirs, tokens))


def test_mixed_batches(models):
    """Prefill chunks and decodes of several sequences in the same steps, one of them on shared blocks."""
    theirs, ours = models
    runner = PagedRunner(ours)
    prompts = [random_tokens(length, 101, seed=length) for length in (30, 17, 9)]
    prompts.append(prompts[0][:12] + random_tokens(10, 101, seed=5))
    first = PagedSequence()
    got: list[list[torch.Tensor]] = [runner.step([(first, prompts[0][:13])]), [], [], []]
    sequences = [first, PagedSequence(), PagedSequence(), runner.share(first, 12)]
    for sizes in ((1, 5, 9, 4), (7, 1, 0, 1), (1, 10, 0, 1), (8, 1, 0, 4)):
        items = [i for i, size in enumerate(sizes) if size]
        work = [(sequences[i], prompts[i][sequences[i].length :][: sizes[i]]) for i in items]
        for i, logits in zip(items, runner.step(work), strict=True):
            got[i].append(logits)
    for i, prompt in enumerate(prompts):
        start = 12 if i == 3 else 0
        assert_same_logits(torch.cat(got[i]), reference_logits(theirs, prompt)[start:])


def test_decode(models):
    """32 decode steps, two sequences a step."""
    theirs, ours = models
    runner = PagedRunner(ours)
    tokens = [random_tokens(length + 32, 101, seed=length) for length in (3, 20)]
    sequences = [PagedSequence(), PagedSequence()]
    for sequence, all_of in zip(sequences, tokens, strict=True):
        runner.prefill(sequence, all_of[:-32])
    steps = [runner.step([(sequences[i], [tokens[i][t - 32]]) for i in range(2)]) for t in range(32)]
    for i in range(2):
        assert_same_logits(torch.cat([step[i] for step in steps]), reference_logits(theirs, tokens[i])[-32:])


def test_greedy(models):
    theirs, ours = models
    tokens = random_tokens(11, 101, seed=8)
    got = PagedRunner(ours).greedy(tokens, 32)
    assert got == reference_logits(theirs, tokens + got).argmax(-1).tolist()[len(tokens) - 1 : -1]


def test_the_embedding_of_a_padding_token_may_be_zero(tmp_path):
    """As transformers initialises it. Where nothing comes before it, its logits are zero, too, and that is no error."""
    config = config_of("olmo", pad_token_id=0)
    torch.manual_seed(0)
    theirs = build_reference(config)
    assert not theirs.get_input_embeddings().weight[0].any()
    assert not reference_logits(theirs, [0]).any()
    theirs.save_pretrained(tmp_path)
    tokens = random_tokens(11, 101, seed=8)
    got = PagedRunner(load(tmp_path)).greedy(tokens, 8)
    assert got == reference_logits(theirs, tokens + got).argmax(-1).tolist()[len(tokens) - 1 : -1]


def test_warning(tmp_path):
    """One, of the model that is loaded: nobody runs slowly without knowing why."""
    write_checkpoint(tmp_path, config_of("olmo"), config_style=5)
    with pytest.warns(UserWarning) as caught:
        load(tmp_path)
    (message,) = (str(warning.message) for warning in caught)
    assert message.startswith("OlmoForCausalLM does not run natively") and "docs/models.md" in message


def test_spec(tmp_path):
    write_checkpoint(tmp_path, config_of("gemma"), config_style=5)
    ours = load(tmp_path)
    assert ours.spec == FallbackSpec("GemmaForCausalLM", 101, 64, 3, 2, 24, 256, (2, 3), torch.float32)
    assert ours.windows == (None, None, None)
    assert ours.dtype == torch.float32 and not ours.supports_graphs
    assert not any(p.requires_grad for p in ours.parameters())


def test_spec_is_what_the_layers_use(tmp_path):
    """The configuration of a model with one head for all keys does not say so in the usual field."""
    write_checkpoint(tmp_path, config_of("gpt_bigcode"), config_style=5)
    ours = load(tmp_path)
    assert (ours.spec.num_kv_heads, ours.spec.head_size) == (1, 16)


@pytest.mark.parametrize(
    ("model_type", "windows"), [("starcoder2", (9, 9, 9)), ("exaone4", (7, None, 7)), ("gemma2", (7, None, 7))]
)
def test_windows(tmp_path, model_type, windows):
    write_checkpoint(tmp_path, config_of(model_type), config_style=5)
    assert load(tmp_path).windows == windows
    assert load(tmp_path, max_model_len=7).windows == (None,) * 3  # nothing is hidden in sequences as short


def test_no_mask_and_no_look_at_positions(tmp_path, monkeypatch):
    """What transformers does before it makes a mask waits for the device."""
    write_checkpoint(tmp_path, config_of("exaone4"), config_style=5)
    ours = load(tmp_path)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", None)
    assert PagedRunner(ours).prefill(PagedSequence(), [5, 6, 7]).shape == (3, 101)


def test_token_ids_may_be_int32(tmp_path):
    """The engine's are; transformers is written for int64."""
    write_checkpoint(tmp_path, config_of("olmo"), config_style=5)
    ours = load(tmp_path)
    want = PagedRunner(ours).prefill(PagedSequence(), [5, 6, 7])
    seen = []
    ours.register_forward_pre_hook(lambda module, args: (args[0].int(), *args[1:]))
    ours.base.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].dtype), with_kwargs=True
    )
    assert torch.equal(PagedRunner(ours).prefill(PagedSequence(), [5, 6, 7]), want)
    assert seen == [torch.int64]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path, dtype):
    """The error of half precision stays near that of transformers in the same precision."""
    theirs = write_checkpoint(tmp_path, config_of("starcoder2"), config_style=5)
    tokens = random_tokens(PROMPT, 101, seed=6)
    exact = reference_logits(theirs, tokens)
    rounded = type(theirs).from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()
    ours = load(tmp_path, dtype=dtype)
    hidden = []
    ours.register_forward_hook(lambda module, args, output: hidden.append(output))
    logits = PagedRunner(ours).prefill(PagedSequence(), tokens)
    assert hidden[0].dtype == dtype and logits.dtype == torch.float32
    assert relative_error(logits, exact) <= 1.2 * relative_error(reference_logits(rounded, tokens), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["starcoder2", "olmoe", "gpt_oss"])
def test_bfloat16_on_a_gpu(tmp_path, device, model_type):
    """Heads of 64 in chunks that end inside blocks, then decodes; transformers' own error is the yardstick."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "max_position_embeddings": 512}
    theirs = write_checkpoint(tmp_path, config_of(model_type, **sizes), config_style=5).to(device)
    tokens = random_tokens(300, 101, seed=6)
    exact = reference_logits(theirs, tokens)
    rounded = (
        type(theirs).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").to(device).eval()
    )
    runner = PagedRunner(load(tmp_path, dtype=torch.bfloat16, device=device, max_model_len=512), block_size=16)
    sequence = PagedSequence()
    prefilled = runner.prefill(sequence, tokens[:268], [128, 1, 100, 39])
    decoded = [runner.step([(sequence, [token])])[0] for token in tokens[268:]]
    error = relative_error(torch.cat([prefilled, *decoded]), exact)
    assert error <= 1.2 * relative_error(reference_logits(rounded, tokens), exact)


@pytest.mark.gpu
@pytest.mark.parametrize(("model_type", "captured"), [("starcoder2", True), ("olmo", True), ("phimoe", False)])
def test_steps_are_captured_where_nothing_waits_for_the_device(tmp_path, device, model_type, captured):
    """Longrope asks for the longest position on the host. Greedy tokens are those of steps that are not captured."""
    write_checkpoint(tmp_path, config_of(model_type), config_style=5)
    assert load(tmp_path, device=device).supports_graphs == captured
    prompts: list[Any] = [{"prompt_token_ids": random_tokens(n, 101, seed=n)} for n in (1, 30, 77)]
    tokens = []
    for eager in (True, False):
        settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "num_blocks": 64, "enforce_eager": eager}
        llm = LLM(str(tmp_path), dtype="float32", device="cuda", skip_tokenizer_init=True, **settings)
        tokens.append([output.outputs[0].token_ids for output in llm.generate(prompts, greedy(24), use_tqdm=False)])
        del llm
    assert tokens[0] == tokens[1]


def test_nothing_is_collected(tmp_path):
    """A configuration may ask for hidden states or router logits, which nobody would read."""
    flags = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    write_checkpoint(tmp_path, config_of("olmoe"), config_style=5)
    config = json.loads((tmp_path / "config.json").read_text())
    outputs = []
    ours = load(write_config(tmp_path, {**config, **flags}))
    ours.base.register_forward_hook(lambda module, args, output: outputs.append(output))
    PagedRunner(ours).prefill(PagedSequence(), [5, 6, 7])
    assert outputs[0].hidden_states is None and outputs[0].attentions is None and outputs[0].router_logits is None


def test_dummy_weights(tmp_path):
    folder = write_config(tmp_path, {"architectures": ["OlmoForCausalLM"], **config_of("olmo")})
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    logits = [
        PagedRunner(load(folder, load_format="dummy", seed=seed)).prefill(PagedSequence(), [4, 5, 6])
        for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(logits[0], logits[1]) and not torch.allclose(logits[0], logits[2])


# Loading


@pytest.fixture
def olmo(tmp_path) -> Path:
    write_checkpoint(tmp_path, config_of("olmo", tie_word_embeddings=False), config_style=5)
    return tmp_path


Q = "model.layers.1.self_attn.q_proj.weight"


def test_missing_tensor(olmo):
    tensors = load_file(olmo / "model.safetensors")
    del tensors[Q]
    save_file(tensors, olmo / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"tensor {Q} is missing"):
        load(olmo)


def test_weights_that_are_no_numbers(olmo):
    tensors = load_file(olmo / "model.safetensors")
    tensors[Q][0, :3] = torch.nan
    save_file(tensors, olmo / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"tensor {Q} has 3 values that are NaN or infinite"):
        load(olmo)
    with pytest.raises(ValueError, match="logits differ"):  # loaded, but the probe gets no numbers out of it
        load(olmo, allow_nan=True)


def test_unexpected_tensor(olmo):
    tensors = load_file(olmo / "model.safetensors")
    save_file({**tensors, "model.extra.weight": torch.ones(2)}, olmo / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"tensor model\.extra\.weight has no place"):
        load(olmo)


def test_tensor_of_another_shape(olmo):
    tensors = load_file(olmo / "model.safetensors")
    save_file({**tensors, Q: tensors[Q][:-1].contiguous()}, olmo / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"tensor {Q} has a shape other"):
        load(olmo)


def test_no_weights(olmo):
    (olmo / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights for load_format='auto': expected"):
        load(olmo)


def test_truncated_weights(olmo):
    content = (olmo / "model.safetensors").read_bytes()
    (olmo / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file .* download it again"):
        load(olmo)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (LFS_POINTER, "is damaged or holds more than tensors, .* download it again"),
        (b"", r"is not a complete PyTorch file \(EOFError\); download it again"),
        ([1, 2], "must hold a dictionary of tensors, got list"),
        ({"state_dict": {"a": torch.ones(1)}}, "must hold tensors by name, but 'state_dict' is dict"),
        ({"a": Path("x")}, "is damaged or holds more than tensors, .* download it again"),
    ],
    ids=["pointer", "empty", "list", "nested", "objects"],
)
def test_pytorch_file_that_is_none(olmo, content, reason):
    (olmo / "model.safetensors").unlink()
    file = olmo / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin {reason}") as caught:
        load(olmo)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("error", [pickle.UnpicklingError("weights_only"), EOFError(), TypeError("x"), KeyError("x")])
def test_errors_of_what_transformers_reads_with(olmo, monkeypatch, error):
    """Files change while they are read, and releases of transformers read more than we check."""

    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(ValueError, match=f"{olmo.name}: .*again") as caught:
        load(olmo)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "is not valid JSON"),
        ("{}", "does not say where the tensors are; download it again"),
        ('{"metadata": {}, "weight_map": null}', "does not say where the tensors are; download it again"),
        ('{"weight_map": {"a": "part.safetensors"}}', 'has no metadata, .* add "metadata": {} to it'),
        ('{"metadata": null, "weight_map": {"a": "part.safetensors"}}', 'has no metadata, .* add "metadata": {} to it'),
    ],
)
def test_bad_index(olmo, index, reason):
    (olmo / "model.safetensors").rename(olmo / "part.safetensors")
    (olmo / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=rf"model\.safetensors\.index\.json {reason}"):
        load(olmo)


def test_index_beside_the_single_file(olmo):
    """Transformers reads the file, so what the index says does not matter."""
    (olmo / "model.safetensors.index.json").write_text('{"weight_map": {"a": "absent.safetensors"}}')
    load(olmo)


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **edit(tensors)}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.int64, "I64")]
)
def test_quantized_weights_that_the_configuration_does_not_mention(olmo, dtype, code):
    """Transformers would cast them as they are."""
    edit_tensors(olmo, lambda tensors: {Q: tensors[Q].to(dtype)})
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {Q} is {code}, not one of F64, F32, F16, BF16;"):
        load(olmo)


def test_mxfp4_is_not_unpacked(olmo):
    blocks = {"x_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8), "x_scales": torch.zeros(1, 2, 3).byte()}
    edit_tensors(olmo, lambda tensors: blocks)
    with pytest.raises(ValueError, match=r"tensor x_blocks is U8, not one of F64, F32, F16, BF16;"):
        load(olmo)


def test_integers_that_are_no_weights(olmo, monkeypatch):
    """Buffers of the model, buffers that it ignores, and those that follow from the configuration."""
    init = OlmoForCausalLM.__init__

    def with_buffers(self, config):
        init(self, config)
        self.model.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))
        self.model.register_buffer("position_ids", torch.zeros(4, dtype=torch.int64), persistent=False)

    monkeypatch.setattr(OlmoForCausalLM, "__init__", with_buffers)
    monkeypatch.setattr(OlmoForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"self_attn\.seen$"])
    integers = {
        "model.num_batches_tracked": torch.tensor(7),
        "model.position_ids": torch.arange(4),
        "model.layers.0.self_attn.seen": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=torch.int32),
    }
    edit_tensors(olmo, lambda tensors: integers)
    ours = load(olmo)
    assert int(ours.base.num_batches_tracked) == 7
    monkeypatch.setattr(OlmoForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"self_attn\."])
    edit_tensors(olmo, lambda tensors: {Q: tensors[Q].char()})
    with pytest.raises(ValueError, match=rf"tensor {Q} is I8"):  # what the model has is not ignored
        load(olmo)


def test_projection_that_is_not_the_embeddings_it_is_tied_to(tmp_path):
    write_checkpoint(tmp_path, config_of("olmo", tie_word_embeddings=True), config_style=5)
    edit_tensors(tmp_path, lambda tensors: {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(
        ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, .* to false there"
    ):
        load(tmp_path)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_act": "foo"}, "hidden_act"),
        ({"rope_scaling": {"type": "foo"}}, "rope_scaling.type"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 10000.0}}, "rope_parameters.rope_type"),
    ],
    ids=["activation", "scaling", "rotation"],
)
def test_name_that_transformers_does_not_know(olmo, change, field, load_format):
    config = json.loads((olmo / "config.json").read_text())
    if "rope_scaling" in change:
        del config["rope_parameters"]
    write_config(olmo, {**config, **change})
    with pytest.raises(ValueError, match=rf"config\.json: transformers does not know {field}='foo'"):
        load(olmo, load_format=load_format)


def test_tied_projection_and_rotary_frequencies_may_be_stored(tmp_path):
    theirs = write_checkpoint(tmp_path, config_of("olmo", tie_word_embeddings=True), config_style=5)
    tensors = load_file(tmp_path / "model.safetensors")
    derived = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    save_file({**tensors, **derived}, tmp_path / "model.safetensors", {"format": "pt"})
    tokens = random_tokens(9, 101, seed=0)
    assert_same_logits(PagedRunner(load(tmp_path)).prefill(PagedSequence(), tokens), reference_logits(theirs, tokens))


# Code in the checkpoint

REMOTE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path(r"{marker}").touch()

class TinyConfig(LlamaConfig):
    model_type = "tiny_remote"

class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""


def test_remote_code_runs_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder, marker = tmp_path / "checkpoint", tmp_path / "marker"
    theirs = write_checkpoint(folder, config_of("llama"), config_style=5)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    remote = {"architectures": ["TinyForCausalLM"], "model_type": "tiny_remote", "auto_map": auto_map}
    write_config(folder, {**config, **remote})
    (folder / "modeling_tiny.py").write_text(REMOTE.format(marker=marker))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        fallback_spec(folder)
    assert not marker.exists()
    ours = load(folder, trust_remote_code=True)
    assert marker.exists() and type(ours.head).__name__ == "TinyForCausalLM"
    tokens = random_tokens(9, 101, seed=0)
    assert_same_logits(PagedRunner(ours).prefill(PagedSequence(), tokens), reference_logits(theirs, tokens))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_package", "install the packages that it needs: .*no_such_package"),
        ("from transformers import NoSuchName", "install the packages that it needs: .*NoSuchName"),
        ("class TinyConfig(:", r"is not Python that can run here \(.*download it again"),
        ("class Other: pass", "has no attribute"),
        (None, "modeling_tiny"),
    ],
    ids=["package", "name", "syntax", "class", "file"],
)
@pytest.mark.parametrize("kind", ["AutoConfig", "AutoModelForCausalLM"])
def test_remote_code_that_cannot_be_imported(tmp_path, monkeypatch, kind, code, reason):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    model_type = "tiny_remote" if kind == "AutoConfig" else "olmo"
    write_config(
        folder, {**config_of("olmo"), "model_type": model_type, "auto_map": {kind: "modeling_tiny.TinyConfig"}}
    )
    if code is not None:
        (folder / "modeling_tiny.py").write_text(code)
    with pytest.raises(ValueError, match=f"checkpoint.*{reason}"):
        fallback_spec(folder, trust_remote_code=True)


# Refusals that the configuration is enough for

VISION = {"vision_config": {"model_type": "clip_vision_model"}, "text_config": {"model_type": "llama"}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "not a causal language model"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "not a causal language model"),
        ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], **VISION}, "multimodal"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "multimodal"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "keys and values of the tokens"),
        ({"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"]}, "linear_attention"),
        ({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}, "keeps another state"),
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, "attention interface"),
        ({"model_type": "no_such", "architectures": ["NoSuch"]}, "does not know model_type='no_such'"),
        ({"architectures": ["NoSuch"]}, "does not know model_type=None"),
        ({**config_of("olmo"), "quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({**config_of("olmo"), "auto_map": "x"}, r"config\.json: auto_map must be an object, got 'x'"),
    ],
    ids=lambda x: x.get("model_type", "none") if isinstance(x, dict) else None,
)
def test_refused_configurations(tmp_path, config, reason):
    with pytest.raises(ValueError, match=reason):
        fallback_spec(write_config(tmp_path, config))


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
def test_bad_field(tmp_path, name):
    with pytest.raises(ValueError, match=r"config\.json.*\n?.*" + name):
        fallback_spec(write_config(tmp_path, config_of("olmo", **{name: "many"})))


def test_dtype_of_the_checkpoint(tmp_path):
    assert fallback_spec(write_config(tmp_path, config_of("olmo", torch_dtype="bfloat16"))).dtype == torch.bfloat16
    assert fallback_spec(write_config(tmp_path, config_of("olmo"))).dtype == torch.float32
    with pytest.raises(ValueError, match="torch_dtype must be one of"):
        fallback_spec(write_config(tmp_path, config_of("olmo", torch_dtype="float64")))


def test_rotations_that_change_with_the_longest_position():
    config = AutoConfig.for_model("phimoe", **CASES["phimoe"])
    check_rope(config, 128)
    with pytest.raises(ValueError, match=r"longrope .* set max_model_len=128"):
        check_rope(config, 129)
    dynamic = AutoConfig.for_model("llama", **SMALL, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    check_rope(dynamic, 256)
    with pytest.raises(ValueError, match=r"dynamic .* set max_model_len=256"):
        check_rope(dynamic, 257)
    check_rope(AutoConfig.for_model("llama", **SMALL, rope_scaling={"rope_type": "linear", "factor": 2.0}), 10**6)


def test_longrope_beyond_its_trained_length(tmp_path):
    with pytest.raises(ValueError, match="set max_model_len=128"):
        load(write_config(tmp_path, config_of("phimoe")), load_format="dummy", max_model_len=129)


def test_old_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    with pytest.raises(ValueError, match=r"needs transformers 5, this is 4\.57\.1"):
        fallback_spec(write_config(tmp_path, config_of("olmo")))


def test_forward_without_positions(tmp_path, monkeypatch):
    monkeypatch.setattr(OlmoForCausalLM, "forward", lambda self, input_ids, **kwargs: None)
    with pytest.raises(ValueError, match="does not take position_ids"):
        fallback_spec(write_config(tmp_path, config_of("olmo")))


# Refusals of the probe

MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("deepseek_v3", **MLA), "keys have 24 elements and its values 16"),
        (config_of("bert"), "not causal"),
        (config_of("nemotron"), "does not pass keyword arguments on"),
        (config_of("doge"), "its attention computes a mask of its own from transformers' one"),
        (config_of("diffllama"), r"those that do are \[0, 0, 1, 1, 2, 2\]"),
        (config_of("qwen3", head_dim=20), "multiples of 8 from 16 to 512, it has 20"),
    ],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else None,
)
def test_refused_by_the_probe(tmp_path, config, reason):
    folder = write_config(tmp_path, config)
    with pytest.raises(ValueError, match=reason):
        load(folder, load_format="dummy")


def llama() -> Any:
    register()
    return reference_model(tiny_config("llama"))


def probe(lm: Any) -> TransformersDecoder:
    spec = FallbackSpec("Llama", 101, 64, 3, 2, 16, 256, (2,), torch.float32)
    return TransformersDecoder(lm, spec, dtype=torch.float32, max_model_len=64)


def test_probe_of_a_sound_model():
    assert probe(llama()).windows == (None, None, None)


@pytest.mark.parametrize("length", [2, 3])
def test_probe_with_hardly_any_positions(length):
    spec = FallbackSpec("Llama", 101, 64, 3, 2, 16, 256, (2,), torch.float32)
    TransformersDecoder(llama(), spec, dtype=torch.float32, max_model_len=length)


def test_positions_of_its_own():
    lm = llama()
    forward = lm.model.forward
    lm.model.forward = lambda position_ids=None, **kwargs: forward(**kwargs)
    with pytest.raises(ValueError, match="logits differ"):
        probe(lm)


def test_tokens_that_meet_outside_attention():
    lm = llama()
    lm.model.embed_tokens.register_forward_hook(lambda module, args, x: x + torch.nn.functional.pad(x, (0, 0, 1, -1)))
    with pytest.raises(ValueError, match="logits differ"):
        probe(lm)


class ChangesItsInput(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=None if input_ids is None else (input_ids + 1) % 101, **kwargs)


def test_work_in_front_of_the_base_model():
    lm = llama()
    lm.__class__ = ChangesItsInput
    with pytest.raises(ValueError, match="logits differ"):
        probe(lm)


def test_unknown_argument_of_attention():
    lm = llama()
    forward = lm.model.forward
    lm.model.forward = lambda **kwargs: forward(**kwargs, position_bias=torch.zeros(1), head_mask=None)
    with pytest.raises(ValueError, match="no equivalent of: position_bias"):
        probe(lm)


def test_mask_of_its_own():
    lm = llama()
    forward = lm.model.forward
    lm.model.forward = lambda input_ids, **kwargs: forward(
        input_ids=input_ids, **{**kwargs, "attention_mask": torch.zeros(1, 1, 6, 6)}
    )
    with pytest.raises(ValueError, match="does not mask through"):
        probe(lm)


def test_mask_of_its_own_while_serving():
    lm = llama()
    forward = lm.model.forward

    def masks_when_served(input_ids, paged_step=None, **kwargs):
        if isinstance(paged_step, PagedStep):
            kwargs["attention_mask"] = torch.zeros(1, 1, input_ids.shape[1], input_ids.shape[1])
        return forward(input_ids=input_ids, paged_step=paged_step, **kwargs)

    lm.model.forward = masks_when_served
    with pytest.raises(ValueError, match="not one of transformers' mask functions"):
        probe(lm)


def test_attention_that_does_not_know_its_layer():
    lm = llama()
    del lm.model.layers[1].self_attn.layer_idx
    with pytest.raises(ValueError, match="which layer it belongs to"):
        probe(lm)


def test_layer_without_attention():
    lm = llama()
    lm.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ValueError, match=r"those that do are \[0, 2\]"):
        probe(lm)


def test_keys_of_its_own(monkeypatch):
    """Learned keys beside those of the tokens: the cache has no slots for them."""
    extra = torch.zeros(1, 2, 4, 16)
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.apply_rotary_pos_emb",
        lambda q, k, cos, sin: (q, torch.cat([extra, k], dim=2)),
    )
    with pytest.raises(ValueError, match="keys other than those of its own tokens"):
        probe(llama())


def test_elements_of_a_head_apart_in_memory(monkeypatch):
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.apply_rotary_pos_emb",
        lambda q, k, cos, sin: (q.mT.contiguous().mT, k.mT.contiguous().mT),
    )
    probe(llama())


def test_vocabulary_of_another_size():
    spec = FallbackSpec("Llama", 100, 64, 3, 2, 16, 256, (2,), torch.float32)
    with pytest.raises(ValueError, match="101 logits for a vocabulary of 100"):
        TransformersDecoder(llama(), spec, dtype=torch.float32, max_model_len=64)


def test_code_that_needs_a_mask():
    lm = llama()
    forward = lm.model.layers[0].forward
    lm.model.layers[0].forward = lambda x, attention_mask, **kwargs: forward(
        x, attention_mask=attention_mask[0], **kwargs
    )
    with pytest.raises(ValueError, match="its code stops with TypeError"):
        probe(lm)


def test_no_base_model():
    with pytest.raises(ValueError, match="not separate from a base model"):
        probe(llama().model)


def test_shapes_that_differ():
    mask = Mask(causal_mask_function, own=False)
    calls = [LayerCall(0, (2, 16, 16), mask), LayerCall(1, (1, 16, 16), mask)]
    with pytest.raises(ValueError, match="different"):
        common_shape(calls, range(2))
    assert common_shape(calls[:1], range(1)) == (2, 16)


# Masks


@pytest.mark.parametrize("length", [1, 2, 50, 64])
@pytest.mark.parametrize("window", [1, 2, 7, 33, 49, 50, 51, 1000])
def test_window_of_a_mask(length, window):
    mask = Mask(sliding_window_causal_mask_function(window), own=False)
    assert mask.window(length, CPU) == (None if window >= length else window)
    assert Mask(causal_mask_function, own=False).window(length, CPU) is None


@pytest.mark.parametrize("chunk", range(1, 70))
def test_chunks_are_no_window(chunk):
    """Unless a chunk holds all, or one token."""
    mask = Mask(chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64)), own=False)
    if chunk >= 64 or chunk == 1:
        assert mask.window(64, CPU) == (None if chunk >= 64 else 1)
    else:
        with pytest.raises(ValueError, match="neither causal nor a sliding window"):
            mask.window(64, CPU)


def test_masks_that_are_refused():
    with pytest.raises(ValueError, match="not causal"):
        Mask(lambda batch, head, query, key: query >= 0, own=False).window(8, CPU)
    with pytest.raises(ValueError, match="rule of its own"):
        Mask(causal_mask_function, own=True).window(8, CPU)
    for window in (0, -1):
        with pytest.raises(ValueError, match="do not see themselves: sliding_window"):
            Mask(sliding_window_causal_mask_function(window), own=False).window(8, CPU)
