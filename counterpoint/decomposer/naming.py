"""Segments -> names for people: the path of the module that most of a segment's parameters are used in."""

from collections import Counter
from collections.abc import Sequence

from torch import fx

from counterpoint.decomposer.nodes import module_path, num_elements
from counterpoint.decomposer.tracing import Trace

_MOST = 0.8


def name_segments(segments: Sequence[Sequence[fx.Node]], trace: Trace) -> list[str]:
    """Distinct names, a repeated path numbered from 2: shared, shared#2."""
    seen: Counter[str] = Counter()
    names = []
    for segment in segments:
        path = _main_path(segment, trace)
        seen[path] += 1
        names.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return names


def _main_path(segment: Sequence[fx.Node], trace: Trace) -> str:
    weights: Counter[str] = Counter()
    for node in segment:
        used = [source for source in node.all_input_nodes if source.name in trace.parameters]
        weights[module_path(node)] += sum(num_elements(source, 1) for source in used)
    if not weights.total():
        weights = Counter(module_path(node) for node in segment)
    return _deepest(weights) or "model"


def _deepest(weights: Counter[str]) -> str:
    """Go down from the root as long as one child holds most of the weight."""
    path = ""
    while True:
        children: Counter[str] = Counter()
        for other, weight in weights.items():
            if other != path and (not path or other.startswith(path + ".")):
                children[".".join(other.split(".")[: path.count(".") + 1 + bool(path)])] += weight
        if not children or children.most_common(1)[0][1] < _MOST * weights.total():
            return path
        path = children.most_common(1)[0][0]
