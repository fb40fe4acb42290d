"""The public trainer with everything left to the planner: the same bits as the plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from counterpoint import Trainer

from .bench import Batch, Outcome, Problem, differences, train_plainly

LENGTH = 16
VOCABULARY = 67


def causal(batch_size: int) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (batch_size, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


class Looks(nn.Module):
    """Looks at dtypes, which autocast changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(x).to(y.dtype).float() * 3 + y
        return x


def vectors(batch_size: int) -> Batch:
    return {"x": torch.randn(batch_size, 32), "target": torch.randn(batch_size, 32)}


def regression(output: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(output, batch["target"])


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
        weights = {name: trainer.store.read_parameter(name) for name, _ in model.named_parameters()}
        states: dict[str, dict[str, object]] = {}
        for layer in range(trainer.frame.num_layers):
            for slot, tensor in trainer.store.read_state(layer).items():
                name, _, key = slot.rpartition("\0")
                states.setdefault(name, {})[key] = tensor
    expected = train_plainly(problem, 2)
    found = Outcome(weights, states, dict(model.named_buffers()), expected.losses)
    assert differences(found, expected) == []
    assert losses == pytest.approx([sum(step) / 3 for step in expected.losses], rel=1e-6)
