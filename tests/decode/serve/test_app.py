"""Tests of the server's answers: each field of requests, errors, streams, metrics, and access.

``app`` serves the bundled model, whose answers are compared with those of ``model``, the same model in Python. ``scripted``
serves an engine that makes prescribed letters.
"""

from __future__ import annotations

import json
import math
import threading

import pytest

from onelaunch.decode import Model, ScoredToken, TextCodec
from onelaunch.decode.model.hub import BUNDLED, find_model
from onelaunch.decode.serve.api import Chat, parse
from onelaunch.decode.serve.replies import ChatReply, Part, Usage
from onelaunch.decode.serve.service import Limits
from onelaunch.errors import DeviceMemoryError, LogitsNotFinite
from tests.decode.serve.driver import App, Letters, Script, events_of, scripted

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "write a class"}]
PROMPT = "def main("


def complete(**fields):
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0} | fields


def chat(**fields):
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0} | fields


# Completions


def test_a_completion_is_that_of_the_library(app, model):
    answer = app.ask(COMPLETIONS, complete(max_tokens=9))
    expected = model.generate(PROMPT, max_new_tokens=9, temperature=0)
    assert answer.status == 200
    assert answer.json["choices"] == [{"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}]
    usage = {"prompt_tokens": len(expected.prompt), "completion_tokens": 9, "total_tokens": len(expected.prompt) + 9}
    assert (answer.json["usage"], answer.json["object"], answer.json["model"]) == (usage, "text_completion", "tiny")
    assert answer.json["id"].startswith("cmpl-")


def test_sixteen_tokens_are_the_default_of_completions(app):
    fields = complete(ignore_eos=True)
    del fields["max_tokens"]
    assert app.ask(COMPLETIONS, fields).json["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("given", ["text", "tokens", "texts", "lists"])
def test_prompts_may_be_text_or_tokens_one_or_several(given, app, model):
    texts = [PROMPT, "import "]
    tokens = [list(model.codec.encode(text)) for text in texts]
    prompt = {"text": texts[0], "tokens": tokens[0], "texts": texts, "lists": tokens}[given]
    texts = texts if given in ("texts", "lists") else texts[:1]
    answer = app.ask(COMPLETIONS, complete(prompt=prompt, n=2, temperature=1.0, seed=7, echo=True)).json
    expected = [
        text + model.generate(text, max_new_tokens=6, temperature=1.0, seed=seed).text for text in texts for seed in (7, 8)
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens[: len(texts)]))


def test_without_a_seed_answers_differ_and_with_one_they_are_equal(app):
    texts = [
        app.ask(COMPLETIONS, complete(temperature=1.5, **seed)).json["choices"][0]["text"]
        for seed in ({}, {}, {"seed": 3}, {"seed": 3})
    ]
    assert texts[0] != texts[1]
    assert texts[2] == texts[3]


def test_log_probabilities_of_completions(app, model):
    logprobs = app.ask(COMPLETIONS, complete(logprobs=20)).json["choices"][0]["logprobs"]
    stream = model.stream(PROMPT, max_new_tokens=6, temperature=0, logprobs=20)
    tokens = stream.result().tokens
    assert logprobs["tokens"] == [model.codec.token(token) for token in tokens]
    assert logprobs["token_logprobs"] == [token.logprob for token in tokens]
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == [token.top[0][1] for token in tokens]
    assert all(10 < len(top) <= 20 for top in logprobs["top_logprobs"])
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:at])) for at in range(6)]


def test_streamed_completions_are_the_parts_of_the_whole_answer(app):
    for more in ({}, {"logprobs": 2}, {"n": 2, "echo": True, "stop": ["\n"]}, {"stop": "self"}):
        whole = app.ask(COMPLETIONS, complete(seed=5, temperature=1, **more)).json
        events = app.ask(COMPLETIONS, complete(seed=5, temperature=1, stream=True, **more)).events
        assert len({event["id"] for event in events}) == 1
        for choice in whole["choices"]:
            own = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
            assert "".join(each["text"] for each in own) == choice["text"]
            assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
            if choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    assert [value for each in own for value in each["logprobs"][name]] == values


# Chat


def test_a_conversation_is_that_of_the_library(app, model):
    answer = app.ask(CHAT, chat(chat_template_kwargs={"opening": "class "})).json
    expected = model.generate(model.chat(MESSAGES, opening="class "), max_new_tokens=6, temperature=0)
    message = {"role": "assistant", "content": expected.text, "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt)


def test_parts_of_a_message_are_joined_and_developers_are_the_system(app):
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = {
        "messages": [{"role": "developer", "content": content}, {"role": "assistant", "content": "x"}],
        "return_token_strs": True,
    }
    assert "".join(app.ask("/tokenize", asked).json["token_strs"]) == "# system: one\ntwo\n# assistant: x\ndef "


def test_the_message_of_an_answer_may_be_sent_back(app, model):
    message = app.ask(CHAT, chat()).json["choices"][0]["message"]
    more = {"role": "user", "content": "on", "type": "text", "name": None, "tool_calls": None}
    answer = app.ask(CHAT, chat(messages=[*MESSAGES, message, more])).json
    plain = [*MESSAGES, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": "on"}]
    assert answer["choices"][0]["message"]["content"] == model.generate(model.chat(plain), max_new_tokens=6, temperature=0).text


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_either_name_limits_the_tokens_of_a_chat(field, app):
    fields = {name: value for name, value in chat(ignore_eos=True).items() if name != "max_tokens"}
    assert app.ask(CHAT, fields | {field: 3}).json["usage"]["completion_tokens"] == 3


def test_a_chat_without_a_limit_ends_with_the_context():
    app = scripted("abcdefgh" * 9)
    fields = {"model": "tiny", "prompt": "abc", "max_tokens": 100}
    with app:
        app.ready()
        answer = app.ask(COMPLETIONS, fields).json
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 37, "total_tokens": 40}
    assert answer["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_of_a_chat(app, model):
    content = app.ask(CHAT, chat(logprobs=True, top_logprobs=2)).json["choices"][0]["logprobs"]["content"]
    tokens = model.stream(model.chat(MESSAGES), max_new_tokens=6, temperature=0, logprobs=2).result().tokens
    for entry, token in zip(content, tokens, strict=True):
        assert entry["token"] == model.codec.token(token)
        assert entry["bytes"] == list(entry["token"].encode())
        assert entry["logprob"] == token.logprob <= 0
        assert [top["logprob"] for top in entry["top_logprobs"]] == [logprob for _, logprob in token.top]
    assert app.ask(CHAT, chat(logprobs=True)).json["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_the_bytes_of_an_incomplete_character_are_not_known(app, model):
    token = next(token for token in range(1, 300) if "\ufffd" in model.codec.token(token))
    answer = app.ask(COMPLETIONS, complete(prompt=[token], logprobs=0))
    assert answer.status == 200
    reply = ChatReply(parse(json.dumps(chat(logprobs=True)).encode(), Chat), model.codec.token)
    entry = reply.whole([Part("", [ScoredToken.of(token, -1.0, ())])], Usage())["choices"][0]["logprobs"]["content"][0]
    assert entry["bytes"] is None


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_usage(app):
    whole = app.ask(CHAT, chat(n=2, logprobs=True)).json
    events = app.ask(CHAT, chat(n=2, logprobs=True, stream=True, stream_options={"include_usage": True})).events
    *chunks, last = events
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"].get("content", "") for each in own) == choice["message"]["content"]
        assert [entry for each in own if each["logprobs"] for entry in each["logprobs"]["content"]] == choice["logprobs"][
            "content"
        ]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
    assert "usage" not in app.ask(CHAT, chat(stream=True)).events[0]


def test_the_tokens_of_a_launch_are_one_event():
    for event_per_token, texts in ((False, ["abc", "def", "gh"]), (True, [*"abcdefgh", ""])):
        with scripted(per_launch=3, event_per_token=event_per_token) as app:
            events = app.ready().ask(COMPLETIONS, {"model": "tiny", "prompt": "a", "stream": True}).events
        assert [event["choices"][0]["text"] for event in events] == texts
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


# Refused requests


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"presence_penalty": -1}, "presence_penalty", "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        ({"frequency_penalty": False}, "frequency_penalty", "unsupported_parameter"),
        ({"tempratur": 1}, "tempratur", "unknown_parameter"),
        ({"chat_template": "/etc/passwd"}, "chat_template", "unknown_parameter"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, None, "invalid_value"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs", "invalid_type"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hello"}, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name", "unknown_parameter"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "invalid_type"),
        ({"model": None}, "model", "missing_required_parameter"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 2.5}, "max_tokens", "invalid_value"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, None, "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"seed": True}, "seed", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a"] * 65}, "stop", "invalid_type"),
        ({"stop": ["a", 1]}, "stop", "invalid_type"),
        ({"top_logprobs": 3}, None, "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": 5}, "logprobs", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, None, "invalid_value"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages", "unknown_parameter"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(fields, param, code, app):
    answer = app.ask(CHAT, chat(**fields))
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert (answer.error["param"], answer.error["code"]) == (param, code)
    name = next(iter(fields))
    assert (param or name).rpartition(".")[2] in answer.error["message"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": ""}, "invalid_value"),
        ({"prompt": []}, "invalid_value"),
        ({"prompt": [[]]}, "invalid_value"),
        ({"prompt": [1, "a"]}, "invalid_type"),
        ({"prompt": [2048]}, "invalid_value"),
        ({"prompt": {"text": "a"}}, "invalid_type"),
        ({"prompt": ["a"] * 100, "n": 2}, "invalid_value"),
        ({"prompt": [1] * 2048}, "context_length_exceeded"),
        ({"echo": True, "logprobs": 1}, "invalid_value"),
        ({"best_of": 2}, "unsupported_parameter"),
        ({"suffix": "x"}, "unsupported_parameter"),
        ({"messages": MESSAGES}, "unknown_parameter"),
    ],
)  # fmt: skip
def test_a_wrong_completion_is_refused(fields, code, app):
    answer = app.ask(COMPLETIONS, complete(**fields))
    assert (answer.status, answer.error["code"]) == (400, code)
    assert next(iter(fields)) in answer.error["message"] or code == "context_length_exceeded"


def test_whole_numbers_may_be_written_with_a_point(app):
    plain = app.ask(COMPLETIONS, complete(max_tokens=3, seed=4, temperature=1))
    found = app.ask(COMPLETIONS, complete(max_tokens=3.0, seed=4.0, temperature=1.0))
    assert found.json["choices"] == plain.json["choices"]
    assert app.ask(COMPLETIONS, complete(max_tokens=3.5)).status == 400


def test_values_that_ask_for_nothing_are_accepted(app):
    neutral = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "tools": [],
        "tool_choice": "none", "store": False, "metadata": {}, "service_tier": "auto", "user": "me", "stop": None, "seed": None,
        "top_k": -1, "logprobs": False,
    }  # fmt: skip
    assert app.ask(CHAT, chat(**neutral)).json["choices"] == app.ask(CHAT, chat()).json["choices"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b"null", 400), (b'"text"', 400), (b"\xff\xfe{}", 400), (b"[" * 100_000, 400),
        (b'{"model": "tiny", "prompt": "\xc3("}', 400), (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400), (b'{"model": "tiny", "prompt": "x", "seed": 1e400}', 400),
        (b'{"model": "tiny", "prompt": "' + b"x" * 10_000_000 + b'"}', 413),
        (json.dumps(complete(prompt="for x in y:\n" * 8_000)).encode(), 400),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,
)  # fmt: skip
def test_a_malformed_body_is_refused_and_the_next_request_is_right(body, status, app, model):
    answer = app.ask(COMPLETIONS, body)
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    expected = model.generate(PROMPT, max_new_tokens=3, temperature=0).text
    assert app.ask(COMPLETIONS, complete(max_tokens=3)).json["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        (CHAT, None, 405), ("/v1/nothing", None, 404), ("/v1/models/other", None, 404), ("/v1/models/tiny", {}, 405),
        (COMPLETIONS, complete(model="other"), 404),
        ("/tokenize", {"prompt": "x", "model": "/etc/passwd"}, 404), ("/tokenize", {}, 400), ("/tokenize", {"prompt": 1}, 400),
    ],
)  # fmt: skip
def test_unknown_paths_and_models_are_errors_in_openais_form(path, content, status, app):
    answer = app.ask(path, content)
    assert answer.status == status
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert ("allow" in answer.headers) == (status == 405)


def test_a_body_of_another_media_type_is_refused(app):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert app.ask(COMPLETIONS, complete(), headers={"content-type": kind}).status == 415
    assert app.ask(COMPLETIONS, complete(), headers={"content-type": "application/json; charset=utf-8"}).status == 200


def test_errors_do_not_tell_where_the_model_is(model):
    """The bundled model has no chat template."""
    with App(Model(model.engine, TextCodec(find_model(BUNDLED)))) as app:
        answer = app.ready().ask(CHAT, chat())
    assert (answer.status, answer.error["code"]) == (400, "unsupported_by_model")
    assert "chat template" in answer.error["message"]
    assert "/" not in answer.error["message"]


# Failures


@pytest.mark.parametrize(
    ("problem", "status", "code"),
    [
        (LogitsNotFinite(), 500, "generation_failed"),
        (DeviceMemoryError("the cache", device="cpu"), 503, "device_memory"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)  # fmt: skip
def test_a_failed_generation_is_reported_and_the_next_request_is_right(problem, status, code):
    with scripted("ab", then=problem) as app:
        app.ready()
        app.engine.gate = threading.Semaphore(100)
        fields = {"model": "tiny", "prompt": "a", "max_tokens": 5}
        answer = app.ask(COMPLETIONS, fields)
        assert (answer.status, answer.error["code"], answer.error["type"]) == (status, code, "server_error")
        assert "secret" not in answer.error["message"]
        *events, last = events_of(app.ask(COMPLETIONS, fields | {"stream": True}).body)
        assert [json.loads(event)["choices"][0]["text"] for event in events] == ["a", "b"]
        assert json.loads(last)["error"]["code"] == code
        app.engine.then = None
        assert app.ask(COMPLETIONS, fields).json["choices"][0]["text"] == "ab"
        assert app.number("vllm:num_requests_running") == 0


def test_a_model_that_cannot_be_loaded_is_kept_as_a_failure():
    def loader():
        raise DeviceMemoryError("the weights", device="cpu")

    with App(loader) as app:
        app.ready()
        assert isinstance(app.service.failure, DeviceMemoryError)
        assert app.ask("/health").status == 503


def test_requests_are_refused_while_the_model_is_loaded():
    go = threading.Event()

    def loader():
        go.wait(10)
        return Model(Script(), Letters())

    with App(loader) as app:
        for path, content in (("/health", None), ("/v1/models", None), (COMPLETIONS, complete()), ("/tokenize", {"prompt": "a"})):
            assert app.ask(path, content).status == 503
        go.set()
        assert app.ready().ask("/health").status == 200
        assert app.ask(COMPLETIONS, complete(prompt="a")).json["choices"][0]["text"] == "abcdef"


# Other paths


def test_the_model_is_listed(app, model):
    (entry,) = app.ask("/v1/models").json["data"]
    assert entry == app.ask("/v1/models/tiny").json
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("tiny", "model", model.config.max_position_embeddings)


def test_text_and_conversations_are_tokenized(app, model):
    found = app.ask("/tokenize", {"prompt": PROMPT, "return_token_strs": True, "add_special_tokens": False}).json
    tokens = list(model.codec.encode(PROMPT))
    assert (found["tokens"], found["count"], "".join(found["token_strs"])) == (tokens, len(tokens), PROMPT)
    found = app.ask("/tokenize", {"model": "tiny", "messages": MESSAGES}).json
    assert found["tokens"] == list(model.codec.encode(model.chat(MESSAGES)))


def test_metrics_are_those_that_dashboards_of_vllm_read(app):
    from prometheus_client.parser import text_string_to_metric_families

    before = {name: app.number(name) for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")}
    app.ask(COMPLETIONS, complete(prompt=[1, 2, 3], max_tokens=5, ignore_eos=True))
    answer = app.ask("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert app.number("vllm:prompt_tokens_total") == before["vllm:prompt_tokens_total"] + 3
    assert app.number("vllm:generation_tokens_total") == before["vllm:generation_tokens_total"] + 5
    requests = ("num_requests_running", "num_requests_waiting", "request_success", "request_prompt_tokens")
    times = ("time_to_first_token_seconds", "request_queue_time_seconds", "inter_token_latency_seconds")
    for name in (*requests, *times, "e2e_request_latency_seconds", "request_generation_tokens"):
        samples = families[f"vllm:{name}"].samples
        assert samples
        assert all(sample.labels["model_name"] == "tiny" and math.isfinite(sample.value) for sample in samples)


# Access


def test_a_key_is_needed_everywhere_but_for_health():
    with scripted(api_key="secret-key") as app:
        app.ready()
        fields = {"model": "tiny", "prompt": "a"}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret-key"}, {"authorization": "Bearer \xe9"}):
            answer = app.ask(COMPLETIONS, fields, headers=headers)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/metrics", "/v1/models", "/tokenize"):
            assert app.ask(path).status == 401
        assert app.ask("/health").status == 200
        assert app.ask(COMPLETIONS, fields, headers={"authorization": "Bearer secret-key"}).status == 200


def test_a_request_for_another_host_is_refused():
    """A web page whose name leads to this machine (DNS rebinding) sends its own name."""
    with scripted(hosts={"localhost", "127.0.0.1", "[::1]"}) as app:
        for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "localhost:1"):
            assert app.ready().ask("/health", headers={"host": host}).status == 200
        for host in ("evil.example", "localhost.evil.example", "", "[::1", "127.0.0.1.evil:8000"):
            assert app.ask("/health", headers={"host": host}).status == 421


def test_sizes_and_times_have_limits():
    with scripted(limits=Limits(body_bytes=100, body_seconds=0.05)) as app:
        assert app.ready().ask(COMPLETIONS, b" " * 101).status == 413
        assert app.ask(COMPLETIONS, b" " * 100).status == 400
