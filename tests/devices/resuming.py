"""A script as a user would write it for torchrun: it saves every step and goes on from what it finds there.

On the first attempt the second process kills itself before step 3.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import counterpoint

STEPS, MICROBATCH = 5, 2


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return {"input": x, "y": (x[:, 0] > 0).long()}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)), nn.Linear(16, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def main(folder: Path) -> None:
    model, optimizer = build()
    saved = folder / "checkpoint"
    with counterpoint.Trainer(
        model, optimizer, example=batch(0), loss=loss, memory="2GiB", schedule="flush", microbatch=MICROBATCH,
        resume=saved if saved.exists() else None,
    ) as trainer:  # fmt: skip
        if trainer.device == 0:
            print(f"from step {trainer.step_count}", flush=True)
        while trainer.step_count < STEPS:
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
            if first and trainer.device == 1 and trainer.step_count == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step(batch(trainer.step_count))
            trainer.save(saved)
        trainer.export(folder / "exported")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
