"""A list of modules -> chain: each module is a layer. The way for models that cannot be traced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

from torch import Tensor, nn
from torch.func import functional_call

from counterpoint.core.errors import ModelError
from counterpoint.decomposer.assembly import NO_GRADIENT, own
from counterpoint.decomposer.chain import MODEL_INPUT, Batch, Chain, Layer, Value
from counterpoint.decomposer.example import Call, Loss, batch_shape, read_example, refuse_trained_loss, take_loss
from counterpoint.decomposer.observation import Observation, observe
from counterpoint.decomposer.tensors import Tensors, read_tensors

Entry = Literal["batch", "tensor", "tuple"]


@dataclass(frozen=True, slots=True)
class ModuleBody:
    """A module called with other tensors in place of its own. Names come in pairs: the module's own, the chain's.

    The first `num_inputs` inputs are the module's; the others are the batch, for the loss.
    """

    module: nn.Module
    parameters: tuple[tuple[str, str], ...]
    buffers: tuple[tuple[str, str], ...]
    mutates: tuple[str, ...]
    entry: Entry
    num_inputs: int
    call: Call
    is_last: bool
    loss: Loss | None

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        copies = {name: buffers[name].clone() for name in self.mutates}
        output, after = self.apply(parameters, {**buffers, **copies}, inputs)
        mutated = {name: after[name] for name in copies}
        return (output,) if isinstance(output, Tensor) else tuple(output), mutated

    def apply(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Any, dict[str, Tensor]]:
        """The module's output as it is, or the loss, and all its buffers afterwards; it may write to those given."""
        tensors = {local: parameters[name] for local, name in self.parameters}
        tensors |= {local: buffers[name] for local, name in self.buffers}
        output = self._enter(tensors, tuple(inputs[: self.num_inputs]))
        if self.is_last:
            batch = dict(zip(self.call.names, inputs[self.num_inputs :], strict=False))
            output = take_loss(output, self.call.batch(batch) if batch else None, self.loss)
        return output, {name: tensors[local] for local, name in self.buffers}

    def _enter(self, tensors: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self.module, tensors, args, kwargs, tie_weights=False)

        if self.entry == "batch":
            return self.call.apply(call, dict(zip(self.call.given, inputs, strict=True)))
        return call(inputs) if self.entry == "tuple" else call(*inputs)


def chain_of_modules(modules: Sequence[nn.Module], example: Batch, loss: Loss | None = None) -> Chain:
    """Each module is a layer and is called with the output of the one before: a tensor, or a tuple as one argument.

    The first is called as `decompose` would call a model. The last output is the loss, or `loss(output, batch)` is.
    Modules in eval mode are put in train mode. Names are those of `nn.ModuleList(modules)`.
    """
    if not modules:
        raise ModelError("the list of modules is empty: give at least one")
    refuse_trained_loss(loss)
    holder = nn.ModuleList(modules)
    for module in holder:
        if not module.training:
            module.train()
    call, batch = read_example(modules[0], example, loss)
    values = [
        Value(index, name, MODEL_INPUT, (), batch_shape(tensor), tensor.dtype, False)
        for index, (name, tensor) in enumerate(batch.items())
    ]
    tensors = read_tensors(holder)
    layers = _layers(modules, values, call, loss, tensors, next(iter(batch.values())).shape[0])
    if not values[-1].needs_grad:
        raise ModelError(NO_GRADIENT)
    connected = tuple(_with_consumers(value, layers) for value in values)
    return own(layers, connected, len(values) - 1, tensors, {name: index for index, name in enumerate(batch)})


def _layers(
    modules: Sequence[nn.Module], values: list[Value], call: Call, loss: Loss | None, tensors: Tensors, batch_size: int
) -> list[Layer]:
    """One layer per module; their outputs are added to `values`."""
    layers: list[Layer] = []
    entry: Entry = "batch"
    taken = [call.names.index(name) for name in call.given]
    for index, module in enumerate(modules):
        is_last = index == len(modules) - 1
        inputs = [*taken, *range(len(call.names))] if is_last and loss is not None else taken
        body = _body(index, module, tensors, entry, len(taken), call, is_last, loss)
        seen = observe(body, [values[i] for i in inputs], tensors, batch_size)
        made = [replace(v, index=len(values) + i, producer=index) for i, v in enumerate(seen.outputs)]
        body = replace(body, mutates=seen.mutates)
        layers.append(_layer(index, body, [values[i] for i in inputs], made, seen, tensors))
        values.extend(made)
        taken = [value.index for value in made]
        entry = "tuple" if seen.is_tuple else "tensor"
    return layers


def _body(
    index: int,
    module: nn.Module,
    tensors: Tensors,
    entry: Entry,
    num_inputs: int,
    call: Call,
    is_last: bool,
    loss: Loss | None,
) -> ModuleBody:
    def pair(local: str) -> tuple[str, str]:
        return local, tensors.owners[f"{index}.{local}"]

    parameters = tuple(pair(name) for name, _ in module.named_parameters(remove_duplicate=False))
    buffers = tuple(pair(name) for name, _ in module.named_buffers(remove_duplicate=False))
    return ModuleBody(module, parameters, buffers, (), entry, num_inputs, call, is_last, loss)


def _layer(
    index: int, body: ModuleBody, inputs: Sequence[Value], outputs: Sequence[Value], seen: Observation, tensors: Tensors
) -> Layer:
    kind = type(body.module)
    specs = [tensors.parameters[name] for _, name in body.parameters]
    facts = (
        f"{kind.__module__}.{kind.__qualname__}",
        repr(body.module),
        [(spec.shape, spec.dtype, spec.requires_grad) for spec in specs],
        [(value.shape, value.dtype, value.needs_grad) for value in inputs],
        body.is_last,
    )
    return Layer(
        index=index,
        name=f"{index}.{kind.__name__}",
        parameters=tuple(dict.fromkeys(name for _, name in body.parameters)),
        tied=(),
        buffers=tuple(dict.fromkeys(name for _, name in body.buffers)),
        mutates=body.mutates,
        inputs=tuple(value.index for value in inputs),
        outputs=tuple(value.index for value in outputs),
        random=seen.random,
        signature=blake2b(repr(facts).encode(), digest_size=16).hexdigest(),
        body=body,
    )


def _with_consumers(value: Value, layers: Sequence[Layer]) -> Value:
    return replace(value, consumers=tuple(layer.index for layer in layers if value.index in layer.inputs))
