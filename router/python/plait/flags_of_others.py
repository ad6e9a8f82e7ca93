"""Flags of vLLM and SGLang that Plait has not, and what stands in for each."""

from __future__ import annotations

_MODEL = "name the model by itself: plait serve MODEL"
_KEY_FILE = "write the keys into a file and give --api-key-file, so that no process list shows them"
_PIPELINE = "there is no pipeline parallelism; --tp and `plait launch` spread a model over GPUs and nodes"
_EXPERTS = "--dp with --dp-attention puts each expert on one rank of all"
_ALWAYS_CHUNKED = "long prompts are always computed in chunks; --long-prefill-token-threshold bounds one"
_NO_CODE = "no code from a model's folder is run; leave it out"
_TOKENIZER = "the tokenizer is the model's own; put other tokenizer files into the model's folder"
_SWAP = "preempted requests are computed anew from the prefix cache; leave it out"
_SPECULATION = "speculative decoding is not there yet; leave it out"
_ADAPTERS = "LoRA adapters are not there; merge the adapter into the model's weights"
_VISION = "images, audio and video are not taken; leave it out"
_LEVEL = "--log-level is the level of all lines"
_QUIET = "requests are logged only with --enable-log-requests; leave it out"
_METRICS = "/metrics is always there; leave it out"
_BACKEND = "constraints have one compiler of their own; leave it out"
_NODES = "`plait launch` has --nnodes, --node-rank and --head"
_REPLICAS = "--dp starts replicas on this host; `plait launch` divides them among nodes"
_BALANCER = "--dp replicas have one address; engines of a group (--group-engines) have one each, for a balancer"
_ROUTING = "a request goes to the replica where it costs least; leave it out"
_EXCHANGE = "--dp-attention exchanges rows over the GPUs' memory, else by NCCL or gloo; leave it out"
_REDUNDANT = "each expert is on one rank of all; leave it out"
_MAIN_PROCESS = "one process answers HTTP for all replicas; --text-threads gives tokenisation more threads"
_TRANSFER = "prefill and decode are not taken apart; --mixed computes both in one step"
_EVENTS = "--kv-events-endpoint publishes which pages are cached"
_CPU_KV = "KV pages stay on the device; --memory-fraction and --num-pages set how many"

STAND_INS: dict[str, str] = {
    "--model": _MODEL,
    "--model-path": _MODEL,
    "--api-key": _KEY_FILE,
    "--admin-api-key": "write the keys into a file and give --admin-key-file, with --admin-port",
    "--pipeline-parallel-size": _PIPELINE,
    "--pp-size": _PIPELINE,
    "--pp": _PIPELINE,
    "--enable-expert-parallel": _EXPERTS,
    "--expert-parallel-size": _EXPERTS,
    "--ep-size": _EXPERTS,
    "--ep": _EXPERTS,
    "--enable-chunked-prefill": _ALWAYS_CHUNKED,
    "--trust-remote-code": _NO_CODE,
    "--tokenizer": _TOKENIZER,
    "--tokenizer-path": _TOKENIZER,
    "--tokenizer-mode": _TOKENIZER,
    "--swap-space": _SWAP,
    "--cpu-offload-gb": _CPU_KV,
    "--enable-hierarchical-cache": _CPU_KV,
    "--speculative-config": _SPECULATION,
    "--speculative-algorithm": _SPECULATION,
    "--speculative-num-steps": _SPECULATION,
    "--speculative-draft-model-path": _SPECULATION,
    "--num-speculative-tokens": _SPECULATION,
    "--enable-lora": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--limit-mm-per-prompt": _VISION,
    "--mm-processor-kwargs": _VISION,
    "--enable-multimodal": _VISION,
    "--disable-log-stats": "no statistics are logged; leave it out, /metrics has them",
    "--uvicorn-log-level": _LEVEL,
    "--log-level-http": _LEVEL,
    "--disable-log-requests": _QUIET,
    "--log-requests": "--enable-log-requests writes a line for each request",
    "--enable-metrics": _METRICS,
    "--guided-decoding-backend": _BACKEND,
    "--structured-outputs-config": _BACKEND,
    "--grammar-backend": _BACKEND,
    "--enable-eplb": _REDUNDANT,
    "--enable-dp-lm-head": "each replica has the whole head; leave it out",
    "--ep-num-redundant-experts": _REDUNDANT,
    "--all2all-backend": _EXCHANGE,
    "--moe-a2a-backend": _EXCHANGE,
    "--deepep-mode": _EXCHANGE,
    "--data-parallel-size-local": _REPLICAS,
    "--data-parallel-start-rank": _REPLICAS,
    "--data-parallel-rank": _REPLICAS,
    "--data-parallel-address": _NODES,
    "--data-parallel-rpc-port": _NODES,
    "--data-parallel-backend": "replicas are processes of this server; leave it out",
    "--data-parallel-hybrid-lb": _BALANCER,
    "--data-parallel-external-lb": _BALANCER,
    "--load-balance-method": _ROUTING,
    "--decode-context-parallel-size": "--dp-attention divides the KV cache of MLA models by requests",
    "--nnodes": _NODES,
    "--node-rank": _NODES,
    "--dist-init-addr": _NODES,
    "--distributed-executor-backend": _NODES,
    "--api-server-count": _MAIN_PROCESS,
    "--kv-transfer-config": _TRANSFER,
    "--disaggregation-mode": _TRANSFER,
    "--kv-events-config": _EVENTS,
    "--max-total-tokens": "--num-pages times --page-size is the pool's tokens",
    "--schedule-conservativeness": "--watermark keeps pages free at admission",
    "--chat-template-content-format": "a template gets the messages as texts; leave it out",
    "--max-logprobs": "log-probabilities of 20 tokens at most are given; leave it out",
    "--mem-fraction": "--memory-fraction is the share of free memory",
    "--disable-cuda-graph-padding": "--cuda-graph-max-bs bounds the captured steps; --no-cuda-graphs captures none",
    "--response-role": "answers have the role assistant; leave it out",
    "--task": "every model answers chats, completions and embeddings; leave it out",
    "--runner": "every model answers chats, completions and embeddings; leave it out",
    "--is-embedding": "every model answers /v1/embeddings; leave it out, and see --pooling",
    "--hf-overrides": "change config.json in a copy of the model's folder",
    "--json-model-override-args": "change config.json in a copy of the model's folder",
    "--preemption-mode": _SWAP,
    "--watchdog-timeout": "a hung step is seen by its measured time; --load-timeout-seconds bounds the start",
    "--disable-fastapi-docs": "there are no /docs pages; /openapi.json needs a key as all paths do",
    "--profiler-config": "--profile-dir is the folder for profiles, which POST /admin/profile takes",
    "--compilation-config": "--cuda-graphs and --cuda-graph-max-bs say what is captured",
    "--enable-torch-compile": "torch.compile is not used; leave it out",
    "--disable-sliding-window": "windows are as the model's configuration says; --max-model-len shortens the context",
}
