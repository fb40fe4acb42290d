"""A trace -> the same trace without checks and no-ops, its batch size one input, its writes where they belong."""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from counterpoint.core.errors import ModelError
from counterpoint.decomposer.chain import Extent
from counterpoint.decomposer.nodes import (
    BATCH_SIZE,
    aliased,
    argument,
    linear,
    op_name,
    subgraphs,
    written,
    written_placeholders,
)
from counterpoint.decomposer.tracing import Trace

_CHECKS = frozenset(
    [
        *("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "_functional_assert_async"),
        *("sym_constrain_range", "sym_constrain_range_for_size"),
    ]
)
_DROPOUTS = frozenset(["dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout_"])


def clean(trace: Trace, device: torch.device) -> None:
    """Rewrite the trace's graph in place."""
    graph = trace.module.graph
    _use_batch_size(graph, trace)
    for inner in _all_graphs(graph):
        _remove_checks(inner)
        _remove_idle_dropout(inner)
        _place_on(inner, device)
    _refuse_written(graph, trace)
    _copy_written_batch(graph, trace)
    _name_buffers(graph, trace)
    _settle_buffers(graph, trace)
    _keep_constants(graph, trace)
    for inner in _all_graphs(graph):
        inner.eliminate_dead_code(lambda node: node.is_impure() or any(True for _ in written(node)))
    trace.module.recompile()


def _all_graphs(graph: fx.Graph) -> list[fx.Graph]:
    inner = [g for node in graph.nodes for sub in subgraphs(node) for g in _all_graphs(sub)]
    return [*inner, graph]


def _remove_checks(graph: fx.Graph) -> None:
    """Shapes are checked when a batch comes in. Only what a size that depends on data must be is still checked."""
    for node in list(graph.nodes):
        if node.op == "call_function" and op_name(node) in _CHECKS and not _asks_data(node):
            graph.erase_node(node)


def _asks_data(check: fx.Node) -> bool:
    sizes = [source for source in check.all_input_nodes if not isinstance(source.meta.get("val"), Tensor)]
    for node in sizes:
        sizes.extend(source for source in node.all_input_nodes if not isinstance(source.meta.get("val"), Tensor))
    return any(isinstance(source.meta.get("val"), Tensor) for node in sizes for source in node.all_input_nodes)


def _remove_idle_dropout(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        idle = argument(node, "p") == 0 or argument(node, "train") is False
        if node.op == "call_function" and op_name(node) in _DROPOUTS and idle:
            _replace(node, node.args[0])


def _place_on(graph: fx.Graph, device: torch.device) -> None:
    """Tensors made inside the graph are made on the device it will run on."""

    def moved(item: Any) -> Any:
        return device if isinstance(item, torch.device) else item

    for node in graph.nodes:
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, moved)
            node.kwargs = fx.node.map_aggregate(node.kwargs, moved)


def _use_batch_size(graph: fx.Graph, trace: Trace) -> None:
    """Every size that is linear in the batch size is computed from one placeholder."""
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        batch_size = graph.placeholder(BATCH_SIZE)
    source = next(node for node in graph.nodes if node.name in trace.batch)
    batch_size.meta["val"] = source.meta["val"].shape[0]
    made: dict[Extent, fx.Node] = {Extent(0, 1): batch_size}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node is batch_size or not isinstance(value, SymInt):
            continue
        extent = linear(value)
        if extent is not None and extent.per_sample:
            if extent not in made:
                made[extent] = _computed(extent, batch_size, last, value)
            _replace(node, made[extent])


def _computed(extent: Extent, batch_size: fx.Node, after: fx.Node, value: SymInt) -> fx.Node:
    graph = batch_size.graph
    with graph.inserting_after(after):
        size = graph.call_function(operator.mul, (batch_size, extent.per_sample))
    if extent.fixed:
        with graph.inserting_after(size):
            size = graph.call_function(operator.add, (size, extent.fixed))
    size.meta["val"] = value
    return size


def _refuse_written(graph: fx.Graph, trace: Trace) -> None:
    for node in graph.nodes:
        for target in written_placeholders(node):
            if target.name in trace.parameters:
                raise ModelError(
                    f"the model changes its parameter {trace.parameters[target.name]!r} in forward ({op_name(node)}): "
                    f"only the optimizer may; make it a buffer"
                )


def _copy_written_batch(graph: fx.Graph, trace: Trace) -> None:
    """A model may write to its batch: it writes to a copy instead."""
    targets = dict.fromkeys(t for node in graph.nodes for t in written_placeholders(node) if t.name in trace.batch)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for target in targets:
        with graph.inserting_after(last):
            copy = graph.call_function(torch.ops.aten.clone.default, (target,))
        copy.meta["val"] = target.meta["val"]
        for user in list(target.users):
            if user is not copy:
                user.replace_input_with(target, copy)


def _name_buffers(graph: fx.Graph, trace: Trace) -> None:
    """What an in-place op on a buffer returns is the buffer itself: call it that, for it to pass no cut."""
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if (
            isinstance(first, fx.Node)
            and first.name in trace.buffers
            and first in written(node)
            and first in aliased(node)
        ):
            node.replace_all_uses_with(first)


def _settle_buffers(graph: fx.Graph, trace: Trace) -> None:
    """An assigned buffer is written at the end of the trace: move the write up to where its value is known."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.args[0].name not in trace.buffers:
            continue
        buffer, value = node.args[0], node.args[1]
        uses = [user for user in buffer.users if user is not node] + [value]
        latest = max(uses, key=lambda user: order[user])
        if latest.op != "placeholder":
            latest.append(node)


def _keep_constants(graph: fx.Graph, trace: Trace) -> None:
    """A constant that nobody writes to needs no fresh copy for each run."""
    for node in list(graph.nodes):
        is_copy = node.op == "call_function" and op_name(node) in ("lift_fresh_copy", "detach_")
        if is_copy and node.args[0].name in trace.constants and not _is_written([node]):
            _replace(node, node.args[0])


def _is_written(nodes: Iterable[fx.Node]) -> bool:
    family = list(nodes)
    for node in family:
        family.extend(user for user in node.users if node in aliased(user) and user not in family)
    return any(
        w in family for node in family for user in node.users for w in written(user) if op_name(user) != "detach_"
    )


def _replace(node: fx.Node, replacement: fx.Node) -> None:
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)
