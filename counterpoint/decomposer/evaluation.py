"""A chain as it trains -> the same chain as it is evaluated: without dropout, with running statistics, nothing written.

The layers, their weights and the values between them stay the same, so that a program for the one runs the other.
A trace does not say why an op is in training mode, so an op that its model keeps in training mode on purpose during
evaluation is switched too; and a branch that a model takes only in evaluation is not seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from counterpoint.decomposer.chain import Body, Chain, Layer
from counterpoint.decomposer.layering import GraphBody
from counterpoint.decomposer.modules import ModuleBody
from counterpoint.decomposer.nodes import argument, is_random, op_name

_DROPOUTS = frozenset(["dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"])
_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
_MODES = dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu", "native_dropout"), "train") | {"rrelu": "training"}


@dataclass(frozen=True, slots=True)
class EvaluatedGraph:
    """A graph with its switches off; what it would write to buffers is forgotten."""

    body: GraphBody

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return self.body.run(parameters, buffers, inputs)[0], {}


@dataclass(frozen=True, slots=True)
class EvaluatedModule:
    """A module in eval mode for as long as it runs."""

    body: ModuleBody

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        modes = [(module, module.training) for module in self.body.module.modules()]
        self.body.module.eval()
        try:
            return self.body.run(parameters, buffers, inputs)[0], {}
        finally:
            for module, mode in modes:
                module.training = mode


def evaluation_chain(chain: Chain) -> Chain:
    known: dict[int, fx.GraphModule] = {}
    return replace(chain, layers=tuple(_evaluated(layer, known) for layer in chain.layers))


def _evaluated(layer: Layer, known: dict[int, fx.GraphModule]) -> Layer:
    body: Body
    if isinstance(layer.body, GraphBody):
        module = layer.body.module
        if id(module) not in known:
            known[id(module)] = _switched(module)
        body = EvaluatedGraph(replace(layer.body, module=known[id(module)]))
        random = any(is_random(node) for node in known[id(module)].graph.nodes)
    elif isinstance(layer.body, ModuleBody):
        body, random = EvaluatedModule(layer.body), layer.random
    else:
        raise TypeError(f"a layer of {type(layer.body).__name__} cannot be evaluated")
    return replace(layer, body=body, hollow=None, random=random, mutates=())


def _switched(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, and of those inside it, in evaluation mode."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule(module, graph)
    for node in list(graph.nodes):
        inner = getattr(copy, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            setattr(copy, str(node.target), _switched(inner))
        elif node.op == "call_function":
            _switch(node)
    copy.recompile()
    return copy


def _switch(node: fx.Node) -> None:
    name = op_name(node)
    if name.rstrip("_") in _DROPOUTS:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)
    elif name in _STATISTICS and argument(node, "running_mean") is not None:
        _set(node, _STATISTICS[name], False)
    elif name in _MODES:
        _set(node, _MODES[name], False)
    elif argument(node, "dropout_p"):
        _set(node, "dropout_p", 0.0)


def _set(node: fx.Node, name: str, value: Any) -> None:
    """Give the node's argument of this name another value."""
    names = [declared.name for declared in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)
