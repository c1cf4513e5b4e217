"""Make tiny quantized checkpoints with llm-compressor and gguf, and the logits of transformers' float32 forward pass.

    python make.py DIR        in an environment of its own with llmcompressor and gguf

Each form gets a directory with the checkpoint and `expected.npz`: `tokens` int32 [T], of which the first `prompt` are
given and the others are what greedy decoding chose, and `logits` float32 [T, V]. Weights are those that the format
holds, as transformers dequantizes them. Activations are not rounded.
"""

import importlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

PROMPT, OUTPUT = 24, 16
SCHEMES = ("W8A16", "W8A8", "W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16")
GGUF = ("F16", "Q8_0", "Q4_0")


def plain_model(directory: Path) -> None:
    """Write a tiny Llama with random weights in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=256, head_dim=64, tie_word_embeddings=False, initializer_range=0.08,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def expect(model: torch.nn.Module, directory: Path) -> None:
    """Decode greedily with a model in float32, and write the tokens and their logits."""
    model = model.eval()
    for module in model.modules():
        module.quantization_enabled = False  # llm-compressor's layers: the weights are dequantized, activations stay
    tokens = torch.arange(PROMPT)[None] * 37 % 512
    with torch.no_grad():
        for _ in range(OUTPUT):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        logits = model(tokens).logits[0]
    np.savez(directory / "expected.npz", tokens=tokens[0].int().numpy(), logits=logits.numpy(), prompt=PROMPT)


def compressed(plain: Path, out: Path, scheme: str) -> None:
    """Quantize with llm-compressor by rounding to the nearest number."""
    modifiers = importlib.import_module("llmcompressor.modifiers.quantization")
    oneshot = importlib.import_module("llmcompressor").oneshot
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    oneshot(model=model, recipe=modifiers.QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
    model.save_pretrained(out, save_compressed=True)
    wide = CompressedTensorsConfig(run_compressed=False)
    expect(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=wide), out)


def gguf_file(plain: Path, out: Path, form: str) -> None:
    """Write a GGUF file with the gguf package, and read it with transformers."""
    gguf = importlib.import_module("gguf")
    out.mkdir()
    config = json.loads((plain / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out / "model.gguf", "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{i:02X}>" if i < 256 else f"t{i}" for i in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([6 if i < 256 else 1 for i in range(config["vocab_size"])])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    kind = gguf.GGMLQuantizationType[form]
    for name, tensor in AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict().items():
        values = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighbours, not halves
            count = heads if "q_proj" in name else kv_heads
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        target = names.get_name(name, try_suffixes=(".weight",))
        if values.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expect(AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32), out)


def main() -> None:
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    plain = root / "plain"
    plain_model(plain)
    for names, make, package in ((GGUF, gguf_file, "gguf"), (SCHEMES, compressed, "llmcompressor")):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: {', '.join(names)} are skipped", flush=True)
            continue
        for name in names:
            out = root / name
            shutil.rmtree(out, ignore_errors=True)
            try:
                make(plain, out, name)
                print(f"{name}: made", flush=True)
            except Exception as error:  # a tool's own limits: the next form is made all the same
                shutil.rmtree(out, ignore_errors=True)
                print(f"{name}: not made: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
