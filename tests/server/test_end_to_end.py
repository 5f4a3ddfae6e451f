"""`fullbore serve` as a user runs it: a tiny model over two real stages, the official client, signals."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from fullbore_process import ServeProcess, assert_all_end, eventually
from tiny_models import make_tiny_model, poison_token
from transformers import AutoModelForCausalLM

from fullbore.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.alone]

PROMPTS = [f"Prompt number {number}: {'x' * number}" for number in range(0, 40, 5)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"), context_length=2048)


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    arguments = (model_folder, "--pp-size", "2", "--dtype", "float32", "--chunked-prefill-size", "7")
    with ServeProcess(*arguments, temporary=tmp_path_factory.mktemp("tmp")) as server:
        yield server


def client_of(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def reference_text(model_folder: Path, prompt: str) -> str:
    """What Hugging Face generates, greedily; one token is one byte."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = Tokenizer.load(model_folder)
    token_ids = tokenizer.encode(prompt)
    with torch.no_grad():
        output = model.generate(torch.tensor([token_ids]), max_new_tokens=NUM_TOKENS, do_sample=False)
    return tokenizer.decode(output[0, len(token_ids) :].tolist())


def test_greedy_text_is_hugging_face_s_also_with_neighbours(server: ServeProcess, model_folder: Path) -> None:
    def ask(prompt: str) -> str:
        stream = client_of(server).completions.create(
            model=model_folder.name, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        texts = list(threads.map(ask, PROMPTS))
    assert texts == [reference_text(model_folder, prompt) for prompt in PROMPTS]


def test_a_seed_gives_the_same_chat_answer_again(server: ServeProcess, model_folder: Path) -> None:
    def ask(seed: int) -> str | None:
        messages = [{"role": "user", "content": "Hello"}]
        chat = client_of(server).chat.completions.create(
            model=model_folder.name,
            messages=messages,
            max_tokens=NUM_TOKENS,
            seed=seed,
            extra_body={"ignore_eos": True},
        )  # type: ignore[call-overload]
        assert chat.usage.completion_tokens == NUM_TOKENS
        return str(chat.choices[0].message.content)

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


def test_a_stop_string_ends_the_request_on_the_engine(server: ServeProcess, model_folder: Path) -> None:
    text = reference_text(model_folder, PROMPTS[0])
    stop = text[5:8]
    completion = client_of(server).completions.create(
        model=model_folder.name, prompt=PROMPTS[0], max_tokens=400, temperature=0, stop=stop
    )
    assert completion.choices[0].text == text[: text.index(stop)]
    assert completion.choices[0].finish_reason == "stop"
    eventually(lambda: metric(server, "fullbore_kv_blocks_used") == 0)


def test_a_client_that_leaves_frees_its_request(server: ServeProcess) -> None:
    body = {"prompt": "y" * 100, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    generated = metric(server, "fullbore_generated_tokens_total")
    eventually(lambda: metric(server, "fullbore_requests_running") == 0)
    assert metric(server, "fullbore_kv_blocks_used") == 0
    assert metric(server, "fullbore_generated_tokens_total") < generated + 400


def test_info_tells_how_it_runs(server: ServeProcess) -> None:
    info = httpx.get(f"{server.url}/server_info", timeout=60).json()
    assert info["pp_size"] == 2
    assert info["kv_capacity_tokens"] >= 512
    assert info["stages"][0]["layers"][0] == 0
    assert info["stages"][0]["layers"][1] == info["stages"][1]["layers"][0]
    assert {stage["pid"] for stage in info["stages"]} <= {process.pid for process in server.processes()}


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_answers_follow_schemas_beside_others_that_do_not(server: ServeProcess, model_folder: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}

    def ask(number: int) -> Any:
        settings: dict[str, Any] = [
            {"response_format": schema},
            {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            {"extra_body": {"guided_choice": ["yes", "no"]}},
            {"max_tokens": 20},
        ][number % 4]
        messages = [{"role": "user", "content": f"Number {number}"}]
        create: Any = client_of(server).chat.completions.create
        return create(model=model_folder.name, messages=messages, seed=number, **{"max_tokens": 200, **settings})

    with ThreadPoolExecutor(12) as threads:
        answers = [answer.choices[0] for answer in threads.map(ask, range(12))]
    again = [ask(number).choices[0] for number in range(3)]
    assert [answer.message.content for answer in again] == [answer.message.content for answer in answers[:3]]
    for number, answer in enumerate(answers):
        if number % 4 == 0:
            assert set(json.loads(answer.message.content)) == {"name", "age"}
        elif number % 4 == 1:
            assert answer.finish_reason == "tool_calls"
            assert set(json.loads(answer.message.tool_calls[0].function.arguments)) == {"name", "age"}
        elif number % 4 == 2:
            assert answer.message.content in ("yes", "no")
    assert metric(server, "fullbore_kv_blocks_used") == 0


def test_a_broken_schema_is_a_bad_request(server: ServeProcess, model_folder: Path) -> None:
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no-such-type"}}}
    create: Any = client_of(server).chat.completions.create
    messages = [{"role": "user", "content": "x"}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            create(model=model_folder.name, messages=messages, response_format=broken, stream=stream)
        assert error.value.param == "response_format"
        assert "no-such-type" in error.value.message
    assert metric(server, "fullbore_requests_waiting") == 0


def test_a_request_that_takes_too_long_ends_on_the_engine(server: ServeProcess) -> None:
    body = {"prompt": "y" * 100, "max_tokens": 400, "ignore_eos": True, "timeout_s": 0.05}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, headers={"X-Request-Id": "late-1"})
    assert answer.status_code == 504
    eventually(lambda: "[late-1]" in server.errors)
    assert metric(server, "fullbore_kv_blocks_used") == 0


def test_choices_logprobs_echo_and_penalties(server: ServeProcess, model_folder: Path) -> None:
    create: Any = client_of(server).completions.create
    options: dict[str, Any] = {
        "model": model_folder.name, "prompt": ["one prompt of some length, for three", "and another one"], "n": 3,
        "max_tokens": 12, "seed": 4, "echo": True, "logprobs": 2, "presence_penalty": 0.5, "logit_bias": {"65": 2},
        "extra_body": {"ignore_eos": True, "min_p": 0.01, "repetition_penalty": 1.1},
    }  # fmt: skip
    whole = create(**options)
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) == 6
    assert all(text.startswith(options["prompt"][k // 3]) for k, text in enumerate(texts))
    for choice in whole.choices:
        num_tokens = len(options["prompt"][choice.index // 3]) + 12
        assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) == num_tokens
        assert choice.logprobs.token_logprobs[0] is None
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])
    assert whole.usage.prompt_tokens == sum(map(len, options["prompt"]))
    assert whole.usage.completion_tokens == 6 * 12
    streamed = [""] * 6
    for chunk in create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    eventually(lambda: metric(server, "fullbore_kv_blocks_used") == 0)


def test_choices_compute_their_prompt_once(server: ServeProcess, model_folder: Path) -> None:
    before = metric(server, "fullbore_cached_prompt_tokens_total")
    messages = [{"role": "user", "content": "Something that nobody has asked before. " * 3}]
    create: Any = client_of(server).chat.completions.create
    chat = create(model=model_folder.name, messages=messages, n=4, max_tokens=8, logprobs=True, top_logprobs=1)
    assert len({choice.message.content for choice in chat.choices}) == 4
    assert all(len(choice.logprobs.content) <= 8 for choice in chat.choices)
    full = (chat.usage.prompt_tokens - 1) // 16 * 16
    assert metric(server, "fullbore_cached_prompt_tokens_total") - before >= 3 * full > 300


def test_it_is_ready_when_it_says_so(server: ServeProcess) -> None:
    assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


def test_what_it_prints(server: ServeProcess) -> None:
    assert f"{server.url}/docs" in server.output
    assert f"curl {server.url}/v1/chat/completions" in server.output
    assert "Stage 0" in server.errors
    assert "Stage 1" in server.errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_lets_requests_finish_and_leaves_nothing(
    model_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    body = {"prompt": "z", "max_tokens": 40, "ignore_eos": True}
    with ServeProcess(model_folder, "--pp-size", "2", "--shutdown-grace-s", "60", temporary=tmp_path) as server:
        processes = server.processes()
        assert len(processes) >= 3
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
            eventually(lambda: metric(server, "fullbore_generated_tokens_total") > 0)
            server.signal(number)
            assert waiting.result(60).json()["usage"]["completion_tokens"] == 40
        assert server.wait() == 0
    assert_all_end(processes)
    assert list(tmp_path.iterdir()) == []
    assert "Stopping" in server.errors
    assert "Traceback" not in server.errors


def test_a_second_ctrl_c_cuts_what_is_running(model_folder: Path, tmp_path: Path) -> None:
    body = {"prompt": "z", "max_tokens": 500, "ignore_eos": True, "stream": True}
    arguments = (model_folder, "--max-running-requests", "1", "--shutdown-grace-s", "600")
    with ServeProcess(*arguments, temporary=tmp_path) as server, ThreadPoolExecutor(40) as threads:
        processes = server.processes()
        for _ in range(40):  # one after the other: far from done when the second signal comes
            threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=600)
        eventually(lambda: metric(server, "fullbore_generated_tokens_total") > 0)
        server.signal(signal.SIGINT)
        eventually(lambda: "Stopping" in server.errors)
        server.signal(signal.SIGINT)
        assert server.wait() == 130
    assert_all_end(processes)
    assert "Traceback" not in server.errors


def test_a_stage_that_dies_ends_the_server_within_seconds(model_folder: Path, tmp_path: Path) -> None:
    body = {"prompt": "z", "max_tokens": 500, "ignore_eos": True}
    with ServeProcess(model_folder, "--pp-size", "2", temporary=tmp_path) as server:
        processes = server.processes()
        victim = httpx.get(f"{server.url}/server_info", timeout=60).json()["stages"][1]["pid"]
        psutil.Process(victim).kill()
        start_s = time.monotonic()
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        waited_s = time.monotonic() - start_s
        assert response.status_code == 503
        assert "Stage 1" in response.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 503
        assert server.wait() not in (0, None)
        assert waited_s < 30  # the limit is 5 s; the machine may be busy
    assert server.errors.rstrip().splitlines()[-1].startswith("fullbore: Stage 1")
    assert_all_end(processes)
    assert list(tmp_path.iterdir()) == []


def test_nan_ends_the_request_that_has_it_and_no_other(tmp_path: Path) -> None:
    healthy = make_tiny_model("LlamaForCausalLM", tmp_path / "healthy")
    texts = [reference_text(healthy, prompt) for prompt in PROMPTS]
    bad_byte = next(byte for byte in range(33, 127) if all(chr(byte) not in text for text in PROMPTS + texts))
    folder = make_tiny_model("LlamaForCausalLM", tmp_path / "poisoned")
    poison_token(folder, Tokenizer.load(folder).encode(chr(bad_byte))[0])

    def ask(prompt: str) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    with ServeProcess(folder, "--pp-size", "2", "--dtype", "float32", temporary=tmp_path) as server:
        with ThreadPoolExecutor(2 * len(PROMPTS)) as threads:
            asked_bad = threads.map(ask, [prompt[:5] + chr(bad_byte) + prompt[5:] for prompt in PROMPTS])
            good, bad = list(threads.map(ask, PROMPTS)), list(asked_bad)
        assert [answer.json()["choices"][0]["text"] for answer in good] == texts
        assert [answer.status_code for answer in bad] == [500] * len(PROMPTS)
        assert {answer.json()["error"]["code"] for answer in bad} == {"logits_not_finite"}
        assert ask(PROMPTS[0]).json()["choices"][0]["text"] == texts[0]
        assert metric(server, "fullbore_kv_blocks_used") == 0
    assert "not finite" in server.errors
    assert "Traceback" not in server.errors


def metric(server: ServeProcess, name: str) -> float:
    for line in httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no metric {name}")
