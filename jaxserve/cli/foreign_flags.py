"""List the launch flags of vLLM 0.32 and SGLang 0.5.23, and the usual ones of llama-server, each with its handling.

A name that ends in ! is a switch and takes no value. A name that ends in * stands for all flags with this beginning
that have no row. docs/flags.md is made from this table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxserve.errors import ConfigError

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")


def count(text: str) -> str:
    """Convert a number of tokens: 32k is 32,000, 32K is 32,768, auto and -1 are null."""
    if text in ("auto", "-1"):
        return "null"
    match = _COUNT.fullmatch(text)
    return text if match is None else str(int(float(match[1]) * _SUFFIXES[match[2]]))


def gibibytes(text: str) -> str:
    """Convert a number of GiB to a size. 0 is null."""
    return "null" if text in ("0", "0.0") else f"{text}GiB"


def gigabytes(text: str) -> str:
    """Convert a number of GB to a size. 0 is null."""
    return "null" if text in ("0", "0.0") else f"{text}GB"


def json_list(text: str) -> str:
    """Return the only entry of a JSON list of texts, or the text itself. Raises ConfigError for several entries."""
    try:
        entries = json.loads(text)
    except ValueError:
        return text
    if not isinstance(entries, list) or len(entries) != 1:
        raise ConfigError(f"{text} should be one value", fix="write a list in the configuration file")
    return str(entries[0])


def reserved_share(text: str) -> str:
    """Convert SGLang's conservativeness to scheduler.new_token_ratio, which is 0.7 times it and at most 1."""
    try:
        return str(min(1.0, 0.7 * float(text)))
    except ValueError:
        return text


@dataclass(frozen=True)
class Key:
    """The flag sets a key of the configuration.

    const: value that a switch sets
    words: values of the flag that have another name here
    others: the value, with a notice, for any word that is not one of the key's own
    many: whether the flag takes several words
    note: notice that is shown when the flag is used
    fields: the flag's value is a JSON object, and each of its fields sets a key; the others are refused. `words` are
    then values of the field that sets `key`
    """

    key: str
    const: str | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    others: str | None = None
    convert: Callable[[str], str] | None = None
    many: bool = False
    note: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    def read_fields(self, text: str) -> dict[str, str]:
        """Return the keys that a JSON object sets, with their values as texts. Raises ConfigError."""
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not found:
            names = ", ".join(self.fields)
            raise ConfigError(f"{text[:200]} should be a JSON object", fix=f"write one with some of {names}")
        if unknown := [name for name in found if name not in self.fields]:
            raise ConfigError(f"the field {unknown[0][:40]} is not served", fix="leave it out")
        texts = {self.fields[name]: str(value) for name, value in found.items()}
        return texts | {key: self.words.get(text, text) for key, text in texts.items() if key == self.key}


@dataclass(frozen=True)
class NoEffect:
    """The flag has no effect. values: the accepted values, any if empty; other values are refused with `fix`"""

    reason: str
    values: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True)
class Refused:
    """The flag is refused.

    fix: what to do instead
    beside: key with which the flag has no effect, because the key says the same
    """

    fix: str
    beside: str = ""


Answer = Key | NoEffect | Refused


_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_CACHE_DTYPES = _DTYPES | {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"}
_LEVELS = {"critical": "error", "trace": "debug", "warn": "warning", "notset": "info"}
_DEVICES = {"cuda": "gpu", "rocm": "gpu"}

_GRAPHS = NoEffect("programs of fixed shapes are compiled before the server is ready; XLA makes CUDA graphs itself")
_KERNELS = NoEffect("kernels are chosen by --runtime.attention and by the platform")
_COLLECTIVES = NoEffect("XLA chooses how devices exchange data")
_ALWAYS = NoEffect("it is always on")
_NOTHING = NoEffect("nothing here corresponds to it")
_CHUNKS = NoEffect("prompts are always prefilled in chunks, beside running requests")
_WARM = NoEffect("programs run on dummy input before the server is ready")
_PER_REQUEST = NoEffect("a request may always ask for it")
_LOG = NoEffect("--logging.level and --logging.requests decide what is logged")
_METRICS = NoEffect("/metrics is always served, with its own buckets and labels")
_WORKERS = NoEffect("--server.workers N serves with N processes; each tokenizes in threads and makes its own text")
_READING = NoEffect("weights are read by several threads")
_LORA = Refused(
    "write --lora.slots N for N adapters on the devices, and --lora.adapters, a list of {name, path}, for those of the "
    "start, or merge the adapter into the checkpoint"
)
_LORA_SWITCH = Refused(f"write --max-loras N beside it, or {_LORA.fix.removeprefix('write ')}", beside="lora.slots")
_SPECULATION = Refused(
    "write --speculation.method ngram or mtp, or draft_model or eagle3 with --speculation.draft_model DIR: no other "
    "method is served yet"
)
# the methods of vLLM that name the family of a checkpoint's own head
_MTP: dict[str, str] = dict.fromkeys(
    (
        *("deepseek_mtp", "ernie_mtp", "exaone_moe_mtp", "glm4_moe_mtp", "mimo_mtp", "mimo_v2_mtp", "qwen3_next_mtp"),
        *("hy_v3_mtp", "nemotron_h_mtp", "qwen3_5_mtp", "step3p5_mtp"),
    ),
    "mtp",
)
_CHAIN = "drafts are a chain, not a tree"
_NODES = Refused("leave it out: --nnodes, --node-rank and --master-addr make one engine of several machines")
_SPLIT = Refused("write --replicas N --prefill-replicas K: K of the N engines of a server only compute prompts")
_OFFLOAD = Refused(
    "leave it out: weights stay in device memory; --cache.host-memory SIZE keeps evicted KV pages in the host's memory"
)
_TIERS = Refused("write --cache.host-memory SIZE to keep evicted pages in the memory of the host, the only other place")
_MEDIA = Refused("leave it out: --media.max-items and others limit images; audio and video are not served")
_STATE = Refused("leave it out: cache.num_state_pages and cache.state_interval say how recurrent states are kept")
_EXPERTS = Refused("write --mesh.expert N to split the experts over N devices; they are not copied or moved")
_PLUGIN = Refused("leave it out: the server runs no code from flags or requests")
_CODE = NoEffect("code of a checkpoint is never run, and the served models need none")
_PROXY = Refused("leave it to the proxy in front of the server")
_WEIGHTS = Refused(
    "leave it out: weights are read from the model's directory; docs/weights.md: how to replace them while serving"
)
_TEMPLATE = Refused("write a template file and name it with --chat-template, or send chat_template_kwargs in requests")
_DEFAULTS = Refused("change generation_config.json in the model's directory, or send the parameters in requests")
_MODEL_FILE = Refused("change config.json in a copy of the model's directory")
_DEBUG = Refused("leave it out: --log-level debug and /metrics show what the engine does")
_QUANTIZED = Refused(
    "leave it out: config.json shows whether a checkpoint is quantized; --quantization quantizes another"
)
_STORED = (  # config.json says
    *("null", "none", "gptq", "gptq_marlin", "awq", "awq_marlin", "compressed-tensors"),
    *("modelopt", "modelopt_fp4", "modelopt_mixed", "quark"),
)
_EMBEDDER = NoEffect("config.json shows whether the model is an encoder")

# fmt: off
ROWS: list[tuple[str, Answer]] = [
    # the model
    ("--model --model-path", Key("model.path")),
    ("--tokenizer --tokenizer-path", Key("model.tokenizer")),
    ("--served-model-name", Key("model.served_name", many=True)),
    ("--revision", Key("model.revision")),
    ("--tokenizer-revision --code-revision", NoEffect("--revision applies to all files of the model")),
    ("--dtype", Key("model.dtype", words=_DTYPES)),
    ("--max-model-len --context-length", Key("model.max_model_len", convert=count)),
    ("--load-format", Key("model.load_format", words={"dummy": "random", "hf": "auto"})),
    ("--chat-template", Key("model.chat_template")),
    ("--tool-call-parser", Key("model.tool_parser")),
    ("--reasoning-parser", Key("model.reasoning_parser")),
    ("--trust-remote-code!", _CODE),
    ("--is-embedding!", _EMBEDDER),
    ("--runner --task --convert", NoEffect("config.json shows the kind of the model")),
    ("--tokenizer-mode",
     NoEffect("tokenizer.json is read", ("auto", "hf", "slow"), "leave it out: tokenizer.json is read")),
    ("--tokenizer-backend", NoEffect("tokenizer.json is read by the tokenizers library")),
    ("--model-impl",
     NoEffect("the models are jaxserve's own", ("auto",), "leave it out: the models are jaxserve's own")),
    ("--config-format --model-config-parser", NoEffect("config.json is read")),
    ("--quantization -q", Key("model.quantization", words=dict.fromkeys(_STORED, "auto"))),
    ("--quantization-config --quantization-param-path --quantize-and-serve! --rl-quant-profile", _QUANTIZED),
    ("--modelopt-*", _QUANTIZED),
    ("--allow-deprecated-quantization! --fail-on-environ-validation!", _NOTHING),
    ("--download-dir", Refused("set the environment variable HF_HUB_CACHE to the directory")),
    ("--hf-token", Refused("set the environment variable HF_TOKEN")),
    ("--hf-overrides --hf-config-path --json-model-override-args --model-class-overrides --rope-scaling --rope-theta",
     _MODEL_FILE),
    ("--generation-config", NoEffect("the model's generation_config.json is read", ("auto",), _DEFAULTS.fix)),
    ("--sampling-defaults", NoEffect("the model's generation_config.json is read", ("model",), _DEFAULTS.fix)),
    ("--override-generation-config --preferred-sampling-params", _DEFAULTS),
    ("--skip-tokenizer-init!",
     Refused("leave it out: requests may send token ids, and stop strings need the tokenizer")),
    ("--pooler-config", Refused("leave it out: pooling is read from the files of sentence-transformers")),
    ("--weight-version", _NOTHING),
    ("--enable-fp32-lm-head! --enable-tf32-matmul --enable-precise-embedding-interpolation! --use-fp64-gumbel!",
     NoEffect("all layers have the model's dtype; logits and sampling are float32")),
    ("--disable-sliding-window!", Refused("leave it out: a model needs its sliding windows")),
    ("--dllm-* --diffusion-config -dc", Refused("leave it out: diffusion models are not served")),

    # loading
    ("--use-tqdm-on-load! --safetensors-load-strategy --safetensors-prefetch-block-size "
     "--safetensors-prefetch-num-threads --weight-loader-disable-mmap! --weight-loader-prefetch-checkpoints! "
     "--weight-loader-prefetch-num-threads --weight-loader-drop-cache-after-load! --max-parallel-loading-workers",
     _READING),
    ("--model-loader-extra-config --ignore-patterns --pt-load-map-location --startup-weight-load-mode "
     "--custom-weight-loader --model-checksum --delete-ckpt-after-loading! --decrypted-config-file "
     "--decrypted-draft-config-file --checkpoint-engine-wait-weights-before-ready! --weight-transfer-config "
     "--engine-info-bootstrap-port --modelexpress-config", _WEIGHTS),
    ("--remote-instance-* --weight-cache-*", _WEIGHTS),

    # memory and pages
    ("--gpu-memory-utilization --device-memory-utilization --mem-fraction-static", Key("cache.memory_fraction")),
    ("--kv-cache-dtype", Key("cache.dtype", words=_CACHE_DTYPES)),
    ("--page-size --block-size", Key("cache.page_size")),
    ("--num-gpu-blocks-override", Key("cache.num_pages")),
    ("--max-total-tokens", Refused("write --cache.num-pages N, where N is the tokens divided by the page size")),
    ("--kv-cache-memory-bytes", Refused("write --cache.num-pages N; jaxserve plan MODEL shows what a token takes")),
    ("--enable-prefix-caching!", Key("cache.prefix_cache", const="true")),
    ("--disable-radix-cache!", Key("cache.prefix_cache", const="false")),
    ("--prefix-caching-hash-algo --prefix-match-unit --radix-eviction-policy --radix-eviction-policy-config "
     "--radix-cache-backend --enable-session-radix-cache! --prefix-cache-retention-interval --enable-unified-memory! "
     "--enable-page-major-kv-layout!",
     NoEffect("the prefix cache is a radix tree of pages; the least recently used are evicted first")),
    ("--swap-space --preemption-mode --retraction-policy",
     NoEffect("a preempted request is computed again, or its pages are loaded with --cache.host-memory SIZE")),
    ("--disable-hybrid-kv-cache-manager! --disable-hybrid-swa-memory! --swa-full-tokens-ratio --swa-prefix-tails "
     "--swa-bounded-replay! --enable-encoder-swa-bounded-replay! --enable-decoder-swa-bounded-replay "
     "--c128-page-size", NoEffect("--cache.num-window-pages sets the pages of layers with a sliding window")),
    ("--cpu-offload-gb", NoEffect("nothing is offloaded", ("0", "0.0"), _OFFLOAD.fix)),
    ("--cpu-offload-params --offload-* --ple-offload-* --enable-paged-experts! --paged-experts-num-resident", _OFFLOAD),
    ("--kt-*", _OFFLOAD),
    ("--kv-offloading-size", Key("cache.host_memory", convert=gibibytes)),
    ("--hicache-size", Key("cache.host_memory", convert=gigabytes)),
    ("--kv-offloading-* --enable-hierarchical-cache! --enable-hicache! --hicache-* --enable-hisparse! "
     "--hisparse-config --hierarchical-sparse-attention-extra-config --enable-lmcache! "
     "--lmcache-config-file --enable-flexkv! "
     "--flexkv-config-file --enable-unified-cache-external-linker! --enable-linker-mla-dedup! --unified-cache-* "
     "--kv-transfer-config --ec-transfer-config --ec-manager-config --kv-events-config", _TIERS),
    ("--calculate-kv-scales! --kv-cache-dtype-skip-layers --qsa-indexer-dtype",
     Refused("leave it out: --cache.dtype is for all layers; fp8 and int8 have a scale for each token and head")),
    ("--kv-sharing-fast-prefill! --enable-shm-tensor-arena! --enable-cumem-allocator! --enable-kv-cache-sharding!",
     _NOTHING),
    ("--enable-sleep-mode! --enable-memory-saver! --enable-weights-cpu-backup!",
     NoEffect("every server can sleep, if it has an admin key (docs/weights.md)")),
    ("--sleep-* --enable-draft-weights-cpu-backup!", _NOTHING),
    ("--sleep-on-idle!", NoEffect("an idle engine sleeps")),

    # scheduling
    ("--max-num-seqs --max-running-requests", Key("scheduler.max_num_seqs")),
    ("--max-num-batched-tokens --chunked-prefill-size",
     Key("scheduler.max_num_batched_tokens", words={"-1": "auto"}, convert=count)),
    ("--max-queued-requests --max-num-queued-reqs", Key("scheduler.max_queued_requests")),
    ("--max-num-queued-tokens", Key("scheduler.max_queued_tokens", convert=count)),
    ("--schedule-policy --scheduling-policy", Key("scheduler.policy")),
    ("--schedule-conservativeness", Key("scheduler.new_token_ratio", convert=reserved_share)),
    ("--enable-priority-scheduling!", Key("scheduler.policy", const="priority", note="a lower value is earlier here")),
    ("--schedule-low-priority-values-first!", NoEffect("a lower priority value is always earlier")),
    ("--disable-priority-preemption! --priority-scheduling-preemption-threshold --abort-on-priority-when-disabled!",
     NoEffect("a request is preempted if pages run out, for a better priority, or for a tenant below its share")),
    ("--default-priority-value", NoEffect("a request without a priority has 0", ("0",), "send a priority in requests")),
    ("--enable-mixed-chunk! --enable-chunked-prefill! --enable-dynamic-chunking! --disable-chunked-prefix-cache! "
     "--max-prefill-tokens --prefill-max-requests --max-num-partial-prefills --max-long-partial-prefills "
     "--long-prefill-token-threshold --long-prefill-token-threshold-adaptive! --prefill-decode-interval "
     "--prefill-decode-interval-min-bs --prefill-schedule-interval --enable-prefill-delayer! "
     "--prefill-delayer-max-delay-passes --prefill-delayer-token-usage-low-watermark "
     "--prefill-delayer-forward-passes-buckets --prefill-delayer-wait-seconds-buckets "
     "--prefill-delayer-queue-min-ratio --prefill-delayer-max-delay-ms --min-free-slots-delay", _CHUNKS),
    ("--async-scheduling! --disable-overlap-schedule! --num-continuous-decode-steps --scheduler-recv-interval "
     "--num-scheduler-steps --multi-step-stream-outputs! --num-lookahead-slots --disable-async-output-proc! "
     "--enable-two-batch-overlap! --enable-single-batch-overlap! --tbo-token-distribution-threshold",
     NoEffect("a step is dispatched before the last one is read, except with drafts or for batches on a CPU")),
    ("--max-num-active-seqs --max-num-scheduled-tokens --scheduler-reserve-full-isl! --use-v2-block-manager! "
     "--num-reserved-decode-tokens --prefill-only-disable-kv-cache!", _NOTHING),
    ("--scheduler-cls --worker-cls --worker-extension-cls --additional-config", _PLUGIN),
    ("--performance-mode --optimization-level -O -O0! -O1! -O2! -O3! --compilation-config -cc "
     "--kernel-config --ir-op-priority",
     _GRAPHS),

    # programs, kernels, devices
    ("--device", Key("mesh.device", words=_DEVICES)),
    ("--attention-backend", Key("runtime.attention", others="auto")),
    ("--seed --random-seed", Key("runtime.random_seed")),
    ("--enable-deterministic-inference!", Key("runtime.deterministic", const="true")),
    ("--enforce-eager! --disable-cuda-graph! --disable-prefill-cuda-graph! --disable-decode-cuda-graph! "
     "--disable-cuda-graph-padding! --enable-profile-cuda-graph! --enable-cudagraph-gc! --debug-cuda-graph! "
     "--cudagraph-metrics! --cuda-graph-max-bs --cuda-graph-bs --cuda-graph-config --cuda-graph-backend-decode "
     "--cuda-graph-backend-prefill --cuda-graph-max-bs-decode --cuda-graph-max-bs-prefill "
     "--cuda-graph-max-seq-len-prefill --cuda-graph-bs-decode --cuda-graph-bs-prefill --cuda-graph-prefill-max-context "
     "--context-bucket --cudagraph-capture-sizes --max-cudagraph-capture-size --max-seq-len-to-capture "
     "--enable-torch-compile! --enable-torch-compile-debug-mode! --torch-compile-max-bs --jit-monitor-mode "
     "--jit-monitor-verbose!", _GRAPHS),
    ("--skip-server-warmup! --warmups --disable-flashinfer-autotune! --enable-flashinfer-autotune! "
     "--flashinfer-autotune-skip-ops --gc-threshold", _WARM),
    ("--attention-config -ac --decode-attention-backend --prefill-attention-backend --prefill-kv-cache-dequant-dtype "
     "--sampling-backend --fp8-gemm-backend --fp4-gemm-backend --bf16-gemm-backend --linear-backend --moe-backend "
     "--moe-runner-backend --flashinfer-mxfp4-moe-precision --flashinfer-mla-disable-ragged! --boundary-reduction "
     "--triton-attention-reduce-in-fp32! --triton-attention-num-kv-splits --triton-attention-split-tile-size "
     "--disable-cascade-attn! --enable-lean-attention --enable-nvidia-megakernel! --enable-amd-monokernel! "
     "--monokernel-backend --enable-fused-qk-norm-rope --enable-fused-moe-sum-all-reduce! "
     "--disable-shared-experts-fusion! --enforce-shared-experts-fusion! --enable-quant-communications "
     "--enable-w4a4-mxfp4-megamoe! --enable-flashinfer-mla! --enable-flash-late-interaction! --enable-mis! "
     "--mlx-enable-sampling!", _KERNELS),
    ("--dsa-* --dsv4-* --enable-dsa-* --enable-deepseek-v4-fp4-indexer! --sparse-indexer-topk-backend "
     "--enable-return-indexer-topk! --engram-config",
     Refused("leave it out: models with sparse attention are not served yet")),
    ("--disable-custom-all-reduce! --enable-nccl-nvls! --enable-symm-mem! --enable-mscclpp! --enable-torch-symm-mem! "
     "--pre-warm-nccl! --enable-scattered-sconv! --enforce-disable-flashinfer-allreduce-fusion! "
     "--flashinfer-allreduce-fusion-backend --enable-flashinfer-allreduce-fusion! --enable-aiter-allreduce-fusion! "
     "--disable-aiter-allreduce-fusion-in-prefill! --disable-aiter-allreduce-fusion-in-decode! --enable-p2p-check! "
     "--enable-layernorm-sp! --enable-megamoe-for-layernorm-sp! --enable-hc-sp! --enable-batch-sharded-sampling! "
     "--disable-nccl-for-dp-synchronization! --enable-nccl-comm-suspend! --nccl-port --distributed-executor-backend "
     "--disable-attn-tp-gather! --enable-attn-tp-input-scattered! --enable-tp-lm-head-all-to-all", _COLLECTIVES),
    ("--numa-node --numa-bind! --numa-bind-cpus --numa-bind-nodes",
     Refused("leave it out: start the server below numactl")),
    ("--base-gpu-id --gpu-id-step --device-ids", Refused("set the environment variable CUDA_VISIBLE_DEVICES")),
    ("--rl-on-policy-target", Refused("write --runtime.deterministic true")),

    # devices of one engine, and several engines
    ("--tensor-parallel-size -tp --tp-size --tp", Key("mesh.tensor")),
    ("--ep-size --expert-parallel-size --ep", Key("mesh.expert")),
    ("--data-parallel-size -dp --dp-size --dp", Key("mesh.replicas")),
    ("--enable-expert-parallel! -ep! --enable-ep-moe! --enable-deepep-moe! --all2all-backend --moe-a2a-backend "
     "--enable-eplb! --enable-dbo! --dbo-decode-token-threshold --dbo-prefill-token-threshold --ubatch-size "
     "--expert-placement-strategy --enable-ep-weight-filter! --ep-num-redundant-experts --ep-dispatch-algorithm "
     "--init-expert-location --enable-waterfill! --moe-dense-tp-size --moe-dp-size --moe-data-parallel-size "
     "--enable-shared-experts-attn-tp! --shared-experts-tp-size --enable-dense-mlp-attn-tp! --dwdp-size "
     "--flashinfer-a2a-dispatch-type --fuseep-mode --mooncake-ib-device --max-ep-size "
     "--disable-flashinfer-cutlass-moe-fp4-allgather!", _EXPERTS),
    ("--eplb-* --deepep-* --elastic-ep-* --enable-elastic-* --expert-distribution-* --expert-balancedness-*", _EXPERTS),
    ("--pipeline-parallel-size -pp --pp-size --prefill-context-parallel-size -pcp --decode-context-parallel-size -dcp "
     "--dcp-size --attn-cp-size --attention-context-parallel-size",
     NoEffect("there is one", ("1",), "write --mesh.tensor N: layers and contexts are not split over devices")),
    ("--pp-* --dcp-* --cp-* --enable-prefill-cp! --enable-cp-decode-attn-tp!",
     Refused("write --mesh.tensor N: layers and contexts are not split over devices")),
    ("--attn-dp-size --attention-data-parallel-size --enable-dp-attention! --enable-dp-lm-head! "
     "--enable-dp-attention-local-control-broadcast! --load-balance-method --data-parallel-* -dpa -dpb -dpe -dph -dpl "
     "-dpm -dpn -dpp -dpr --dp-*", Refused("write --mesh.replicas N: engines that one server balances")),
    ("--nnodes -n", Key("mesh.hosts")),
    ("--node-rank -r", Key("mesh.host_rank")),
    ("--master-addr --dist-init-addr --nccl-init-addr", Key("mesh.leader_address")),
    ("--master-port", Key("mesh.leader_port")),
    ("--headless!", NoEffect("a host with --node-rank above 0 serves no requests")),
    ("--gated-launch-port --use-ray! "
     "--ray-workers-use-nsight! --worker-use-ray! --engine-use-ray!", _NODES),
    ("--dist-timeout --distributed-timeout-seconds --cpu-distributed-timeout-seconds", _COLLECTIVES),
    ("--enable-fault-tolerance! --fault-tolerance-config", NoEffect("a dead engine is always started again")),
    ("--disaggregation-* --decoupled-spec-* --encoder-* --enable-pdmux! --pdmux-config-path --sm-group-num "
     "--enable-pd-role-switch! --optimistic-prefill-attempts --enable-adaptive-dispatch-to-encoder! --language-only!",
     _SPLIT),
    ("--enable-scale-out! --tokens-only!", Refused("leave it out: POST /generate accepts and returns token ids")),

    # HTTP
    ("--host", Key("server.host")),
    ("--port", Key("server.port")),
    ("--api-key", Key("server.api_key", many=True)),
    ("--admin-api-key", Key("server.admin_api_key")),
    ("--ssl-keyfile", Key("server.ssl_keyfile")),
    ("--ssl-certfile", Key("server.ssl_certfile")),
    ("--h11-* --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --ssl-keyfile-password "
     "--enable-http2! --http2-*", _PROXY),
    ("--enable-ssl-refresh!", NoEffect("a replaced certificate is used for new connections anyway")),
    ("--root-path --fastapi-root-path", Refused("let the proxy in front of the server remove the prefix")),
    ("--uds", Refused("write --host 127.0.0.1 and a --port: the server listens on TCP")),
    ("--allowed-origins", Key("server.cors_origins", convert=json_list)),
    ("--allow-credentials! --allowed-methods --allowed-headers", NoEffect("an allowed origin may use all of them")),
    ("--middleware", _PLUGIN),
    ("--shutdown-timeout", Key("server.drain_timeout")),
    ("--watchdog-timeout", Key("server.watchdog_timeout")),
    ("--soft-watchdog-timeout", NoEffect("the stacks are logged before a restart: --server.watchdog-timeout")),
    ("--api-server-count -asc --tokenizer-worker-num", Key("server.workers")),
    ("--detokenizer-worker-num --renderer-num-workers "
     "--enable-http-worker-reuseport! --disable-frontend-multiprocessing! --enable-dynamic-batch-tokenizer! "
     "--dynamic-batch-tokenizer-batch-size --dynamic-batch-tokenizer-batch-timeout --enable-tokenizer-batch-encode! "
     "--disable-tokenizer-batch-decode!", _WORKERS),
    ("--grpc! --grpc-port --grpc-mode! --smg-grpc-mode! --grpc-response-timeout-secs --smg-http-sidecar-port "
     "--grpc-http-sidecar-port --sidecar --sidecar-args", Refused("leave it out: the server speaks HTTP only")),
    ("--disable-fastapi-docs! --enable-offline-docs!", NoEffect("/docs is one page without scripts from elsewhere")),
    ("--sse-keep-alive-interval", NoEffect("a stream begins with its first token", ("0",), "set the proxy's timeout")),
    ("--stream-interval --batch-notify-size --incremental-streaming-output!",
     NoEffect("a stream sends the tokens of each step at once")),
    ("--enable-request-id-headers! --enable-server-load-tracking! --enable-prompt-tokens-details! "
     "--enable-cache-report! --enable-tokenizer-info-endpoint! --enable-metrics!", _ALWAYS),
    ("--enable-force-include-usage! --stream-response-default-include-usage!",
     Refused('send "stream_options": {"include_usage": true} in requests')),
    ("--enable-per-request-metrics! --per-request-spec-decode-metrics",
     NoEffect("/metrics has histograms of requests")),
    ("--return-tokens-as-token-ids! --return-input-ids! --return-output-ids! --enable-return-hidden-states! "
     "--return-hidden-states-mode --enable-return-routed-experts! --return-sampling-mask! --sampling-mask-max-tokens "
     "--enable-streaming-session!", _PER_REQUEST),
    ("--enable-prompt-embeds!", Refused("leave it out: prompts are texts or token ids, and no tensors are accepted")),
    ("--enable-return-aux-hidden-states! --return-aux-hidden-state-layer-ids --aux-output-config",
     Refused("leave it out: requests may ask for the last layer's hidden states")),
    ("--max-logprobs", NoEffect("requests may ask for 20", tuple(map(str, range(21))),
                                "leave it out: requests may ask for at most 20 log-probabilities a token")),
    ("--logprobs-mode", NoEffect("a request names it (sampling_logprobs_mode)", ("raw_logprobs",),
                                 "send sampling_logprobs_mode in requests")),
    ("--fingerprint-mode --fingerprint-value", _NOTHING),
    ("--enable-response-store!", NoEffect("responses are stored unless --store.path is null")),
    ("--tool-server", Refused("leave it out: the server runs no tools, the client does")),
    ("--allow-auto-truncate!", Refused("send truncate_prompt_tokens in requests")),
    ("--file-storage-path", Key("store.path")),

    # chat, tools, reasoning
    ("--enable-auto-tool-choice! --enable-reasoning!", NoEffect("the parser of the chat template is always used")),
    ("--tool-parser-plugin --reasoning-parser-plugin --io-processor-plugin --logits-processors "
     "--logits-processor-pattern --enable-custom-logit-processor! --forward-hooks", _PLUGIN),
    ("--exclude-tools-when-tool-choice-none! --tool-strict-level --reasoning-config --enable-strict-thinking! "
     "--strip-thinking-cache", Refused("send tool_choice, strict and thinking_token_budget in requests")),
    ("--chat-template-content-format", NoEffect("the template shows which form of content it reads")),
    ("--default-chat-template-kwargs --hf-chat-template-name --completion-template --response-role", _TEMPLATE),
    ("--trust-request-chat-template! --trust-request-mm-kwargs!",
     Refused("leave it out: requests have no templates; set one with --chat-template")),
    ("--grammar-backend --structured-outputs-config --guided-decoding-backend --disable-outlines-disk-cache! "
     "--constrained-json-disable-any-whitespace! --constrained-json-max-whitespace-cnt",
     NoEffect("llguidance enforces every grammar")),
    ("--constrained-json-whitespace-pattern", Refused("leave it out: send a regex or a grammar instead of a schema")),
    ("--cohere-is-reasoning-model! --cohere-format --anthropic-disabled-thinking-effort", _NOTHING),
    ("--enable-watermark! --watermark --watermark-config", Refused("write --server.watermark-key N, a secret number")),

    # logs and metrics
    ("--log-level", Key("logging.level", words=_LEVELS, convert=str.lower)),
    ("--log-requests! --enable-log-requests!", Key("logging.requests", const="true")),
    ("--disable-log-requests!", Key("logging.requests", const="false")),
    ("--disable-log-stats!", Key("logging.stats_interval", const="604800")),
    ("--otlp-traces-endpoint", Key("logging.otlp_endpoint")),
    ("--enable-trace! --collect-detailed-traces --trace-modules --otlp-service-name",
     NoEffect("--logging.otlp-endpoint turns traces on")),
    ("--uvicorn-log-level --log-level-http --disable-uvicorn-access-log! --disable-access-log-for-endpoints "
     "--uvicorn-access-log-exclude-prefixes --log-requests-level --log-requests-format --log-requests-target "
     "--max-log-len --enable-log-outputs! --enable-log-deltas! --log-error-stack! --decode-log-interval "
     "--enable-logging-iteration-details! --aggregate-engine-logging! --enable-request-time-stats-logging! "
     "--show-time-cost! --gc-warning-threshold-secs", _LOG),
    ("--log-config-file --logging-config", Refused("write --logging.format json or text, and --logging.level")),
    ("--enable-metrics-for-all-schedulers! --enable-mfu-metrics! --kv-cache-metrics! --kv-cache-metrics-sample "
     "--custom-histogram-buckets --show-hidden-metrics-for-version --extra-metric-labels --bucket-time-to-first-token "
     "--bucket-inter-token-latency --bucket-e2e-request-latency --prompt-tokens-buckets --generation-tokens-buckets "
     "--tokenizer-metrics-custom-labels-header --tokenizer-metrics-allowed-custom-labels "
     "--load-snapshot-publish-interval --enable-forward-pass-metrics! --forward-pass-metrics-worker-id "
     "--forward-pass-metrics-ipc-name --load-publish-endpoint", _METRICS),
    ("--crash-dump-folder --export-metrics-to-file! --export-metrics-to-file-dir --debug-tensor-dump-* "
     "--msprobe-dump-config --kv-canary* --enable-layerwise-nvtx-* --profiler-config --enable-trace-replay! "
     "--spec-trace-dir", _DEBUG),

    # adapters
    ("--max-loras --max-loras-per-batch", Key("lora.slots")),
    ("--max-lora-rank", Key("lora.max_rank")),
    ("--max-cpu-loras", NoEffect("an adapter stays in the memory of the host until it is unloaded")),
    ("--max-loaded-loras", Refused("leave it out: adapters stay in the memory of the host until they are unloaded")),
    ("--enable-lora!", _LORA_SWITCH),
    ("--lora-* --max-lora* --fully-sharded-loras! --default-mm-loras "
     "--specialize-active-lora! --enable-lora-* --enable-mixed-moe-lora-format! --enable-moe-shared-loras! "
     "--enable-tower-connector-lora! --experts-shared-outer-loras --qlora-adapter-name-or-path --uno-lora-path", _LORA),

    # speculation
    ("--speculative-algorithm", Key("speculation.method", words={
        "ngram": "ngram", "standalone": "draft_model", "eagle3": "eagle3", "nextn": "mtp"})),
    ("--speculative-draft-model-path --speculative-draft-model", Key("speculation.draft_model")),
    ("--speculative-draft-model-revision", Key("speculation.draft_revision")),
    ("--num-speculative-tokens --speculative-num-steps", Key("speculation.num_speculative_tokens")),
    ("--speculative-num-draft-tokens",
     Key("speculation.num_speculative_tokens", note="guesses are counted here, without the token before them")),
    ("--speculative-eagle-topk", NoEffect(_CHAIN, ("1",), f"leave it out: {_CHAIN}")),
    ("--speculative-config -sc", Key("speculation.method", words=_MTP, fields={
        "method": "speculation.method",
        "model": "speculation.draft_model",
        "revision": "speculation.draft_revision",
        "num_speculative_tokens": "speculation.num_speculative_tokens",
        "prompt_lookup_min": "speculation.prompt_lookup_min",
        "prompt_lookup_max": "speculation.prompt_lookup_max",
    })),
    ("--speculative-* --spec-* --enable-multi-layer-eagle!", _SPECULATION),

    # images, audio, video
    ("--allowed-media-domains", Key("media.allowed_hosts")),
    ("--enable-multimodal --mm-* --allowed-local-media-path --media-* "
     "--enable-mm-* --interleave-mm-strings! --skip-mm-profiling! --video-* --disable-chunked-mm-input! "
     "--enable-prefix-mm-cache! --enable-broadcast-mm-inputs-process! --trust-mm-content-hashes! "
     "--image-processor-backend --disable-fast-image-processor! --asr-*", _MEDIA),
    ("--language-model-only!", Key("media.max_items", const="0")),
    ("--limit-mm-per-prompt --limit-mm-data-per-request", Key("media.max_items", fields={"image": "media.max_items"})),

    # recurrent states
    ("--mamba-* --enable-mamba-* --max-mamba-cache-size --linear-attn-* --gdn-prefill-backend --kda-* --use-replayssm! "
     "--replayssm-buffer-len --enable-linear-replayssm* --linear-replayssm-cache-len --enable-int8-mamba-checkpoint! "
     "--int8-mamba-ckpt-size", _STATE),

    # llama-server's, without those that have the name of another server's
    ("-m", Key("model.path")),
    ("-hf -hfr --hf-repo",
     Refused("write the hub's name of a checkpoint with safetensors, or download the GGUF file and name it")),
    ("-c --ctx-size", Key("model.max_model_len", words={"0": "null"})),
    ("-np --parallel", Key("scheduler.max_num_seqs")),
    ("-a --alias", Key("model.served_name")),
    ("-b --batch-size", Key("scheduler.max_num_batched_tokens")),
    ("-ctk --cache-type-k", Key("cache.dtype", words={"f16": "float16", "f32": "float32", "bf16": "bfloat16",
                                                      "q8_0": "int8"})),
    ("-ctv --cache-type-v", NoEffect("K and V have one type, which --cache-type-k sets")),
    ("--chat-template-file", Key("model.chat_template")),
    ("-ngl --gpu-layers --n-gpu-layers", NoEffect("all layers are on the device")),
    ("-t --threads -tb --threads-batch", NoEffect("XLA uses all cores of the process; taskset limits them")),
    ("-fa --flash-attn", NoEffect("attention never writes its scores to memory")),
    ("--jinja!", NoEffect("the chat template is always read")),
    ("-cb! --cont-batching! --metrics! --slots! --props! --webui!", _ALWAYS),
    ("--no-warmup!", _WARM),
    ("--mlock! --no-mmap! --no-webui!", _NOTHING),
    ("-md --model-draft -hfd --hf-repo-draft --draft-max --draft-min", _SPECULATION),
    ("-mm --mmproj", Refused("serve a safetensors checkpoint, which has the tower; none is read from GGUF files")),
    ("--lora --lora-scaled", _LORA),
    ("-sm --split-mode -ts --tensor-split", Refused("write --tensor N, the number of devices")),
    ("-ot --override-tensor -cmoe! --cpu-moe! -ncmoe --n-cpu-moe", _OFFLOAD),
]
# fmt: on
