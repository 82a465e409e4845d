"""The form of a family's table. Independent of arrays' shapes, of files and of meshes."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """What decoders of one family have in common, beside the numbers of `transformer.ModelConfig`."""

    name: str  # config.model.family
    architectures: Mapping[str, str]  # model_type of config.json → architecture
    required: tuple[str, ...]  # keys of its config.json, beside those of every family
    tensors: Mapping[str, str]  # our parameter → tensor; {} is the layer, a second one the expert
    activation: Callable[[jax.Array], jax.Array]  # of the gate of an MLP, or of an expert
    zero_centered_norms: bool  # norms multiply by 1 + scale, and scale is 0 at first
    post_norms: bool  # norms after attention and after the MLP, too, before the residual is added
    local_rope: bool  # layers with a window have a RoPE of their own
    scaled_embedding: bool  # embeddings times √D, rounded to the compute dtype
    rope_of: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # config.json → rope_theta, rope_type
    read: Callable[[Mapping[str, Any]], dict[str, Any]]  # config.json → fields of ModelConfig
    write: Callable[[Any], dict[str, Any]]  # ModelConfig → keys of config.json
    refused: Callable[[Mapping[str, Any]], Iterator[str]]  # config.json → what the decoder lacks
