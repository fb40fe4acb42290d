"""A problem whose model is built with different weights in every process, and saving a training that has not begun."""

import os

import torch
from torch import nn

from tests.devices.problems import Mlp, Problem, Setting, make_trainer


class Unseeded(Problem):
    def build(self) -> nn.Module:
        torch.manual_seed(int(os.environ["RANK"]))
        return Mlp().train()


def save(problem: Problem, setting: Setting, folder: str, target: str) -> None:
    with make_trainer(problem, setting, folder) as trainer:
        trainer.save(target)
