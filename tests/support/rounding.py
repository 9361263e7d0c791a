"""A CPU that rounds otherwise: every sum, product and root of PyTorch in float32 comes out a little different.

`pytest -p tests.support.rounding -k matches` compares engine and twins on it. Another instruction set sums in another order, so a
result moves by some units in the last place of the largest terms. Here each entry moves by up to four units in the last
place of itself and half of one of the largest entry; zeros stay zero. Nothing is the same twice, so that tests of equal bits
fail on it.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations whose results depend on the order of summation, or on an approximation of exp, log or a root.
INEXACT = (
    *("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "convolution", "convolution_backward", "mkldnn_convolution"),
    *("sum", "mean", "linalg_vector_norm", "norm", "var", "var_mean", "cumsum", "native_batch_norm"),
    *(
        "native_batch_norm_backward",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "batch_norm_backward",
    ),
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
    *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "exp", "log", "logsumexp"),
    *("tanh", "sigmoid", "gelu", "gelu_backward", "_scaled_dot_product_flash_attention_for_cpu", "avg_pool2d"),
)
SEED = int(os.environ.get("ROUNDING_SEED", "1"))


class Rounding(TorchDispatchMode):
    """Moves the results of INEXACT operations, see the module."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in INEXACT:
            for output in result if isinstance(result, tuple | list) else [result]:
                if isinstance(output, torch.Tensor) and output.dtype == torch.float32 and output.device.type == "cpu":
                    move_(output)
        return result


GENERATOR = torch.Generator().manual_seed(SEED)


def move_(values):
    """Add the noise in place."""
    largest = values.abs().max() if values.numel() else torch.tensor(torch.nan)
    if torch.isfinite(largest):
        noise = torch.empty(values.shape).uniform_(-6e-8, 6e-8, generator=GENERATOR)
        values.add_(noise * (4 * values.abs() + 0.5 * largest * (values != 0)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    with Rounding():
        yield
