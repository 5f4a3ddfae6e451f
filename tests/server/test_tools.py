"""Function calls and grammars by the official client, over an engine that says what the test wants."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from running_server import RunningServer, StartServer, says

from fullbore.engine.grammar import GrammarCompiler
from fullbore.engine.messages import AddRequest
from fullbore.text.tool_formats import HERMES, MISTRAL

MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Of a city.", "parameters": PARAMETERS, "strict": True},
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS: list[Any] = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Röm"}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def ask(server: RunningServer, reply: str, **settings: Any) -> Any:
    server.engine.reply = says(reply)
    server.engine.info.context_length = 4096  # a token is one byte
    return server.client().chat.completions.create(model="tiny", **{"messages": MESSAGES, "tools": TOOLS, **settings})


def prompt_of(server: RunningServer, request: AddRequest) -> str:
    return server.state.tokenizer.decode_all(request.prompt_token_ids)


def test_a_call(server: RunningServer) -> None:
    choice = ask(server, "Let me see.\n" + CALL).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Röm"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts_is_not_called_complete(server: RunningServer, stream: bool) -> None:
    server.engine.reply = says(CALL)
    server.engine.info.context_length = 4096
    body = {"messages": MESSAGES, "tools": TOOLS, "stop": "R", "stream": stream}
    answer = server.post("/v1/chat/completions", json=body)
    if stream:
        *_, last, _ = answer.text.strip().split("\n\n")
        choice = json.loads(last.removeprefix("data: "))["choices"][0]
    else:
        choice = answer.json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "')
    assert choice["finish_reason"] == "stop"


def test_calls_alone_have_no_content(server: RunningServer) -> None:
    message = ask(server, TWO_CALLS).choices[0].message
    assert message.content is None
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "get_time"]
    assert len({call.id for call in message.tool_calls}) == 2


def test_an_answer_without_a_call(server: RunningServer) -> None:
    choice = ask(server, "It is sunny.").choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It is sunny.", None, "stop")


def test_a_call_cut_short_is_told_as_such(server: RunningServer) -> None:
    choice = ask(server, CALL, max_tokens=60).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == CALL[CALL.index('{"city') : 60]


def test_a_stream_of_calls(server: RunningServer) -> None:
    chunks = list(ask(server, "Hm.\n" + TWO_CALLS, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert last.usage.completion_tokens > 0
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == "Hm."
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    for index, (name, arguments) in enumerate([("get_weather", '{"city": "Röm"}'), ("get_time", "{}")]):
        first, *others = [piece for piece in pieces if piece.index == index]
        assert (first.type, first.function.name, first.function.arguments) == ("function", name, "")
        assert first.id
        assert all((piece.id, piece.type, piece.function.name) == (None, None, None) for piece in others)
        assert "".join(piece.function.arguments for piece in others) == arguments
    assert len(pieces) > 6, "arguments come as they are generated"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_the_clients_own_reader_of_streams(server: RunningServer) -> None:
    server.engine.reply = says("Hm.\n" + TWO_CALLS)
    server.engine.info.context_length = 4096
    with server.client().chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Hm."
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    assert calls == [("get_weather", {"city": "Röm"}), ("get_time", {})]


def test_log_probabilities_cover_every_token_though_text_is_held_back(server: RunningServer) -> None:
    whole = ask(server, "Hm.\n" + CALL, logprobs=True, top_logprobs=1)
    chunks = list(ask(server, "Hm.\n" + CALL, logprobs=True, top_logprobs=1, stream=True))
    streamed = [
        each for chunk in chunks for each in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [each.token for each in streamed] == [each.token for each in whole.choices[0].logprobs.content]


def test_several_choices_each_with_its_calls(server: RunningServer) -> None:
    choices = ask(server, CALL, n=3).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert all(choice.finish_reason == "tool_calls" for choice in choices)
    chunks = list(ask(server, CALL, n=3, stream=True))
    for index in range(3):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert own[-1].finish_reason == "tool_calls"


def test_the_async_client(server: RunningServer) -> None:
    server.engine.reply = says(CALL)
    server.engine.info.context_length = 4096

    async def ask_twice() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            create: Any = client.chat.completions.create
            whole = await create(model="tiny", messages=MESSAGES, tools=TOOLS)
            stream = await create(model="tiny", messages=MESSAGES, tools=TOOLS, stream=True)
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(ask_twice())
    assert whole.choices[0].message.tool_calls[0].function.name == "get_weather"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


# ------------------------------------------------------------------------------------------------------------- prompts


def test_functions_are_told_to_a_model_whose_template_knows_none(server: RunningServer) -> None:
    ask(server, "ok")
    prompt = prompt_of(server, server.engine.requests[0])
    assert prompt.startswith("<|im_start|>system\n")
    assert json.dumps(PARAMETERS) in prompt
    assert "get_time" in prompt
    assert "<tool_call>" in prompt


def test_functions_are_not_told_where_none_may_be_called(server: RunningServer) -> None:
    message = ask(server, CALL, tool_choice="none").choices[0].message
    assert message.content == CALL
    assert message.tool_calls is None
    assert "get_weather" not in prompt_of(server, server.engine.requests[0])


def test_a_conversation_with_calls_and_answers(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21 C"},
    ]
    ask(server, "Sunny.", messages=messages)
    prompt = prompt_of(server, server.engine.requests[0])
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}' in prompt
    assert "<|im_start|>user\n<tool_response>\n21 C\n</tool_response><|im_end|>" in prompt


def test_a_template_that_knows_functions_gets_them(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}{% endfor %}"
    )
    pretrained = server.state.tokenizer._pretrained
    monkeypatch.setattr(pretrained, "chat_template", template)
    ask(server, "ok")
    assert prompt_of(server, server.engine.requests[0]) == "get_weather get_time user"


def test_a_template_that_wants_arguments_as_text(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{{ tools | length }}{% for m in messages %}{% for call in m.tool_calls %}"
        "{{ call.function.name + '(' + call.function.arguments + ')' }}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(server.state.tokenizer._pretrained, "chat_template", template)
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Röm"}'}}
    ask(server, "Sunny.", messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    assert prompt_of(server, server.engine.requests[0]) == '2get_weather({"city": "Röm"})'


# ----------------------------------------------------------------------------------------------------- forced, grammars


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    from running_server import TOKENIZER
    from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(TOKENIZER._backend.to_str())
    compiler = GrammarCompiler(str(folder), VOCAB_SIZE, (EOS_TOKEN_ID,))
    compiler.load()
    return compiler


def follows(compiler: GrammarCompiler, request: AddRequest, text: str, server: RunningServer) -> bool:
    """Whether a request's grammar allows a text, as a whole."""
    assert request.grammar is not None
    matcher = compiler.compile(request.grammar)
    token_ids = server.state.tokenizer.encode(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def test_a_required_call(server: RunningServer, compiler: GrammarCompiler) -> None:
    choice = ask(server, TWO_CALLS, tool_choice="required").choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather", "get_time"]
    assert choice.finish_reason == "tool_calls"
    request = server.engine.requests[0]
    assert follows(compiler, request, CALL, server)
    assert follows(compiler, request, TWO_CALLS, server)
    assert not follows(compiler, request, "Let me see.", server)
    assert not follows(compiler, request, CALL.replace("city", "town"), server)
    assert not follows(compiler, request, CALL.replace("get_weather", "get_time"), server)


def test_one_required_call(server: RunningServer, compiler: GrammarCompiler) -> None:
    ask(server, CALL, tool_choice="required", parallel_tool_calls=False)
    assert follows(compiler, server.engine.requests[0], CALL, server)
    assert not follows(compiler, server.engine.requests[0], TWO_CALLS, server)


def test_a_named_function(server: RunningServer, compiler: GrammarCompiler) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(server, CALL, tool_choice=named).choices[0]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Röm"}
    request = server.engine.requests[0]
    assert follows(compiler, request, CALL, server)
    assert not follows(compiler, request, TWO_CALLS, server)
    assert not follows(compiler, request, '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', server)
    assert "get_time" in prompt_of(server, request), "the prompt is the same, so that its blocks are found again"


def test_schemas_of_functions_may_have_definitions(server: RunningServer, compiler: GrammarCompiler) -> None:
    def tool(name: str, definition: dict[str, Any]) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": definition}}
        return {"type": "function", "function": {"name": name, "parameters": {**parameters, "required": ["a"]}}}

    tools = [tool("f", {"type": "integer"}), tool("g", {"type": "boolean"})]
    ask(server, "x", tools=tools, tool_choice="required")
    text = '<tool_call>\n{"name": "%s", "arguments": {"a": %s}}\n</tool_call>'
    request = server.engine.requests[0]
    assert follows(compiler, request, text % ("f", 5), server)
    assert follows(compiler, request, text % ("g", "true"), server)
    assert not follows(compiler, request, text % ("f", "true"), server)


def test_a_required_call_of_a_model_whose_own_way_needs_special_tokens(
    start_server: StartServer, compiler: GrammarCompiler
) -> None:
    server = start_server(tool_call_parser="mistral")
    assert server.state.tool_format is MISTRAL
    reply = '{"name": "get_weather", "parameters": {"city": "Rome"}}; {"name": "get_time", "parameters": {}}'
    message = ask(server, reply, tool_choice="required").choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "get_time"]
    assert all(len(call.id) == 9 for call in message.tool_calls)
    assert follows(compiler, server.engine.requests[0], reply, server)


def test_the_way_of_calling_can_be_chosen(start_server: StartServer) -> None:
    assert start_server().state.tool_format is HERMES
    server = start_server(tool_call_parser="mistral")
    message = ask(server, '[TOOL_CALLS][{"name": "get_time", "arguments": {}}]').choices[0].message
    assert message.tool_calls[0].function.name == "get_time"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GRAMMARS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ['{"x": [1, {}]}', "{}"], ["[1]", "5", '{"x": }']),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        ['{"a": 5}', '{\n  "a": 5\n}'],
        ["{}", '{"a": "b"}', '{"a": 5, "b": 1}', '{"a":' + " " * 30 + "5}"],
    ),
    ({"guided_json": SCHEMA}, ['{"a": 5}'], ["{}"]),
    ({"guided_json": json.dumps(SCHEMA)}, ['{"a": 5}'], ["{}"]),
    ({"guided_regex": "[ab]+/c"}, ["ab/c"], ["/c", "ab/cd"]),
    ({"guided_choice": ["yes", 'n"o']}, ["yes", 'n"o'], ["", "ye", "yesn"]),
    ({"guided_grammar": 'start: "a" B\nB: /[0-9]+/'}, ["a12"], ["a"]),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 5}'], ["{}"]),
    ({"structured_outputs": {"regex": "a|b"}}, ["a", "b"], ["ab"]),
    ({"structured_outputs": {"choice": ["x", "yy"]}}, ["x", "yy"], ["y"]),
    ({"structured_outputs": {"grammar": 'start: "a"+'}}, ["aaa"], [""]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
]


@pytest.mark.parametrize(("parameters", "right", "wrong"), GRAMMARS, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_parameters_become_grammars(
    server: RunningServer,
    compiler: GrammarCompiler,
    path: str,
    parameters: dict[str, Any],
    right: list[str],
    wrong: list[str],
) -> None:
    body = {"prompt": "p"} if path == "/v1/completions" else {"messages": MESSAGES}
    server.engine.reply = says("x")
    assert server.post(path, json={**body, **parameters}).status_code == 200
    request = server.engine.requests[0]
    assert all(follows(compiler, request, text, server) for text in right)
    assert not any(follows(compiler, request, text, server) for text in wrong)


def test_the_clients_own_schemas(server: RunningServer, compiler: GrammarCompiler) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    server.engine.reply = says('{"name": "Ann", "age": 5}')
    chat = server.client().chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Person)
    assert chat.choices[0].message.parsed == Person(name="Ann", age=5)
    assert follows(compiler, server.engine.requests[0], '{"name": "Ann", "age": 5}', server)
    assert not follows(compiler, server.engine.requests[0], '{"name": "Ann"}', server)


def test_text_is_no_grammar(server: RunningServer) -> None:
    ask(server, "x", response_format={"type": "text"}, tools=[])
    assert server.engine.requests[0].grammar is None
