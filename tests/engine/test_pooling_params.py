import pytest

from tritonllm import PoolerConfig, PoolingParams
from tritonllm.config.engine import EngineConfig


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be of type int of at least -1"),
        ({"dimensions": 0}, "dimensions must be of type int of at least 1"),
        ({"dimensions": True}, "dimensions must be of type int"),
        ({"normalize": 1}, "normalize must be of type bool"),
        ({"use_activation": "no"}, "use_activation must be of type bool"),
        ({"normalize": True, "use_activation": False}, "normalize and use_activation mean the same"),
        ({"step_tag_id": -1}, "step_tag_id must be of type int of at least 0"),
        ({"returned_token_ids": []}, "returned_token_ids must be a list of columns that is not empty"),
        ({"returned_token_ids": "12"}, "returned_token_ids must be a list"),
        ({"returned_token_ids": [-1]}, "returned_token_ids entries must be"),
        ({"task": "rank"}, "task must be one of embed, classify, token_embed, token_classify, got 'rank'"),
    ],
)
def test_bad_values_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        PoolingParams(**kwargs)


def test_assigned_values_are_checked_too():
    params = PoolingParams(returned_token_ids=[1])
    copy = params.clone()
    copy.returned_token_ids.append(2)
    copy.dimensions = -3
    assert params.returned_token_ids == [1]
    with pytest.raises(ValueError, match="dimensions"):
        copy.checked()


def make(**kwargs):
    return EngineConfig.from_kwargs(model="m", **kwargs).model


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"runner": "draft"}, "runner must be one of auto, generate, pooling, got 'draft'"),
        ({"convert": "reward"}, "convert must be one of auto, none, embed, classify"),
        ({"runner": "generate", "convert": "embed"}, "runner='generate' contradicts convert='embed'"),
        ({"runner": "pooling", "convert": "none"}, "contradicts"),
        ({"task": "embed"}, "task='embed': .* use runner='pooling', and convert='embed'"),
        ({"pooler_config": "MEAN"}, "pooler_config is no JSON .*: 'MEAN'"),
        ({"pooler_config": "3"}, "pooler_config must be a PoolerConfig, a dict or its JSON, got 3"),
        ({"pooler_config": {"pooling": "MEAN"}}, "pooler_config: 'pooling' is not supported; there are pooling_type"),
        ({"pooler_config": {"pooling_type": "MAX"}}, "pooler_config: pooling_type must be one of LAST, CLS, MEAN"),
        ({"pooler_config": {"pooling_type": "CLS", "seq_pooling_type": "CLS"}}, "are the same: give one"),
        ({"pooler_config": {"dimensions": 0}}, "pooler_config: dimensions must be"),
    ],
)
def test_bad_engine_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


def test_pooler_configs():
    assert make(pooler_config={"pooling_type": "CLS"}).pooler_config == PoolerConfig(seq_pooling_type="CLS")
    assert make(pooler_config='{"pooling_type": "CLS"}').pooler_config == PoolerConfig(seq_pooling_type="CLS")
    assert make(override_pooler_config=PoolerConfig(pooling_type="STEP")).pooler_config.tok_pooling_type == "STEP"
    assert make(pooler_config=None).pooler_config == PoolerConfig()


def test_a_request_has_the_last_word():
    config = PoolerConfig(normalize=False, dimensions=8, step_tag_id=3)
    merged = config.merged(PoolingParams(task="embed"))
    assert (merged.use_activation, merged.dimensions, merged.step_tag_id) == (False, 8, None)
    assert config.merged(PoolingParams(task="classify")).use_activation is None
    merged = config.merged(PoolingParams(task="token_classify", use_activation=True, step_tag_id=4))
    assert (merged.use_activation, merged.dimensions, merged.step_tag_id) == (True, None, 4)
