"""Every setting once, typed. CLI flags, the Python API and /server_info all derive from these two structs."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fullbore.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"

Backend = Literal["auto", "native", "transformers"]


def _doc(text: str) -> Meta:
    return Meta(description=text)


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Settings of the engine (driver and stages). Flag names are SGLang's where SGLang has the setting."""

    model: Annotated[str, _doc("Hugging Face folder or hub id, GGUF file, or the built-in smollm2-135m-instruct.")] = (
        DEFAULT_MODEL
    )
    tokenizer_path: Annotated[str | None, _doc("Folder with the tokenizer, where that is not the model's own.")] = None
    pp_size: Annotated[int, _doc("Pipeline stages: the model is cut by layers into this many processes.")] = 1
    pp_async_batch_depth: Annotated[
        int | Literal["auto"], _doc("Micro-batches in flight beyond pp_size; 'auto' uses what pays.")
    ] = "auto"
    pp_max_micro_batch_size: Annotated[
        int | Literal["auto"], _doc("Most requests in one micro-batch; 'auto' spreads requests over the pipeline.")
    ] = "auto"
    num_micro_batches: Annotated[
        int | Literal["auto"],
        _doc("Micro-batches that decoding requests are spread over; 'auto': as many as give the most tokens/s."),
    ] = "auto"
    pp_layer_partition: Annotated[
        tuple[int, ...] | None, _doc("Layers per stage, e.g. 17,13; default: divided by cost.")
    ] = None
    chunked_prefill_size: Annotated[int, _doc("Most prompt tokens in one micro-batch.")] = 512
    max_running_requests: Annotated[int, _doc("Most requests decoding or prefilling at once.")] = 256
    context_length: Annotated[int | None, _doc("Longest prompt + output in tokens; default: the model's own.")] = None
    page_size: Annotated[int, _doc("Tokens in one KV block.")] = 16
    max_total_tokens: Annotated[int | None, _doc("KV cache capacity in tokens; default: from free memory.")] = None
    mem_fraction_static: Annotated[
        float | None, _doc("Share of the memory free after loading that the KV cache may use (GPU 0.85, CPU 0.3).")
    ] = None
    disable_radix_cache: Annotated[bool, _doc("Do not reuse the KV blocks of equal prompt prefixes.")] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _doc("Weights and activations; 'auto': the checkpoint's on GPU, what the processor is fast at on CPU."),
    ] = "auto"
    backend: Annotated[
        Backend, _doc("Model code: native is fast, transformers (Hugging Face's) knows more models; 'auto' chooses.")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("Where stages run; 'auto' takes GPUs if any.")] = "auto"
    devices: Annotated[
        tuple[str, ...], _doc("Device of each stage, e.g. cuda:0,cuda:0 (two on one GPU); default: one GPU each.")
    ] = ()
    threads_per_stage: Annotated[int, _doc("CPU threads of each stage, pinned to cores of their own.")] = 1
    disable_cuda_graph: Annotated[bool, _doc("Run decode steps on a GPU eagerly, not from CUDA graphs.")] = False
    random_seed: Annotated[int, _doc("Seed for requests that bring none.")] = 0
    stage_timeout_s: Annotated[
        float, _doc("A stage silent for longer than this is declared dead and the server exits.")
    ] = 4.0
    step_timeout_s: Annotated[float, _doc("Longest time that one micro-batch may compute on one stage.")] = 300.0
    load_timeout_s: Annotated[float, _doc("Longest time that loading the model may take.")] = 1800.0

    @property
    def most_in_micro_batch(self) -> int:
        """Requests that can be in one micro-batch."""
        cap = self.pp_max_micro_batch_size
        return self.max_running_requests if cap == "auto" else min(cap, self.max_running_requests)

    def validate(self) -> None:
        """Checks every setting on its own and against the others.

        Raises:
            ConfigError: naming the flag and what it accepts.
        """
        at_least_one = (
            "pp_size chunked_prefill_size max_running_requests page_size threads_per_stage "
            "context_length max_total_tokens pp_max_micro_batch_size num_micro_batches"
        )
        for name in at_least_one.split():
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{flag(name)} must be at least 1, got {value}.")
        if isinstance(self.pp_async_batch_depth, int) and self.pp_async_batch_depth < 0:
            raise ConfigError(f"--pp-async-batch-depth must be 0 or more, or auto, got {self.pp_async_batch_depth}.")
        for name in ("stage_timeout_s", "step_timeout_s", "load_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{flag(name)} must be a positive number of seconds, got {getattr(self, name)}.")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static <= 1:
            raise ConfigError(f"--mem-fraction-static must be in (0, 1], got {self.mem_fraction_static}.")
        if self.devices and len(self.devices) != self.pp_size:
            raise ConfigError(
                f"--devices names {len(self.devices)} devices but --pp-size is {self.pp_size}; give one per stage."
            )
        if self.device != "auto" and not all(device.startswith(self.device) for device in self.devices):
            raise ConfigError(
                f"--device {self.device} and --devices {','.join(self.devices)} contradict each other; leave one out."
            )
        if self.pp_layer_partition is not None:
            if len(self.pp_layer_partition) != self.pp_size:
                raise ConfigError(
                    f"--pp-layer-partition names {len(self.pp_layer_partition)} stages but --pp-size is "
                    f"{self.pp_size}; give one number of layers per stage."
                )
            if min(self.pp_layer_partition) < 1:
                raise ConfigError("--pp-layer-partition: every stage needs at least one layer.")


class ServerConfig(Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server alone."""

    host: Annotated[str, _doc("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _doc("Port to listen on.")] = 8000
    api_key: Annotated[
        str | None, _doc("Key that clients must send as a bearer token (also: environment FULLBORE_API_KEY).")
    ] = None
    served_model_name: Annotated[str | None, _doc("Model name in the API; default: derived from MODEL.")] = None
    max_body_bytes: Annotated[int, _doc("Largest request body accepted.")] = 16 * 1024 * 1024
    max_queued_requests: Annotated[
        int | None, _doc("Most requests that wait for their first token; further ones get 429. Default: no limit.")
    ] = None
    request_timeout_s: Annotated[
        float | None, _doc("A request that takes longer ends with 504; requests may ask for less (timeout_s).")
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "mistral", "kimi_k2"],
        _doc("How the model writes function calls; 'auto': as its chat template shows."),
    ] = "auto"
    allow_origins: Annotated[
        tuple[str, ...], _doc("Web pages of these origins may call the API (CORS), e.g. https://a.org; '*': all.")
    ] = ()
    log_format: Annotated[Literal["text", "json"], _doc("Form of log lines on standard error.")] = "text"
    disable_log_requests: Annotated[bool, _doc("Do not log each request of the API when it ends.")] = False
    shutdown_grace_s: Annotated[float, _doc("Time that running requests get to finish after SIGINT or SIGTERM.")] = 5.0

    def validate(self) -> None:
        """Raises ConfigError, naming the flag, when a setting cannot work."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}.")
        if self.api_key == "":
            raise ConfigError("--api-key must not be empty; leave it out to serve without a key.")
        if self.max_body_bytes < 1:
            raise ConfigError(f"--max-body-bytes must be at least 1, got {self.max_body_bytes}.")
        if self.max_queued_requests is not None and self.max_queued_requests < 1:
            raise ConfigError(f"--max-queued-requests must be at least 1, got {self.max_queued_requests}.")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(f"--request-timeout-s must be more than 0 seconds, got {self.request_timeout_s}.")
        for origin in self.allow_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError(f"--allow-origins takes origins such as https://example.org, got {origin!r}.")
        if self.shutdown_grace_s < 0:
            raise ConfigError(f"--shutdown-grace-s must be 0 or more, got {self.shutdown_grace_s}.")


def flag(field_name: str) -> str:
    """The command-line flag of a field: `pp_size` -> `--pp-size`."""
    return "--" + field_name.replace("_", "-")
