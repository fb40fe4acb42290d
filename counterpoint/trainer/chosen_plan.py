"""The plan that was chosen, as a person reads it: printed, it is its forecast."""

from dataclasses import fields

from counterpoint.core.plan import Plan


class ChosenPlan(Plan):
    """A plan, equal to any plan that decides the same."""

    __slots__ = ("text",)
    text: str

    @staticmethod
    def of(plan: Plan, text: str) -> "ChosenPlan":
        chosen = ChosenPlan(**{field.name: getattr(plan, field.name) for field in fields(Plan)})
        object.__setattr__(chosen, "text", text)
        return chosen

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and _decisions(self) == _decisions(other)

    def __hash__(self) -> int:
        return hash(_decisions(self))


def _decisions(plan: Plan) -> tuple[object, ...]:
    return tuple(getattr(plan, field.name) for field in fields(Plan))
