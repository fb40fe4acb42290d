"""Model and example batch -> chain: trace, clean, cut, and make each segment a layer."""

import torch
from torch import nn

from counterpoint.decomposer.assembly import assemble
from counterpoint.decomposer.chain import Batch, Chain
from counterpoint.decomposer.cleaning import clean
from counterpoint.decomposer.cutting import cut
from counterpoint.decomposer.duplication import duplicated
from counterpoint.decomposer.example import Loss, read_example
from counterpoint.decomposer.tensors import read_tensors
from counterpoint.decomposer.tracing import trace


def decompose(
    model: nn.Module, example: Batch, *, loss: Loss | None = None, device: str | torch.device = "cpu"
) -> Chain:
    """Cut a model into layers. The model may be on the meta device; it is left as it was.

    The batch size is free; all other sizes are the example's. The loss is `loss(output, batch)` if given, else
    `output.loss`, `output["loss"]` or the output itself. With a loss the model is given only the batch entries that its
    forward takes. Tensors made inside the layers are made on `device`, the one the layers will run on.
    """
    call, tensors = read_example(model, example, loss)
    traced = trace(model, call, tensors, loss, torch.device(device))
    clean(traced, torch.device(device))
    graph = traced.module.graph
    duplicates = duplicated(graph, traced)
    segments = cut(graph, traced, duplicates)
    return assemble(traced, segments, duplicates, read_tensors(model), tensors, torch.device(device))
