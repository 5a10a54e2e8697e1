"""The division of a processor's memory, with a driver that is not there."""

from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest

from tritonllm.kernels.runtime import cache_share


@pytest.fixture
def driver():
    driver = Mock()
    driver.cuFuncSetAttribute.return_value = 0
    cache_share._divide.cache_clear()
    with patch.object(cache_share, "_driver", return_value=driver):
        yield driver
    cache_share._divide.cache_clear()


def said(driver):
    return [tuple(argument.value for argument in call.args) for call in driver.cuFuncSetAttribute.call_args_list]


def test_each_kernel_is_told_once(driver):
    """With CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, which is 9."""
    for function in (4096, 8192, 4096):
        cache_share.wish_for_shared_memory(SimpleNamespace(function=function), 43)
    assert said(driver) == [(4096, 9, 43), (8192, 9, 43)]


@pytest.mark.parametrize("kernel", [None, SimpleNamespace(), SimpleNamespace(function=None)])
def test_what_is_not_on_a_gpu_is_left_alone(driver, kernel):
    cache_share.wish_for_shared_memory(kernel, 43)
    assert not said(driver)


def test_a_refusal_is_an_error(driver):
    driver.cuFuncSetAttribute.return_value = 1
    for _ in range(2):  # not remembered as done
        with pytest.raises(RuntimeError, match="43%: error 1"):
            cache_share.wish_for_shared_memory(SimpleNamespace(function=64), 43)
