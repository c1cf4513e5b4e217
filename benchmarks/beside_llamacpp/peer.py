"""llama.cpp's side: make GGUF files of a Llama, and run closed batches. It runs in an environment of its own.

    python peer.py make MODEL_DIR GGUF_DIR FORM ...
    python peer.py run GGUF_FILE ROWS PROMPT_TOKENS OUTPUT_TOKENS ROUNDS

`run` prints, for each round, the seconds of all prompts and of all decode steps as JSON lines. It calls the C
interface: the Python class serves one sequence at a time.
"""

import ctypes
import json
import os
import random
import sys
import time
from pathlib import Path

import gguf
import llama_cpp as llama
from safetensors import numpy as safetensors


def make(model: Path, out: Path, forms: list[str]) -> None:
    """Write model-FORM.gguf for each form: F32, BF16, Q8_0 or Q4_0.

    Heads of q and k are interleaved, as llama.cpp's rotary embedding wants.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    weights = {}
    for file in sorted(model.glob("*.safetensors")):
        weights |= safetensors.load_file(file)
    heads, kv_heads, vocab = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for form in forms:
        kind = gguf.GGMLQuantizationType[form]
        writer = gguf.GGUFWriter(out / f"model-{form}.gguf", "llama")
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_dimension_count(config["hidden_size"] // heads)
        writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
        writer.add_vocab_size(vocab)
        writer.add_tokenizer_model("llama")  # never used: prompts are token ids
        writer.add_token_list([f"<0x{i:02X}>" if i < 256 else f"t{i}" for i in range(vocab)])
        writer.add_token_scores([0.0] * vocab)
        writer.add_token_types([6 if i < 256 else 1 for i in range(vocab)])
        for name, values in weights.items():
            values = values.astype("float32")
            target = top.get(name)
            if target is None:
                layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
                target = f"blk.{layer}.{names[part]}.weight"
                if part.endswith(("q_proj", "k_proj")):
                    count = heads if "q_proj" in part else kv_heads
                    halves = values.reshape(count, 2, -1, values.shape[1])
                    values = halves.swapaxes(1, 2).reshape(values.shape)
            if values.ndim == 2 and form != "F32":
                writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(target, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def run(file: str, rows: int, prompt_tokens: int, output_tokens: int, rounds: int) -> None:
    """Compute `rows` prompts one after the other, then decode them together."""
    silent = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_seq_max, params.n_ctx = rows, rows * (prompt_tokens + output_tokens)
    params.n_batch = max(params.n_batch, prompt_tokens)  # a prompt is one batch, computed n_ubatch tokens at a time
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    context = llama.llama_init_from_model(model, params)

    def decode(tokens: list[tuple[int, int, int, bool]]) -> None:
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert llama.llama_decode(context, batch) == 0
        llama.llama_batch_free(batch)

    vocab = 8000
    for _ in range(rounds):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        began = time.perf_counter()
        for row in range(rows):
            last = prompt_tokens - 1
            decode([(random.randrange(300, vocab), i, row, i == last) for i in range(prompt_tokens)])
        prompts = time.perf_counter()
        for step in range(output_tokens - 1):
            decode([(random.randrange(300, vocab), prompt_tokens + step, row, True) for row in range(rows)])
        print(json.dumps([prompts - began, time.perf_counter() - prompts]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        run(sys.argv[2], *(int(word) for word in sys.argv[3:]))
