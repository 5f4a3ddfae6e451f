"""Outputs that follow grammars: right whatever the pipeline and under preemption; compiling holds up nobody else."""

from __future__ import annotations

import json
import select
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from engine_helpers import add_request, tokens_of
from loopback_helpers import assert_at_rest, run_to_end
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_byte_tokenizer, make_tiny_model

from fullbore.engine.grammar import Compiled, GrammarCompiler, GrammarConstraint, GrammarQueue
from fullbore.engine.loopback import LoopbackEngine, load_stages
from fullbore.errors import RequestError
from fullbore.model.partition import partition_layers
from fullbore.scheduler.request import Request, TokenOutput
from fullbore.scheduler.scheduler import SchedulerConfig
from fullbore.text.grammar import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar
from fullbore.text.tokenizer import Tokenizer
from fullbore.text.tool_formats import HERMES
from fullbore.text.tools import Tool, call_grammar

TOKENIZER = Tokenizer(make_byte_tokenizer())
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
GRAMMARS = [json_schema_grammar(PERSON), choice_grammar(["yes", "no", "perhaps"]), regex_grammar("[ab]{3}-[0-9]{2,5}")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("grammar"))


@pytest.fixture(scope="module")
def compiler(model: Path) -> GrammarCompiler:
    compiler = GrammarCompiler(str(model), VOCAB_SIZE, (EOS_TOKEN_ID,))
    compiler.load()
    for grammar in GRAMMARS:
        compiler.remember(grammar, compiler.compile(grammar))
    return compiler


def requests(compiler: GrammarCompiler) -> list[Request]:
    """Fifteen, of which every fourth follows no grammar."""
    requests = []
    for k in range(15):
        constraint = None if k % 4 == 3 else compiler.cached(GRAMMARS[k % 4])
        prompt = [(7 * k + position) % 200 for position in range(1 + 3 * k % 17)]
        stop = frozenset({EOS_TOKEN_ID})
        temperature = float(k % 3 > 0)
        limit = 20 if constraint is None else 220
        requests.append(Request(k, prompt, limit, temperature, seed=k, stop_token_ids=stop, constraint=constraint))
    return requests


def run(
    model: Path, compiler: GrammarCompiler, pp_size: int, num_kv_blocks: int, seed: int | None
) -> tuple[dict[int, list[TokenOutput]], LoopbackEngine]:
    config = SchedulerConfig(num_kv_blocks=num_kv_blocks, pp_size=pp_size, page_size=4, chunked_prefill_size=7)
    stages = load_stages(model, partition_layers([1.0] * 4, pp_size), num_kv_blocks, page_size=4)
    engine = LoopbackEngine(stages, config, seed)
    outputs = run_to_end(engine, requests(compiler), arrival_seed=seed)
    assert_at_rest(engine)
    return outputs, engine


def text_of(outputs: list[TokenOutput]) -> str:
    return TOKENIZER.decode(tokens_of(outputs))


def test_outputs_follow_their_grammars_and_are_the_same_whatever_the_pipeline(
    model: Path, compiler: GrammarCompiler
) -> None:
    plain, _ = run(model, compiler, 1, 400, None)
    over_three_stages, engine = run(model, compiler, 3, 400, 1)
    assert engine.max_in_flight >= 3
    with_little_memory, scarce = run(model, compiler, 3, 60, 2)
    assert scarce.scheduler.state().preemptions > 0
    for k in range(15):
        assert tokens_of(plain[k]) == tokens_of(over_three_stages[k]) == tokens_of(with_little_memory[k])
        if k % 4 == 3:
            continue
        assert plain[k][-1].finish_reason == "stop"
        check(GRAMMARS[k % 4], text_of(plain[k]))


def check(grammar: str, text: str) -> None:
    if grammar == GRAMMARS[0]:
        person = json.loads(text)
        assert list(person) == ["name", "age", "colours"]
        assert len(person["name"]) <= 6
        assert 0 <= person["age"] <= 150
        assert set(person["colours"]) <= {"red", "green", "blue"}
    elif grammar == GRAMMARS[1]:
        assert text in ("yes", "no", "perhaps")
    else:
        assert text[3] == "-"
        assert set(text[:3]) <= {"a", "b"}
        assert 2 <= len(text[4:]) <= 5


def test_the_end_token_is_allowed_only_where_the_grammar_may_end(compiler: GrammarCompiler) -> None:
    constraint = GrammarConstraint(compiler.compile(regex_grammar("ab+")), VOCAB_SIZE)
    a, b = TOKENIZER.encode("ab")
    assert allowed(constraint) == {a}
    assert constraint.accept(a) is None
    assert allowed(constraint) == {b}
    assert constraint.accept(b) is None
    assert allowed(constraint) == {b, EOS_TOKEN_ID}
    assert len(constraint.mask()) == -(-VOCAB_SIZE // 8)
    assert constraint.accept(EOS_TOKEN_ID) == "stop"


def test_an_output_ends_with_its_grammar(compiler: GrammarCompiler) -> None:
    constraint = GrammarConstraint(compiler.compile(choice_grammar(["ab"])), VOCAB_SIZE)
    a, b = TOKENIZER.encode("ab")
    assert [constraint.accept(a), constraint.accept(b)] == [None, "stop"]


def test_a_token_that_the_grammar_does_not_allow_is_an_error(compiler: GrammarCompiler) -> None:
    constraint = GrammarConstraint(compiler.compile(choice_grammar(["ab"])), VOCAB_SIZE)
    assert constraint.accept(TOKENIZER.encode("b")[0]) == "grammar"


def test_many_choices(compiler: GrammarCompiler) -> None:
    constraint = GrammarConstraint(
        compiler.compile(choice_grammar([f"c{number}" for number in range(10_000)])), VOCAB_SIZE
    )
    accepted = [constraint.accept(token_id) for token_id in TOKENIZER.encode("c9999")]
    assert accepted == [None, None, None, None, "stop"]


def test_a_call_of_one_of_a_hundred_functions(compiler: GrammarCompiler) -> None:
    tools = [Tool(f"function_{number}", "What it does.", PERSON) for number in range(100)]
    constraint = GrammarConstraint(compiler.compile(call_grammar(tools, HERMES, may_repeat=False)), VOCAB_SIZE)
    arguments = '{"name": "Ann", "age": 7, "colours": ["red"]}'
    call = '<tool_call>\n{"name": "function_57", "arguments": ' + arguments + "}\n</tool_call>"
    *before, last = [constraint.accept(token_id) for token_id in TOKENIZER.encode(call)]
    assert set(before) == {None}
    assert last == "stop"


FORCED = [
    regex_grammar("x{5000000}"),
    json_schema_grammar({"const": "x" * 400_000}),
    choice_grammar(["x" * 400_000]),
    lark_grammar('%llguidance {"no_forcing": false}\nstart: "x" /x{5000000}/'),
]


@pytest.mark.parametrize("grammar", FORCED, ids=["regex", "schema", "choice", "settings of its own"])
def test_text_that_must_come_is_not_worked_out_at_once(compiler: GrammarCompiler, grammar: str) -> None:
    """It would take the driver up to a second between two micro-batches, or end such an output as too complex."""
    constraint = GrammarConstraint(compiler.compile(grammar), VOCAB_SIZE)
    for token_id in TOKENIZER.encode('"xxx' if "json_schema" in grammar else "xxx"):
        assert token_id in allowed(constraint)
        assert constraint.accept(token_id) is None


def allowed(constraint: GrammarConstraint) -> set[int]:
    mask = constraint.mask()
    return {token_id for token_id in range(VOCAB_SIZE) if mask[token_id // 8] >> (token_id % 8) & 1}


BROKEN = [
    json_schema_grammar({"type": "no-such-type"}),
    json_schema_grammar({"$ref": "#/nowhere"}),
    json_schema_grammar({"$ref": "http://127.0.0.1:9/schema.json"}),
    json_schema_grammar({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    json_schema_grammar({"$ref": "#"}),  # nothing ends
    regex_grammar(r"[^\x00-\U0010ffff]"),  # no character is left
    lark_grammar("start: start"),
    regex_grammar("("),
    regex_grammar("(?<=a)b"),
    "no grammar at all",
]


@pytest.mark.parametrize("grammar", BROKEN, ids=lambda grammar: str(grammar)[:70])
def test_a_broken_grammar_is_refused_with_a_reason(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(RequestError, match=r"The grammar or schema cannot be used: \w.+") as error:
        compiler.compile(grammar)
    assert error.value.param == "grammar"


def test_a_limit_reached_on_the_way_is_no_end(compiler: GrammarCompiler) -> None:
    """Nothing but an end token is possible then, and it must not pass for one that the grammar allows."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}
    constraint = GrammarConstraint(
        compiler.compile(json_schema_grammar({"type": "array", "items": wide, "minItems": 1})), VOCAB_SIZE
    )
    bracket, brace = TOKENIZER.encode("[{")
    assert constraint.accept(bracket) is None
    assert constraint.accept(brace) == "grammar"
    assert allowed(constraint) == {EOS_TOKEN_ID}
    assert constraint.accept(EOS_TOKEN_ID) == "grammar"


def test_an_end_token_that_a_broken_grammar_lets_through_is_no_stop(model: Path) -> None:
    class Broken:
        def mask(self) -> bytes:
            mask = bytearray(-(-VOCAB_SIZE // 8))
            mask[EOS_TOKEN_ID // 8] |= 1 << EOS_TOKEN_ID % 8
            return bytes(mask)

        def accept(self, token_id: int) -> Literal["stop", "grammar"] | None:
            return "grammar"

    engine = LoopbackEngine(load_stages(model, (4,), 16, 4), SchedulerConfig(num_kv_blocks=16, pp_size=1, page_size=4))
    stop = frozenset({EOS_TOKEN_ID})
    outputs = run_to_end(engine, [Request(0, [65], 9, stop_token_ids=stop, constraint=Broken())])
    assert [output.finish_reason for output in outputs[0]] == ["grammar"]


def test_a_model_without_tokenizer_refuses_grammars_alone(tmp_path: Path) -> None:
    compiler = GrammarCompiler(str(tmp_path), VOCAB_SIZE, ())
    compiler.load()
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        compiler.compile(GRAMMARS[0])


def test_a_broken_tokenizer_does_not_keep_the_engine_from_starting(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{")
    queue = GrammarQueue(GrammarCompiler(str(tmp_path), VOCAB_SIZE, ()))
    end_s = time.monotonic() + 30
    while not queue.is_loaded:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    queue.add(add_request(0, [1], 5), GRAMMARS[0], 0.0)
    assert isinstance(wait(queue)[0].constraint, RequestError)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 2, VOCAB_SIZE + 13])
def test_models_with_fewer_or_more_tokens_than_their_tokenizer(model: Path, vocab_size: int) -> None:
    compiler = GrammarCompiler(str(model), vocab_size, (EOS_TOKEN_ID,))
    compiler.load()
    constraint = GrammarConstraint(compiler.compile(choice_grammar(["a"])), vocab_size)
    assert len(constraint.mask()) == -(-vocab_size // 8)
    assert constraint.accept(TOKENIZER.encode("a")[0]) == "stop"


# ------------------------------------------------------------------------------------------------ waiting for a grammar


class SlowCompiler(GrammarCompiler):
    """Compiles when it is told to."""

    may_go_on = False
    num_compiled = 0

    def compile(self, grammar: str) -> Any:
        self.num_compiled += 1
        while not self.may_go_on:
            time.sleep(0.001)
        return super().compile(grammar)


@pytest.fixture
def slow(model: Path) -> SlowCompiler:
    return SlowCompiler(str(model), VOCAB_SIZE, (EOS_TOKEN_ID,))


def wait(queue: GrammarQueue) -> list[Compiled]:
    readable, _, _ = select.select([queue], [], [], 20)
    assert readable
    return queue.finished()


def test_requests_wait_for_their_grammars_without_holding_up_the_driver(slow: SlowCompiler) -> None:
    queue = GrammarQueue(slow)
    queue.add(add_request(0, [1], 5), GRAMMARS[1], 0.0)
    queue.add(add_request(1, [1], 5), BROKEN[0], 0.5)
    assert queue.finished() == []
    assert len(queue) == 2
    slow.may_go_on = True
    compiled = wait(queue)
    while len(queue):
        compiled += wait(queue)
    assert [each.pending.message.request_id for each in compiled] == [0, 1]
    assert [each.pending.arrival_s for each in compiled] == [0.0, 0.5]
    assert isinstance(compiled[0].constraint, GrammarConstraint)
    assert isinstance(compiled[1].constraint, RequestError)
    queue.finished()
    assert not select.select([queue], [], [], 0)[0], "nothing is left to wake the driver"


def test_equal_grammars_are_compiled_once_and_followed_apart(slow: SlowCompiler) -> None:
    slow.may_go_on = True
    queue = GrammarQueue(slow)
    assert queue.cached(GRAMMARS[1]) is None
    queue.add(add_request(0, [1], 5), GRAMMARS[1], 0.0)
    wait(queue)
    first, second = queue.cached(GRAMMARS[1]), queue.cached(GRAMMARS[1])
    assert first is not None
    assert second is not None
    before = second.mask()
    first.accept(TOKENIZER.encode("y")[0])
    assert second.mask() == before != first.mask()


def test_the_choices_of_a_request_wait_for_one_compilation(slow: SlowCompiler) -> None:
    queue = GrammarQueue(slow)
    for request_id in range(128):
        queue.add(add_request(request_id, [1], 5, choice=request_id % 64), GRAMMARS[request_id // 64], 0.0)
    slow.may_go_on = True
    compiled = wait(queue)
    while len(queue):
        compiled += wait(queue)
    assert [each.pending.message.request_id for each in compiled] == list(range(128))
    assert slow.num_compiled == 2


def test_aborted_and_late_requests_wait_no_more(slow: SlowCompiler) -> None:
    queue = GrammarQueue(slow)
    for request_id, timeout_s in enumerate((None, 1.0, 3.0)):
        queue.add(add_request(request_id, [1], 5, timeout_s=timeout_s), GRAMMARS[1], 10.0)
    assert queue.remove(0)
    assert not queue.remove(0)
    assert queue.expire(11.0) == [1]
    assert queue.expire(11.0) == []
    slow.may_go_on = True
    compiled = wait(queue)
    while len(queue):
        compiled += wait(queue)
    assert [each.pending.message.request_id for each in compiled] == [2]
