"""The public trainer with everything left to the planner: the same bits as the plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterpoint import Trainer
from tests.home import read_parameters, read_states
from tests.small_models import WIDTH, regression, vectors
from tests.small_transformers import causal, llama

from .bench import Outcome, Problem, differences, train_plainly


class Looks(nn.Module):
    """Looks at dtypes, which autocast changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(x).to(y.dtype).float() * 3 + y
        return x


MODELS: dict[str, Any] = {"llama": (llama, causal, None), "looks": (Looks, vectors, regression)}


@pytest.mark.parametrize(("name", "precision"), [("llama", "fp32"), ("llama", "bf16"), ("looks", "bf16")])
def test_same_as_plain(name: str, precision: str, tmp_path: Path) -> None:
    autocast = torch.bfloat16 if precision == "bf16" else None
    problem = Problem(*MODELS[name], max_grad_norm=1.0, autocast=autocast)
    model = problem.model()
    batches = problem.batches()
    options = {"microbatch": 2, "precision": precision, "max_grad_norm": 1.0, "loss": problem.loss}
    with Trainer(model, problem.optimizer(model), example=batches[0], disk=tmp_path, **options) as trainer:
        losses = [trainer.step(batch) for batch in batches]
        trainer.settle()
        weights, states = read_parameters(trainer.store), read_states(trainer.store)
    expected = train_plainly(problem, 2)
    found = Outcome(weights, states, dict(model.named_buffers()), expected.losses)
    assert differences(found, expected) == []
    assert losses == pytest.approx([sum(step) / 3 for step in expected.losses], rel=1e-6)
