"""A model, its optimizer and an example batch -> training steps within a memory budget."""

from counterpoint.trainer.chosen_plan import ChosenPlan
from counterpoint.trainer.statistics import Statistics
from counterpoint.trainer.trainer import Trainer

__all__ = ["ChosenPlan", "Statistics", "Trainer"]
