"""Decoding a small language model at batch 1: model import, the operation ``decode_step``, sampling and text."""

from onelaunch.decode.cache import KVCache
from onelaunch.decode.config import ModelConfig
from onelaunch.decode.contract import decode_step

from onelaunch.decode import cost, reference, torch_variants, megakernel  # isort: skip  (register into decode_step)
from onelaunch.decode import loops  # isort: skip  (register into decode_step)
from onelaunch.decode.generate import Generation, Model, Stream
from onelaunch.decode.sampling import Sampling
from onelaunch.decode.weights import Weights, load_weights, random_weights

__all__ = [
    "Generation", "KVCache", "Model", "ModelConfig", "Sampling", "Stream", "Weights", "cost", "decode_step", "load_weights",
    "loops", "megakernel", "random_weights", "reference", "torch_variants",
]  # fmt: skip
