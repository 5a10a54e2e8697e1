"""docs/models.md: the table has every family, and the worked example works."""

import re
from pathlib import Path

import torch
from support.compare import relative_error
from support.tiny_models import PagedRunner, PagedSequence, load_decoder, random_tokens, reference_logits
from transformers import AutoConfig, AutoModelForCausalLM

from tritonllm.models.families import FAMILIES

DOC = Path(__file__).parents[1] / "docs" / "models.md"
TEXT = DOC.read_text(encoding="utf-8")


def test_every_family_has_a_row():
    assert sorted(re.findall(r"^\| `([A-Z]\w+)` \|", TEXT, flags=re.MULTILINE)) == sorted(FAMILIES)


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    assert links and [link for link in links if not (DOC.parent / link).exists()] == []


def test_the_worked_example(tmp_path, monkeypatch):
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(compile(block, "docs/models.md", "exec"), names)
    monkeypatch.setitem(FAMILIES, "Starcoder2ForCausalLM", names["STARCODER2"])
    config = AutoConfig.for_model(
        "starcoder2",
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=6,
    )
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for p in theirs.parameters():
        p.data.normal_(0, 0.2)
    theirs.save_pretrained(tmp_path)
    tokens = random_tokens(30, 101, seed=0)
    ours = PagedRunner(load_decoder(tmp_path)).prefill(PagedSequence(), tokens, [11, 19])
    assert relative_error(ours, reference_logits(theirs, tokens)) < 1e-5
