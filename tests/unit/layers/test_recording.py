"""What is seen of torch while a step is recorded: what would not be computed again is noted, memory is kept."""

import numpy as np
import pytest
import torch

from girih.layers.recording import Memory, Recording, remade

X = torch.arange(24.0).view(4, 6)

VIEWS = {
    "empty": lambda x: torch.empty(3, 4, dtype=torch.int8),
    "empty like": torch.empty_like,
    "view": lambda x: x.view(2, 12).split_with_sizes((4, 8), dim=1),
    "flatten": lambda x: x.unsqueeze(1).flatten(1)[:, 2:],
    "nothing to do": lambda x: x.contiguous().to(torch.float32).reshape(24).data_ptr(),
}
COMPUTED = {
    "sum": lambda x: x + 1,
    "in place": lambda x: x.add_(0),
    "zeros": lambda x: torch.zeros(3),
    "another dtype": lambda x: x.to(torch.bfloat16),
    "a copy that looks like a view": lambda x: x.t().reshape(24),
    "made contiguous": lambda x: x.t().contiguous(),
    "a number": lambda x: x[0, 0].item(),
    "an array": lambda x: torch.from_numpy(np.zeros(3)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("inference", [True, False])
def test_views_and_empty_tensors_compute_nothing(name, inference):
    with torch.inference_mode(inference), Recording(Memory()) as recording:
        VIEWS[name](X)
    assert recording.foreign is None


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("inference", [True, False])
def test_what_torch_computes_or_is_handed_is_noted(name, inference):
    with torch.inference_mode(inference), Recording(Memory()) as recording:
        COMPUTED[name](X)
    assert recording.foreign is not None


def test_what_is_made_of_positions_can_be_made_again():
    positions = torch.tensor([1.0, 2.0])
    with Recording(Memory()) as recording:
        (made,) = remade(lambda: [positions * 3])
    assert recording.foreign is None
    ((make, kept),) = recording.remade
    positions.fill_(5)
    assert kept[0] is made
    assert make()[0].tolist() == [15, 15]
    assert remade(lambda: [positions + 1])[0].tolist() == [6, 6], "outside of any recording"


def test_memory_is_used_again_when_nobody_holds_it():
    memory = Memory()
    first = memory.empty((10, 10), torch.float32)
    at = first.data_ptr()
    part = first.view(100)[50:]
    del first
    other = memory.empty((3,), torch.float32)
    assert other.data_ptr() != at, "a view is held"
    del part
    again = memory.empty((7, 2), torch.int64)
    assert again.data_ptr() == at
    assert again.shape == (7, 2)
    assert memory.empty((0, 4), torch.bfloat16).shape == (0, 4)
