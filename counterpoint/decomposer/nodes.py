"""A graph node -> what is known of it: shape, bytes, work, what it reads, writes and aliases, and whether it draws."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod, sqrt
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import SymInt, Tensor, fx

from counterpoint.decomposer.chain import Extent

BATCH_SIZE = "batch_size"
NOMINAL_BATCH_SIZE = 8  # where costs are compared, whatever the batch size of the example
ELEMENT_WORK = 8  # one element of an element-wise op costs about as much as this many multiplications

_PRODUCTS = frozenset(
    [
        *("linear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "einsum", "bilinear", "tensordot"),
        *("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "scaled_dot_product_attention"),
        *("conv1d", "conv2d", "conv3d", "convolution"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu"),
    ]
)
_LOOKUPS = frozenset(["embedding", "embedding_bag"])
_SILENT_WRITES = {"batch_norm": "training", "instance_norm": "use_input_stats"}


def op_name(node: fx.Node) -> str:
    """The op without namespace and overload: "linear"."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return getattr(target, "__name__", str(target))


def argument(node: fx.Node, name: str) -> Any:
    """The node's argument of this name, or its default; None if the op has none."""
    return _argument(node.target, node.args, node.kwargs, name)


def _argument(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    schema = getattr(op, "_schema", None)
    if schema is None:
        return None
    for position, declared in enumerate(schema.arguments):
        if declared.name == name:
            given = args[position] if position < len(args) else declared.default_value
            return kwargs.get(name, given)
    return None


def extents(value: Any) -> tuple[Extent, ...] | None:
    """A traced tensor's shape in terms of the batch size; None if it is no tensor or not linear in the batch size."""
    if not isinstance(value, Tensor):
        return None
    sizes = [linear(size) for size in value.shape]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def linear(size: int | SymInt) -> Extent | None:
    """A traced size as `fixed + per_sample * batch_size`; None if it is not of this form."""
    return Extent(size) if isinstance(size, int) else _linear(size.node.expr)


@lru_cache(maxsize=4096)
def _linear(expression: sympy.Expr) -> Extent | None:
    symbols = list(expression.free_symbols)
    if not symbols:
        return Extent(int(expression))
    if len(symbols) > 1 or not str(symbols[0]).startswith("s"):  # "u..." depends on data
        return None
    at = {batch: expression.subs(symbols[0], batch) for batch in (1, 2, 3, 7)}
    slope = at[2] - at[1]
    if any(at[batch] != at[1] + slope * (batch - 1) for batch in at):
        return None
    return Extent(int(at[1] - slope), int(slope))


def num_elements(node: fx.Node, batch_size: int) -> int:
    """Elements of all the tensors a node yields; sizes that depend on data count as 1."""
    return sum(prod(_size(s, batch_size) for s in value.shape) for value in _tensors(node.meta.get("val")))


def num_bytes(node: fx.Node, batch_size: int) -> int:
    values = _tensors(node.meta.get("val"))
    return sum(prod(_size(s, batch_size) for s in value.shape) * value.dtype.itemsize for value in values)


def work(node: fx.Node, batch_size: int = NOMINAL_BATCH_SIZE) -> float:
    """About how many multiplications a node costs; only ratios matter."""
    if not is_heavy(node) or is_lookup(node):
        return ELEMENT_WORK * num_elements(node, batch_size) * (not is_view(node))
    sizes = sorted((num_elements(source, batch_size) for source in node.all_input_nodes), reverse=True)[:2]
    if op_name(node) == "scaled_dot_product_attention":
        return 4.0 * sizes[0] * _size(node.all_input_nodes[1].meta["val"].shape[-2], batch_size)
    return 2 * sqrt(prod(sizes) * num_elements(node, batch_size))  # exact for a matrix product


def is_heavy(node: fx.Node) -> bool:
    """Whether a layer may be built around this node, if it reads parameters: products, lookups, ops outside ATen."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.namespace != "aten" or op_name(node) in _PRODUCTS or is_lookup(node)


def is_lookup(node: fx.Node) -> bool:
    return op_name(node) in _LOOKUPS


def is_view(node: fx.Node) -> bool:
    """Whether the node yields no new elements (it may still copy, as reshape does)."""
    return node.target is operator.getitem or (
        isinstance(node.target, torch._ops.OpOverload) and any(True for _ in aliased(node)) and not any(written(node))
    )


def is_random(node: fx.Node) -> bool:
    """Whether running the node draws from the generator."""
    for graph in subgraphs(node):
        if any(is_random(inner) for inner in graph.nodes):
            return True
    return draws(node.target, node.args, node.kwargs)


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the op, called with these arguments, draws from the generator: dropout does not at rate 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    rates = [_argument(op, args, kwargs, name) for name in ("p", "dropout_p", "dropout")]
    modes = [_argument(op, args, kwargs, name) for name in ("train", "training")]
    return 0 not in rates and not any(mode is False for mode in modes)


def written(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose memory this node changes."""
    for position, graph in enumerate(subgraphs(node)):
        yield from _written_through(node, position, graph)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    for declared in schema.arguments:
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield from _nodes(argument(node, declared.name))
    if (switch := _SILENT_WRITES.get(op_name(node))) and argument(node, switch):
        yield from _nodes([argument(node, "running_mean"), argument(node, "running_var")])


def aliased(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose memory this node's result may share."""
    if node.target is operator.getitem or any(True for _ in subgraphs(node)):
        yield from (source for source in node.all_input_nodes if source.op != "get_attr")
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any(result.alias_info is not None for result in schema.returns):
        for declared in schema.arguments:
            if declared.alias_info is not None:
                yield from _nodes(argument(node, declared.name))


def written_placeholders(node: fx.Node) -> list[fx.Node]:
    """The placeholders whose memory this node changes, directly or through views of them."""
    found = dict.fromkeys(written(node))
    stack = list(found)
    while stack:
        for source in aliased(stack.pop()):
            if source not in found:
                found[source] = None
                stack.append(source)
    return [target for target in found if target.op == "placeholder"]


def subgraphs(node: fx.Node) -> Iterator[fx.Graph]:
    """The graphs a higher-order op runs, such as the body of `with torch.no_grad()`."""
    for source in node.all_input_nodes:
        if source.op == "get_attr" and node.op == "call_function":
            module = getattr(source.graph.owning_module, str(source.target))
            if isinstance(module, fx.GraphModule):
                yield module.graph


def module_path(node: fx.Node) -> str:
    """The path of the module whose forward made the node, without the wrapper around the model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return path.removeprefix("model").removeprefix(".").split("@")[0] if path.startswith("model") else ""


def _written_through(node: fx.Node, position: int, graph: fx.Graph) -> Iterator[fx.Node]:
    """Arguments of a higher-order op that its subgraph writes to directly."""
    arguments = [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr"]
    inner = [n for n in graph.nodes if n.op == "placeholder"]
    outer = dict(zip(inner, arguments, strict=False))
    for inside in graph.nodes:
        yield from (outer[target] for target in written(inside) if target in outer)


def _nodes(argument: Any) -> Iterator[fx.Node]:
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, list | tuple):
        yield from (item for item in argument if isinstance(item, fx.Node))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def _size(size: int | SymInt, batch_size: int) -> int:
    extent = linear(size)
    return 1 if extent is None else extent.at(batch_size)
