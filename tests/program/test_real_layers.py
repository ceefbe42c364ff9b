"""Real models whose layers know their number, or have different adapters, against eager torch.

`experiments/models/torch_layers.py` compares all of them.
"""

import pytest

from experiments.models.torch_layers import Row, work


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("row", "stacks"),
    [
        pytest.param(Row("numbered", "gpt2"), [], marks=pytest.mark.full),
        pytest.param(Row("frozen", "llama", "frozen_first"), [2, 2], marks=pytest.mark.full),
        (Row("adapters", "llama", "LoRA, patterns of scales"), [2]),
        (Row("adapters", "llama", "VeRA"), [4]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_layers_of_real_models_compute_their_own(row, stacks):
    result = work(row)
    assert (result["status"], result["stacks"]) == ("equal", stacks), result
