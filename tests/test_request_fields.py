"""The fields of a request: those that work, against the engine, and those that are refused."""

import pytest
from serving import IGNORED_FIELDS, PATH, check_refused, engine_alone, serving, small_engine

from server import protocol
from server.protocol import UNSUPPORTED_FIELDS, CompletionRequest

PARAMS = [
    {"seed": 2**64 - 1, "temperature": 0.5, "top_k": 9},
    {"seed": 3, "top_p": 0.5, "top_k": -1},
    {"seed": 4, "presence_penalty": 2, "frequency_penalty": -1.5},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"seed": 5, "stop": "e"},
    {"seed": 6, "stop": ["the", "an", "o"]},
    {"seed": 7, "ignore_eos": True, "stop": []},
    {"seed": 8, "stop": ["x" * 256] * 16},
]


def text_of(client, body: dict) -> tuple:
    status, found = client.post(PATH, body)
    assert status == 200, found
    return found["choices"][0]["text"], found["choices"][0]["finish_reason"]


def alone(tiny_llama, prompt: str, **params) -> tuple:
    return engine_alone(tiny_llama, prompt, max_new_tokens=40, **params)[1::2]


def test_parameters_are_those_of_the_engine(client, tiny_llama):
    for params in PARAMS:
        body = {"prompt": "Tom saw", "max_tokens": 40} | params
        assert text_of(client, body) == alone(tiny_llama, "Tom saw", **params)


def test_a_stop_string_ends_a_text_wherever_tokens_cut_it(client, tiny_llama):
    text, _ = alone(tiny_llama, "Tom", temperature=0)
    for start in range(1, 12):
        stop = text[start : start + 5]
        body = {"prompt": "Tom", "max_tokens": 40, "temperature": 0, "stop": stop}
        assert text_of(client, body) == (text[: text.index(stop)], "stop")


def test_a_seed_counts_modulo_2_to_the_64th(client):
    seeds = (-1, 2**64 - 1, 0, -(2**63), 2**63)
    texts = [text_of(client, {"prompt": "Tom", "seed": seed}) for seed in seeds]
    assert texts[0] == texts[1] != texts[2] and texts[3] == texts[4]


def test_a_salt_keeps_prefixes_apart(tiny_llama):
    with serving(lambda: small_engine(tiny_llama)) as client:
        shared = []
        for cache_salt in ("a", None, "a", "b", None):
            body = {"prompt": "word " * 30, "max_tokens": 1, "cache_salt": cache_salt}
            client.post(PATH, body)
            shared.append(client.thread.engine.scheduler.prefix_cache_hits)
    assert shared[:2] == [0, 0] and shared[2] == shared[3] > 0 and shared[4] == 2 * shared[3]


NONE = """allowed_token_ids audio chat_template documents guided_choice guided_grammar guided_json
    guided_regex guided_whitespace_pattern logits_processors prompt_embeds prompt_logprobs
    structural_tag thinking_token_budget web_search_options""".split()
FALSE = """continue_final_message include_stop_str_in_output parallel_tool_calls return_token_ids
    return_tokens_as_token_ids use_beam_search""".split()
TRUE = ["add_generation_prompt", "add_special_tokens", "include_reasoning"]
ASKING = {  # field -> what asks for nothing
    **(dict.fromkeys(NONE) | dict.fromkeys(FALSE, False) | dict.fromkeys(TRUE, True)),
    **dict.fromkeys(["bad_words", "functions", "tools"], []),
    **dict.fromkeys(["chat_template_kwargs", "kv_transfer_params", "vllm_xargs"], {}),
    **dict.fromkeys(["function_call", "tool_choice"], "none"),
    **{"suffix": "", "modalities": ["text"], "length_penalty": 1.0},
    "spaces_between_special_tokens": True,
}


def test_what_is_not_supported_is_refused_by_name(client):
    assert ASKING.keys() == UNSUPPORTED_FIELDS.keys()
    assert not UNSUPPORTED_FIELDS.keys() & CompletionRequest.model_fields.keys()
    for fields in (ASKING, dict.fromkeys(ASKING)):
        assert client.post(PATH, {"max_tokens": 1} | fields)[0] == 200
    for field, nothing in ASKING.items():
        other = field != "parallel_tool_calls" and isinstance(nothing, bool)
        something = not nothing if other else {"a": [1]}
        hint = "structured_outputs" if field.startswith("guided_") else ""
        answer = client.post(PATH, {"max_tokens": 1, field: something})
        check_refused(answer, field, f"{field} supported {hint}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_changes_no_text_is_taken_and_named(client, stream):
    known = IGNORED_FIELDS | dict.fromkeys(["think", "enable_thinking"], (False, True))
    known |= {"reasoning_effort": ("none", "low"), "verbosity": ("medium", "low")}
    assert known.keys() == protocol.IGNORED_FIELDS.keys()
    headers = []
    for place in (0, 1):
        fields = {name: values[place] for name, values in known.items()}
        fields |= {"stream_options": {"include_obfuscation": bool(place)}, "stream": stream}
        with client.send("POST", PATH, {"max_tokens": 1} | fields) as answer:
            assert answer.status == 200
            headers.append(answer.headers["X-Ignored-Fields"])
    assert headers == [None, ", ".join([*sorted(known), "stream_options.include_obfuscation"])]


def test_minus_one_is_no_limit_of_its_own(client):
    body = {"seed": 1, "ignore_eos": True}
    completion = body | {"prompt": "Tom", "max_tokens": -1}
    assert client.post(PATH, completion)[1]["usage"]["completion_tokens"] == 64
    chat = body | {"messages": [{"role": "user", "content": "Tom"}]}
    replies = [("chat/completions", chat | {name: -1}) for name in ("max_tokens", "seed")]
    replies += [("chat/completions", chat | {"max_completion_tokens": -1})]
    replies += [("responses", body | {"input": "Tom", "max_output_tokens": -1})]
    for path, asked in replies:
        assert client.post(f"/v1/{path}", asked)[1]["usage"]["total_tokens"] == 64


def test_empty_names_and_stop_strings_are_none(client):
    body = {"prompt": "Tom", "max_tokens": 9, "seed": 1}
    plain = client.post(PATH, body)[1]["choices"]
    for fields in ({"stop": ""}, {"stop": [""]}, {"stop": ["", "\0"]}, {"model": ""}):
        status, found = client.post(PATH, body | fields)
        assert status == 200 and found["choices"] == plain and found["model"] == "small"


OUT_OF_RANGE = [  # field, value, words of the message
    ("top_p", 0, "0.0 (0, 1]"),
    ("top_k", -2, "-2 0"),
    ("presence_penalty", 2.1, "2.1 [-2, 2]"),
    ("seed", 2**64, str(2**64)),
    ("seed", -(2**63) - 1, str(-(2**63))),
    ("seed", 1.5, "integer"),
    ("ignore_eos", 1, "boolean"),
]
STOPS = ["x" * 257, ["x" * 256] * 17, ["", *["x"] * 17], ["x", 1]]
OUT_OF_RANGE += [("stop", value, "string 16 256") for value in STOPS]


def test_values_out_of_range(client):
    for field, value, said in OUT_OF_RANGE:
        check_refused(client.post(PATH, {"prompt": "Tom", field: value}), field, f"{field} {said}")
