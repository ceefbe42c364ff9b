"""Options of a source that follow from the topology."""

import pytest

from autoshard.errors import UserError
from autoshard.planning import settled_options


@pytest.mark.parametrize(
    ("kernel", "topology", "said"),
    [
        ("cudnn", "v5e:2x4", "--attention cudnn is a kernel for NVIDIA's GPUs, not for v5e:2x4; use auto."),
        ("splash", "h100:8", "--attention splash is a kernel for TPUs, not for h100:8; use auto."),
        ("cached", "h200:8", "--attention cached is a kernel for TPUs, not for h200:8; use auto."),
    ],
)
def test_a_kernel_of_other_hardware_is_refused(kernel: str, topology: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        settled_options({"attention": kernel}, topology)
    assert str(caught.value) == said


@pytest.mark.parametrize(("kernel", "topology"), [("cudnn", "h100:8"), ("splash", "v6e:2x4"), ("cudnn", "cpu:8")])
def test_its_own_hardware_and_a_cpu_may_have_it(kernel: str, topology: str) -> None:
    assert settled_options({"attention": kernel}, topology)["attention"] == kernel
