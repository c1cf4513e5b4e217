"""Make a tiny gpt-oss checkpoint whose experts compressed-tensors quantized to MXFP4, and transformers' logits.

    python make_mxfp4.py DIR        in the environment of make.py

The tool's codes and scales are put here under the names and in the shapes of gpt-oss's published checkpoints, because
its own files have others. `expected.npz` is as make.py describes, of the numbers that the tool decodes.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from make import expect
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM

GROUP = 32  # numbers that share a scale
SCHEME = preset_name_to_scheme("MXFP4A16", ["Linear"])


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks [N, K / 32, 16], scales [N, K / 32] and the numbers [N, K] of a weight [N, K]."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME.weights)
    packed = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, SCHEME)
    wide = MXFP4PackedCompressor.decompress(dict(packed), SCHEME)["weight"]
    return packed["weight_packed"].unflatten(1, (-1, GROUP // 2)), packed["weight_scale"], wide.float()


def main() -> None:
    out = Path(sys.argv[1]) / "MXFP4"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=512, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=4096, initializer_range=0.2,
    )  # fmt: skip
    model = GptOssForCausalLM(config).float()
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        made = [quantized(expert.T.contiguous()) for expert in tensors.pop(name)]  # transformers has them as [K, N]
        blocks, scales, wide = (torch.stack(each) for each in zip(*made, strict=True))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
        model.get_parameter(name).data.copy_(wide.transpose(1, 2))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    wide_modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    form = {"quant_method": "mxfp4", "modules_to_not_convert": wide_modules}
    others = {"architectures": ["GptOssForCausalLM"], "quantization_config": form, "dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config.to_dict() | others))
    expect(model, out)
    print("MXFP4: made", flush=True)


if __name__ == "__main__":
    main()
