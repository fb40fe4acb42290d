"""Shapes have the parameters that were published."""

import pytest

from counterpoint.planner.catalog import shape
from counterpoint.planner.shapes import SHAPES, Transformer


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("bert-large", 335_174_458),
        ("llama-7b", 6_738_415_616),
        ("llama-8b", 8_030_261_248),
    ],
)
def test_published_parameters(name: str, parameters: int) -> None:
    assert shape(name).num_parameters == parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2-10b", 10), ("gpt2-20b", 20), ("gpt2-30b", 30), ("gpt2-40b", 40),
        ("gpt-2.2b", 2.2), ("gpt-3.8b", 3.8), ("bert96", 1.24),
    ],
)  # fmt: skip
def test_named_sizes(name: str, billions: float) -> None:
    assert shape(name).num_parameters == pytest.approx(billions * 10**9, rel=0.03)


def test_names_are_unique() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width 100 must divide into 3 heads"):
        Transformer("odd", "gpt2", 2, 100, 3, 1000, 64)


def test_an_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt2xl' \(did you mean gpt2-xl\?\)"):
        shape("gpt2xl")
