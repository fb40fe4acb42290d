"""nn.Module -> Chain: cut a model into layers that can be loaded, run and updated one at a time."""

from counterpoint.decomposer.chain import Batch, Chain, Extent, Layer, TensorSpec, Value
from counterpoint.decomposer.decomposition import decompose
from counterpoint.decomposer.initialise import initialise
from counterpoint.decomposer.modules import chain_of_modules
from counterpoint.decomposer.randomness import layer_seed
from counterpoint.decomposer.streaming import stream_safetensors

__all__ = [
    "Batch",
    "Chain",
    "Extent",
    "Layer",
    "TensorSpec",
    "Value",
    "chain_of_modules",
    "decompose",
    "initialise",
    "layer_seed",
    "stream_safetensors",
]
