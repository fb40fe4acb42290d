"""nn.Module -> Chain: cut a model into layers that can be loaded, run and updated one at a time."""

from counterpoint.decomposer.chain import Batch, Chain, Extent, Layer, TensorSpec, Value
from counterpoint.decomposer.decomposition import decompose
from counterpoint.decomposer.modules import chain_of_modules
from counterpoint.decomposer.randomness import layer_seed

__all__ = ["Batch", "Chain", "Extent", "Layer", "TensorSpec", "Value", "chain_of_modules", "decompose", "layer_seed"]
