"""Decoding of a small language model at batch 1: model loading, the operation ``decode_step``, sampling, text generation."""

from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.step.contract import decode_step

from onelaunch.decode.step import cost, probes, reference, typical  # isort: skip  (register into decode_step)
from onelaunch.decode.step.variants import pytorch as torch_variants  # isort: skip  (registers into decode_step)
from onelaunch.decode.step.variants import megakernel  # isort: skip  (registers into decode_step)
from onelaunch.decode import loops  # isort: skip  (registers into decode_step)
from onelaunch.decode.generate import Generation, Model, Stream
from onelaunch.decode.model.request import Engine, Request, ScoredToken
from onelaunch.decode.model.sampling import Sampling
from onelaunch.decode.model.tokenizer import TextCodec
from onelaunch.decode.model.weights import Weights, load_weights, random_weights
from onelaunch.decode.transformers_model import TransformersModel

__all__ = [
    "Engine", "Generation", "KVCache", "Model", "ModelConfig", "Request", "Sampling", "ScoredToken", "Stream", "TextCodec",
    "TransformersModel", "Weights", "cost", "decode_step", "load_weights", "loops", "megakernel", "probes", "random_weights",
    "reference", "torch_variants", "typical",
]  # fmt: skip
