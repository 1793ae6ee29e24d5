"""Tests of sequences that the decode kernels generate on a GPU through the public API, against transformers and the oracle.

Each optimization level of the decode megakernel (``level``) is a variant of ``decode_step``.

``device`` is the first GPU, or the CPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from onelaunch.decode import KVCache, Model, ModelConfig, decode_step, random_weights
from onelaunch.decode.model.forward import forward, logits_of
from onelaunch.decode.model.hub import BUNDLED, find_model
from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.runtime.engines import make_engine
from onelaunch.decode.step.reference import config_of
from onelaunch.device.hardware import is_hopper, processors
from onelaunch.workbench.measure.count import Request
from onelaunch.workbench.measure.launches import count_barriers

pytestmark = pytest.mark.gpu

each_level = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture(autouse=True)
def hopper(device):
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")


# The bundled model

CLEAR = ("def main(", "    def __init__(self")
"""Prompts after which the two largest logits differ by at least 0.07 at each of 512 tokens.

That is three times the change from rounding keys and values to bfloat16. With PyTorch's own bfloat16, the second prompt gives
other tokens after 24.
"""


@pytest.fixture(scope="module")
def theirs():
    """Return the sequences of the bundled model by transformers, in float32 with the same weights."""
    transformers = pytest.importorskip("transformers", reason="needs the extra decode")
    model = transformers.Qwen3ForCausalLM.from_pretrained(find_model(BUNDLED), dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_model(BUNDLED))
    texts = {}
    for prompt in CLEAR:
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            texts[prompt] = model.generate(tokens, do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=512)
            top = model(texts[prompt]).logits[0, tokens.shape[1] - 1 : -1].topk(2).values
        assert float((top[:, 0] - top[:, 1]).min()) > 0.06  # CLEAR says 0.07
    return texts


@each_level
def test_512_greedy_tokens_match_transformers(level, theirs):
    model = Model.from_pretrained(BUNDLED, device="cuda", dtype="bfloat16", variant=level)
    for prompt, expected in theirs.items():
        found = model.generate(prompt, max_new_tokens=512, ignore_end=True, temperature=0)
        assert torch.equal(found.sequences, expected), prompt


# Random weights

MODELS = {
    "0.6B": ModelConfig(20_000, 1024, 3072, 3, 16, 8, 128, tie_word_embeddings=True),
    "untied": ModelConfig(20_000, 1024, 3072, 2, 16, 8, 128),
    "1.7B": ModelConfig(5000, 2048, 6144, 3, 16, 8, 128, tie_word_embeddings=True),
}

# Case for the tests of what studies measure of larger models: the time of consecutive tokens, and barriers.
STEP = decode_step.case(
    "bfloat16", layers=3, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128, vocabulary=20_000, position=200
)

TOLERANCE = 0.04
"""Largest difference of two logits that count as equal, relative to the root mean square of all logits at that position.

It equals the cap of the verification gate on the error of ``decode_step`` in bfloat16.
"""


@each_level
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_match_the_oracle(level, name, device):
    """Each token is the oracle's wherever its two largest logits differ by more than the tolerance.

    Elsewhere it is one of the tokens whose logits are within the tolerance.
    """
    weights = random_weights(MODELS[name], 6, device)
    prompt = torch.randint(MODELS[name].vocab_size, (40,))
    found = Model(make_engine(weights, level)).generate(prompt, max_new_tokens=300, ignore_end=True)
    assert len(found.tokens) == 300
    exact = oracle(weights, found.sequences[0], len(prompt))
    near = TOLERANCE * exact.square().mean(1).sqrt()
    best = exact.topk(2).values
    taken = exact.gather(1, torch.tensor(found.tokens, device=device)[:, None])[:, 0]
    assert (best[:, 0] - taken <= near).all()
    assert (best[:, 0] - best[:, 1] > near).double().mean() > 0.5, "most tokens must be the oracle's own"
    assert len(set(found.tokens)) > 20, "a sequence of few different tokens would be a weak test"


def oracle(weights, text: torch.Tensor, first: int) -> torch.Tensor:
    """Return logits ``[N, V]`` float64 at the positions that chose the tokens from ``first`` on."""
    exact, device = weights.map(torch.Tensor.double), weights.device
    cache = KVCache.empty(weights.config, len(text), device, torch.float64)
    with torch.no_grad():
        return logits_of(exact, forward(exact, text[:-1].to(device), cache)[first - 1 :])


@pytest.mark.parametrize("variant", ["streaming", "graph", "captured"])
def test_sequences_on_streams_of_several_threads_equal_those_alone(variant, device):
    model = Model(make_engine(random_weights(MODELS["0.6B"], 3, device), variant))
    prompts = [[number, *range(7 * number)] for number in range(1, 5)]

    def read(prompt):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return [model.generate(prompt, max_new_tokens=60, ignore_end=True).tokens for _ in range(3)]

    expected = [[model.generate(prompt, max_new_tokens=60, ignore_end=True).tokens] * 3 for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(read, prompts)) == expected


# Loops that studies time


@each_level
@pytest.mark.parametrize("loop", ["running", "served"])
def test_consecutive_tokens_are_those_of_single_steps(level, loop, device):
    reading = decode_step.make_inputs(STEP, device, 5)
    made = decode_step.loops[loop](decode_step.get(level), reading.arguments)
    for _ in range(3):
        assert 0 < made.seconds() < 0.1
    assert made.problem() is None


@each_level
def test_barriers_are_counted_for_a_study(level, device):
    (found,) = count_barriers(decode_step, [Request(STEP, level)], device=device)
    assert found == plan_for(config_of(STEP), level, processors(device)).barriers()


# Endurance

ENDLESS = ModelConfig(2000, 256, 768, 4, 8, 4, 64, tie_word_embeddings=True, max_position_embeddings=2048)
TOKENS = 100_000


def test_100_000_tokens_repeat_the_same_sequence(device):
    """Generate from an empty context to a full one, 49 times.

    Words that one sequence leaves in the kernel's memory must not be read by the next.
    """
    model = Model(make_engine(random_weights(ENDLESS, 2, device), "streaming"))
    texts = [model.generate([1], max_new_tokens=TOKENS, ignore_end=True)]
    assert (len(texts[0].tokens), texts[0].finish) == (ENDLESS.max_position_embeddings - 1, "context")
    while sum(len(text.tokens) for text in texts) < TOKENS:
        texts.append(model.generate([1], max_new_tokens=TOKENS, ignore_end=True))
        assert texts[-1] == texts[0], f"text {len(texts)} differs"
