"""Models that ``transformers`` holds in memory, with its ``generate``: its argument names, and its result.

``Model.from_transformers`` makes a :class:`TransformersModel`. Options that change the result and that are not implemented are
refused by name; none is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onelaunch.decode.generate import Model, Stream, Streamer
from onelaunch.decode.model.arguments import integer
from onelaunch.decode.model.in_memory import weights_of
from onelaunch.decode.model.prompts import tokens_of
from onelaunch.decode.model.request import Request
from onelaunch.decode.model.sampling import LARGEST_SEED, Sampling, recommended, sampling_of
from onelaunch.decode.model.weights import Weights
from onelaunch.decode.runtime.engines import engine_bytes, engine_that_fits, make_engine
from onelaunch.device.hardware import free_memory
from onelaunch.dispatch import AUTO
from onelaunch.errors import ArgumentError, ContextExceeded, DeviceMemoryError, UnknownKeyword
from onelaunch.wording import shown

_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Options of ``transformers`` that choose the tokens."""

_TAKEN = ("max_new_tokens", "max_length", "eos_token_id", "return_dict_in_generate", *_SAMPLING)
"""Options that are taken."""

_INDIFFERENT = (
    "transformers_version", "_from_model_config", "use_cache", "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "length_penalty", "compile_config", "disable_compile", "prefill_chunk_size", "low_memory", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "max_matching_ngram_size", "continuous_batching_config",
)  # fmt: skip
"""Options that are accepted without effect: of padding, of beams and assistants that are refused, and of how to compute."""

_ABSENT = {
    "min_length": 0, "min_new_tokens": 0, "early_stopping": False, "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0,
    "num_return_sequences": 1, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "renormalize_logits": False, "remove_invalid_values": False,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "output_logits": False,
    "is_assistant": False, "token_healing": False, "guidance_scale": 1, "use_mtp": False, "assistant_ensemble_weight": None,
    "synced_gpus": False, "logits_processor": (), "stopping_criteria": (),
}  # fmt: skip
"""Options of features that are not implemented, each with the value that leaves the feature out. ``None`` does so too."""

_USUAL_NEW_TOKENS = 20
"""Number of new tokens if neither the call nor a configuration gives a limit, as in ``transformers``."""


class TransformersModel(Model):
    """Model that shares the weights of a model of ``transformers``; made by :meth:`Model.from_transformers`.

    Args:
        hf_model: Model of ``transformers``.
        variant: Variant of ``decode_step``.

    Attributes:
        packed_bytes: Most bytes that the engine takes on the device in addition to the shared weights, such as for a copy in the
            order in which a kernel reads them. 0 if it reads the weights in place.
    """

    def __init__(self, hf_model: Any, variant: str = AUTO) -> None:
        weights = weights_of(hf_model)
        self._settings = _given(getattr(hf_model, "generation_config", None))
        variant, self.packed_bytes = _chosen(weights, variant)
        super().__init__(make_engine(weights, variant), None, recommended(self._settings))

    def generate(  # pyrefly: ignore[bad-override]  # the arguments are those of transformers
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        streamer: Streamer | None = None,
        tokenizer: object = None,
        **options: Any,
    ) -> Any:
        """Generate as ``hf_model.generate`` does, for one sequence.

        Args:
            inputs: Token ids ``[1, T]``; the same as ``input_ids``.
            generation_config: Options in a ``GenerationConfig``, which take precedence over those of the model.
            input_ids: Token ids ``[1, T]`` of integers.
            attention_mask: Mask ``[1, T]`` of ones, or of zeros before ones for padding on the left, which is not read.
            streamer: Streamer of ``transformers``.
            tokenizer: Not used: ``stop_strings``, for which ``transformers`` needs it, is refused.
            **options: Options of ``GenerationConfig`` by name, which take precedence over all others: ``max_new_tokens``,
                ``max_length``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``,
                ``eos_token_id`` and ``return_dict_in_generate``. Options that change nothing for one sequence are taken too, and
                all others if they are off. PyTorch's global random state gives the seed when sampling; the sampled text differs
                from that of ``transformers`` with the same state.

        Returns:
            Prompt and new tokens, ``[1, T + N]``, dtype and device of the input; with ``return_dict_in_generate`` a
            ``GenerateDecoderOnlyOutput`` with ``sequences``.

        Raises:
            ArgumentError: an argument is wrong, or asks for something that is not implemented; the message names it.
            UnknownKeyword: there is no argument of that name.
            ContextExceeded: the prompt leaves no room in the model's context.
            LogitsNotFinite, DeviceMemoryError, CompileError, DriverError, DecodeStalled, DecodeOverflow: as in
                :meth:`Model.generate`.
        """
        del tokenizer
        given = {
            **self._settings,
            **_given(generation_config),
            **{name: each for name, each in options.items() if each is not None},
        }
        _check_options(given, options)
        ids = _ids(inputs, input_ids)
        padding = _padding(ids, attention_mask)
        tokens = tokens_of(ids[0, padding:], self.config, self.require_text)
        limit = _limit(given, ids.shape[1])
        stream = self._stream(tokens, limit, given)
        with stream:
            if streamer is not None:
                streamer.put(ids.cpu())
            while True:
                before = len(stream.tokens)
                more = stream.step()
                if streamer is not None and len(stream.tokens) > before:
                    streamer.put(torch.tensor(stream.tokens[-1:], device="cpu"))
                if more is None:
                    break
        if streamer is not None:
            streamer.end()
        new = torch.tensor([list(map(int, stream.tokens))], dtype=ids.dtype, device=ids.device)
        sequences = torch.cat([ids, new], 1)
        if not given.get("return_dict_in_generate"):
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput  # it is there, since the model is of transformers

        return GenerateDecoderOnlyOutput(sequences=sequences)

    def _stream(self, tokens: tuple[int, ...], limit: int, given: Mapping[str, Any]) -> Stream:
        """Return the stream of a call with these tokens, at most ``limit`` new ones, and these options."""
        left = self.config.max_position_embeddings - len(tokens)
        if left < 1:
            raise ContextExceeded(
                len(tokens) + 1, context=self.config.max_position_embeddings, said="The prompt with one new token"
            )
        request = Request(tokens, min(limit, left), _sampling(given), self._ends(given))
        return Stream(self.engine, request, None, (), "length" if limit <= left else "context")

    def _ends(self, given: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the end tokens of a call."""
        ends = given.get("eos_token_id")
        if isinstance(ends, torch.Tensor):
            ends = ends.flatten().tolist()
        if ends is None:
            return self.config.eos_token_ids
        several = ends if isinstance(ends, (list, tuple)) else (ends,)
        # An end token below 0 never occurs; transformers takes -1 for "none".
        return tuple(integer("eos_token_id", each, -1, self.config.vocab_size - 1) for each in several)


def _chosen(weights: Weights, variant: str) -> tuple[str, int]:
    """Return the variant whose engine fits on the device, and the bytes that it takes in addition to the weights.

    Raises:
        DeviceMemoryError: there is too little memory for the named variant.
        UnknownVariant, VariantUnsupported: there is no such variant, or it cannot run this model on this device.
    """
    config, device = weights.config, weights.device
    if device.type != "cuda":
        return variant, 0
    free = free_memory(device)
    if variant == AUTO:
        variant = engine_that_fits(config, device, free)
    need = engine_bytes(config, device, variant)
    if need > free:
        raise DeviceMemoryError(f"the engine of {variant}", device=device, need=need, free=free)
    return variant, need


def _given(generation_config: Any) -> dict[str, Any]:
    """Return the options that a ``GenerationConfig`` sets."""
    if generation_config is None:
        return {}
    to_dict = getattr(generation_config, "to_diff_dict", None)
    if to_dict is None:
        raise ArgumentError(f"generation_config is {shown(generation_config)}; it must be a transformers.GenerationConfig.")
    return {name: value for name, value in to_dict().items() if value is not None}


def _check_options(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise unless every option is taken, or leaves out a feature that is not implemented.

    A name that only a call may misspell is an unknown keyword.
    """
    for name, value in given.items():
        if name in _TAKEN or name in _INDIFFERENT:
            continue
        if name in _ABSENT:
            off = _ABSENT[name]
            if value == off or (isinstance(off, tuple) and not len(value)):
                continue
        elif name in options and name not in _names_of_transformers():
            raise UnknownKeyword(name, _TAKEN)
        raise ArgumentError(f"{name} is {shown(value)}, which is not implemented; leave it out.")


def _names_of_transformers() -> set[str]:
    """Return the names of all options of ``transformers``."""
    from transformers import GenerationConfig

    others = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "negative_prompt_ids")
    return {*GenerationConfig().to_dict(), *others, "past_key_values", "inputs_embeds", "position_ids", "custom_generate"}


def _ids(inputs: object, input_ids: object) -> torch.Tensor:
    """Return the token ids ``[1, T]`` of a call."""
    if (inputs is None) == (input_ids is None):
        raise ArgumentError("inputs and input_ids are the same argument; give one of them.")
    name, ids = ("inputs", inputs) if input_ids is None else ("input_ids", input_ids)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(f"{name} is {shown(ids)}; it must be a tensor [1, T] of token ids, int64 or int32.")
    if ids.shape[0] != 1:
        raise ArgumentError(f"{name} has {ids.shape[0]} sequences; decoding is for one at a time: give [1, T].")
    return ids


def _padding(ids: torch.Tensor, attention_mask: object) -> int:
    """Return the number of tokens on the left that a mask hides."""
    if attention_mask is None:
        return 0
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != ids.shape:
        raise ArgumentError(f"attention_mask is {shown(attention_mask)}; it must be a tensor {list(ids.shape)} as input_ids.")
    seen = (attention_mask[0] != 0).tolist()
    hidden = len(seen) - sum(seen)
    if not all(seen[hidden:]):
        raise ArgumentError("attention_mask hides tokens behind others; it may hide those on the left alone, as padding.")
    return hidden


def _limit(given: Mapping[str, Any], length: int) -> int:
    """Return the largest number of new tokens: ``max_new_tokens``, else what ``max_length`` leaves."""
    if (new := given.get("max_new_tokens")) is not None:
        return integer("max_new_tokens", new, 1)
    if (whole := given.get("max_length")) is None:
        return _USUAL_NEW_TOKENS
    if integer("max_length", whole, 1) <= length:
        raise ArgumentError(f"max_length is {whole}, and the prompt has {length} tokens; give max_new_tokens.")
    return whole - length


def _sampling(given: Mapping[str, Any]) -> Sampling:
    """Return the sampling options of a call; with ``do_sample`` the seed comes from PyTorch's global random state."""
    choices: dict[str, Any] = {**recommended(given)}
    if given.get("do_sample"):
        choices["seed"] = int(torch.randint(min(LARGEST_SEED, 2**62), (), device="cpu"))
    else:
        choices["temperature"] = 0.0
    return sampling_of(choices)
