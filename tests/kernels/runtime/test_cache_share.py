"""The division of a processor's memory, with a driver that is not there."""

from unittest.mock import Mock, patch

import pytest

from tritonllm.kernels.runtime import cache_share


class Kernel:
    def __init__(self, function):
        self.function = function


@pytest.fixture
def driver():
    driver = Mock()
    driver.cuFuncSetAttribute.return_value = 0
    with patch.object(cache_share, "_driver", return_value=driver):
        yield driver


def said(driver):
    return [tuple(argument.value for argument in call.args) for call in driver.cuFuncSetAttribute.call_args_list]


def test_each_kernel_is_told_once(driver):
    """With CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, which is 9; also one that the driver has put where
    another one was."""
    first, second, in_its_place = Kernel(4096), Kernel(8192), Kernel(4096)
    for kernel in (first, second, first, in_its_place, second):
        cache_share.wish_for_shared_memory(kernel, 43)
    assert said(driver) == [(4096, 9, 43), (8192, 9, 43), (4096, 9, 43)]


@pytest.mark.parametrize("kernel", [None, object(), Kernel(None)])
def test_what_is_not_on_a_gpu_is_left_alone(driver, kernel):
    cache_share.wish_for_shared_memory(kernel, 43)
    assert not said(driver)


def test_a_refusal_is_logged_once(driver, caplog):
    driver.cuFuncSetAttribute.return_value = 1
    kernel = Kernel(64)
    for _ in range(2):
        cache_share.wish_for_shared_memory(kernel, 43)
    assert [record.getMessage().endswith("43%: error 1") for record in caplog.records] == [True]
