"""Test of random requests, right and wrong, each answer compared with that of the library."""

from __future__ import annotations

import json
import random

import pytest

TEXTS = (
    "def main(", "import ", "class A:\n    ", "héllo wörld", "日本語のテキスト", "\n\n", "x", "self.\u200d\N{ROCKET}", "0" * 40,
)  # fmt: skip
WRONG = {
    "temperature": -1, "top_p": 2, "top_k": 1.5, "min_p": "a", "seed": -5, "stop": [""], "n": 0, "max_tokens": 0, "stream": 1,
    "model": "other", "tools": [{}], "logit_bias": {"1": 2}, "unknown": 1, "repetition_penalty": 0, "ignore_eos": "no",
}  # fmt: skip
"""Fields with a value for which a request is refused."""


def sampling(chance):
    """Return random sampling parameters."""
    found = {"temperature": chance.choice([0, 0.7, 1.3])}
    for name, values in {"top_k": [0, 5, 40], "top_p": [0.5, 0.95], "min_p": [0.0, 0.05], "repetition_penalty": [1.2]}.items():
        if chance.random() < 0.4:
            found[name] = chance.choice(values)
    return found


class Case:
    """Random request, and the generations of the library that it asks for."""

    def __init__(self, chance, model):
        self.chat, self.stream = chance.random() < 0.4, chance.random() < 0.5
        self.n, self.seed, self.most = chance.choice([1, 1, 1, 2]), chance.randrange(2**63 - 2), chance.randrange(1, 4)
        self.options = sampling(chance)
        stop = chance.choice([None, None, "\n", ["self", "e", "zz"]])
        end = chance.random() < 0.3
        self.logprobs = chance.choice([None, None, 0, 3])
        fields = {"model": "tiny", "n": self.n, "seed": self.seed, "stop": stop, "stream": self.stream, "ignore_eos": end}
        fields |= self.options | {"max_tokens": self.most}
        if self.chat:
            fields["messages"] = [{"role": "user", "content": chance.choice(TEXTS)} for _ in range(chance.randrange(1, 3))]
            prompts = [model.chat(fields["messages"])]
            if self.logprobs is not None:
                fields |= {"logprobs": True, "top_logprobs": self.logprobs}
        else:
            prompts = chance.sample(TEXTS, chance.choice([1, 1, 1, 2]))
            given = [list(model.codec.encode(prompt)) for prompt in prompts] if chance.random() < 0.3 else list(prompts)
            fields |= {"prompt": given if len(given) > 1 else given[0], "logprobs": self.logprobs}
        self.fields = fields
        options = {"max_new_tokens": self.most, "stop": stop or (), "ignore_end": end} | self.options
        self.runs = [(prompt, options | {"seed": self.seed + number}) for prompt in prompts for number in range(self.n)]

    def check(self, app, model):
        """Compare the answer with the library's."""
        answer = app.ask("/v1/chat/completions" if self.chat else "/v1/completions", self.fields)
        expected = [model.generate(prompt, **options) for prompt, options in self.runs]
        if self.stream:
            found = [self._joined([event["choices"][0] for event in answer.events], index) for index in range(len(expected))]
        else:
            found = [self._choice(choice) for choice in answer.json["choices"]]
            prompts = [len(each.prompt) for each in expected[:: self.n]]
            assert answer.json["usage"]["prompt_tokens"] == sum(prompts)
            assert answer.json["usage"]["completion_tokens"] == sum(len(each.tokens) for each in expected)
        reasons = {"end": "stop", "stop": "stop", "length": "length"}
        assert [each[:2] for each in found] == [(each.text, reasons[each.finish]) for each in expected]
        if self.logprobs is not None:
            assert [each[2] for each in found] == [[model.codec.token(token) for token in each.tokens] for each in expected]

    def _choice(self, choice):
        text = choice["message"]["content"] if self.chat else choice["text"]
        return text, choice["finish_reason"], self._tokens(choice)

    def _joined(self, choices, index):
        own = [choice for choice in choices if choice["index"] == index]
        texts = [choice["delta"].get("content", "") if self.chat else choice["text"] for choice in own]
        return "".join(texts), own[-1]["finish_reason"], [token for choice in own for token in self._tokens(choice)]

    def _tokens(self, choice):
        """Return the texts of the tokens of a choice with log-probabilities."""
        if choice["logprobs"] is None:
            return []
        return [entry["token"] for entry in choice["logprobs"]["content"]] if self.chat else choice["logprobs"]["tokens"]


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.every)])
def test_random_requests_get_what_the_library_generates(count, app, model):
    chance, refused = random.Random(count), 0
    for _ in range(count):
        case = Case(chance, model)
        kind = chance.random()
        path = "/v1/chat/completions" if case.chat else "/v1/completions"
        if kind < 0.2:
            name = chance.choice(sorted(WRONG))
            answer = app.ask(path, case.fields | {name: WRONG[name]})
            assert answer.status == (404 if name == "model" else 400), name
            assert name in answer.error["message"]
            refused += 1
        elif kind < 0.3:
            body = bytearray(json.dumps(case.fields).encode())
            body[chance.randrange(len(body))] = chance.choice(b"\xff\x00{")
            answer = app.ask(path, bytes(body))
            assert answer.status in (200, 400, 404)
            refused += answer.status != 200
        else:
            case.check(app, model)
    assert refused > count / 10
