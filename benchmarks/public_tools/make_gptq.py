"""Make tiny GPTQ and AWQ checkpoints with gptqmodel, and the logits of their numbers in float32.

    python make_gptq.py DIR        after make.py, in an environment with gptqmodel

The weights are decoded here, code by code, because transformers does not run these formats on a CPU. `expected.npz` is
as make.py describes.
"""

import importlib
import shutil
import sys
from pathlib import Path

import torch
from make import expect
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 512
FORMS = {
    "GPTQ_ACTORDER": {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "AWQ": {"bits": 4, "group_size": 32, "desc_act": False, "quant_method": "awq", "format": "gemm"},
}
PLACES = {"GPTQ_ACTORDER": range(8), "AWQ": (0, 4, 1, 5, 2, 6, 3, 7)}  # of eight codes in an int32


def quantize(plain: Path, out: Path, form: str) -> None:
    """Quantize by gptqmodel, with random tokens to calibrate."""
    package = importlib.import_module("gptqmodel")
    torch.manual_seed(1)
    rows = [{"input_ids": torch.randint(3, VOCAB, (128,)).tolist(), "attention_mask": [1] * 128} for _ in range(16)]
    model = package.GPTQModel.load(str(plain), package.QuantizeConfig(**FORMS[form]), device="cpu")
    model.quantize(rows, batch_size=1)
    model.save(str(out))


def unpacked(words: torch.Tensor, places: tuple[int, ...] | range) -> torch.Tensor:
    """Return the codes of int32 [N, W] -> [N, 8 W]."""
    return torch.stack([words >> 4 * place & 15 for place in places], dim=2).reshape(len(words), -1)


def decoded(out: Path, form: str) -> dict[str, torch.Tensor]:
    """Return all weights of a checkpoint in float32."""
    tensors, places = load_file(out / "model.safetensors"), PLACES[form]
    found = {name: value.float() for name, value in tensors.items() if name.endswith((".weight", ".bias"))}
    for name in (name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")):
        words, zeros, scales = (tensors[f"{name}{kind}"] for kind in ("qweight", "qzeros", "scales"))
        zeros = unpacked(zeros, places)
        if form == "AWQ":
            codes, group = unpacked(words, places), torch.arange(len(words)) // FORMS[form]["group_size"]
        else:
            codes, group, zeros = unpacked(words.T.contiguous(), places).T, tensors[f"{name}g_idx"].long(), zeros + 1
        found[f"{name}weight"] = ((codes - zeros[group]).float() * scales.float()[group]).T.contiguous()
    return found


def main() -> None:
    root, form_names = Path(sys.argv[1]), sys.argv[2:] or list(FORMS)
    plain = root / "plain with a tokenizer"
    shutil.copytree(root / "plain", plain, dirs_exist_ok=True)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(plain)
    for form in form_names:
        out = root / form
        if not (out / "model.safetensors").is_file():
            quantize(plain, out, form)
        model = LlamaForCausalLM.from_pretrained(root / "plain", dtype=torch.float32)
        model.load_state_dict(decoded(out, form), strict=True)
        expect(model, out)
        print(f"{form}: made", flush=True)


if __name__ == "__main__":
    main()
