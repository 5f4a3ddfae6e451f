"""The exact command that starts a predicted layout, for fullbore, SGLang and vLLM."""

from __future__ import annotations

from math import ceil

from fullbore.plan.predict import Prediction

HUB = "https://huggingface.co/"


def commands(prediction: Prediction) -> dict[str, str]:
    """One shell command per engine; what an engine cannot do is said in a comment behind it."""
    return {
        "fullbore": fullbore_command(prediction),
        "sglang": sglang_command(prediction),
        "vllm": vllm_command(prediction),
    }


def model_id(prediction: Prediction) -> str:
    model = prediction.deployment.scenario.model
    return model.source.removeprefix(HUB) or model.name


def fullbore_command(prediction: Prediction) -> str:
    deployment, layout = prediction.deployment, prediction.deployment.layout
    words = ["fullbore serve", model_id(prediction), f"--pp-size {layout.pp}"]
    if layout.pp > 1:
        words.append(f"--pp-layer-partition {','.join(map(str, deployment.partition))}")
    if layout.max_micro_batch != "auto":
        words.append(f"--pp-max-micro-batch-size {layout.max_micro_batch}")
    if layout.depth != "auto":
        words.append(f"--pp-async-batch-depth {layout.depth}")
    words.append(f"--chunked-prefill-size {deployment.chunk_tokens}")
    words.append(f"--max-running-requests {_per_replica(prediction)}")
    words.append("" if layout.graphs else "--disable-cuda-graph")
    remarks = []
    if layout.micro_batches != "auto":
        remarks.append("how many micro-batches there are is chosen by the scheduler, not by a flag")
    if layout.tp > 1:
        remarks.append(f"fullbore has one device per stage so far; {layout.name} needs SGLang or vLLM")
    if deployment.scenario.model.is_quantised:
        remarks.append("fullbore reads bf16, fp16, fp32 and GGUF weights so far; this needs SGLang or vLLM")
    return _join(words, remarks, layout.replicas)


def sglang_command(prediction: Prediction) -> str:
    deployment, layout = prediction.deployment, prediction.deployment.layout
    words = []
    if layout.pp > 1:
        words.append(f"SGLANG_PP_LAYER_PARTITION={','.join(map(str, deployment.partition))}")
    words += ["python3 -m sglang.launch_server --model-path", model_id(prediction)]
    words += [f"--pp-size {layout.pp}", f"--tp-size {layout.tp}"]
    words.append(f"--enable-dp-attention --dp-size {layout.tp}" if layout.dp_attention else "")
    if layout.pp > 1:
        # SGLang moves no request between slots: only this cap spreads a burst over all of them.
        number = layout.pp if layout.micro_batches == "auto" else layout.micro_batches
        spread = max(ceil(_per_replica(prediction) / number), 1)
        words.append(f"--pp-max-micro-batch-size {min(spread, _cap(prediction))}")
        words.append("" if layout.depth in ("auto", 0) else f"--pp-async-batch-depth {layout.depth}")
    words.append(f"--chunked-prefill-size {deployment.chunk_tokens}")
    words.append(f"--max-running-requests {max(_per_replica(prediction), layout.pp)}")
    words.append("" if layout.graphs else "--disable-cuda-graph")
    return _join(words, [], layout.replicas)


def vllm_command(prediction: Prediction) -> str:
    deployment, layout = prediction.deployment, prediction.deployment.layout
    words = []
    if layout.pp > 1:
        words.append(f"VLLM_PP_LAYER_PARTITION={','.join(map(str, deployment.partition))}")
    words += ["vllm serve", model_id(prediction)]
    words += [f"--pipeline-parallel-size {layout.pp}"]
    words.append(
        f"--data-parallel-size {layout.tp} --enable-expert-parallel"
        if layout.dp_attention
        else f"--tensor-parallel-size {layout.tp}"
    )
    words.append(f"--max-num-batched-tokens {deployment.chunk_tokens}")
    words.append(f"--max-num-seqs {_per_replica(prediction)}")
    words.append("" if layout.graphs else "--enforce-eager")
    remarks = []
    if layout.pp > 1 and prediction.micro_batches > 1.5:
        remarks.append("vLLM has no cap per micro-batch; a burst may fill one batch and leave the others empty")
    return _join(words, remarks, layout.replicas)


def _per_replica(prediction: Prediction) -> int:
    return max(ceil(prediction.concurrency / prediction.deployment.layout.replicas), 1)


def _cap(prediction: Prediction) -> int:
    cap = prediction.deployment.layout.max_micro_batch
    return cap if cap != "auto" else 1 << 30


def _join(words: list[str], remarks: list[str], replicas: int) -> str:
    if replicas > 1:
        remarks.append(f"start {replicas} of these, each on its own devices, behind a load balancer")
    command = " ".join(word for word in words if word)
    return command + (f"  # {'; '.join(remarks)}" if remarks else "")
