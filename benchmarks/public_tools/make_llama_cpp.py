"""Make tiny K-quant files with llama.cpp, and the logits of transformers' float32 forward pass.

    python make_llama_cpp.py DIR LIBRARY        after make.py, in its environment

LIBRARY: a libllama.so, such as that in llama_cpp/lib of llama-cpp-python, or in the npm package
@node-llama-cpp/linux-x64. It quantizes DIR/F16/model.gguf. `expected.npz` is as make.py describes, of the numbers that
the gguf package decodes.
"""

import ctypes
import shutil
import sys
from collections import Counter
from pathlib import Path

import torch
from gguf import GGUFReader
from make import expect
from transformers import AutoModelForCausalLM

FORMS = {"Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}  # numbers of llama.h's enum llama_ftype


class Parameters(ctypes.Structure):
    """The first two fields of llama_model_quantize_params, and room for the others."""

    _fields_ = (("threads", ctypes.c_int32), ("form", ctypes.c_int32), ("others", ctypes.c_uint8 * 504))


def quantize(library: ctypes.CDLL, source: Path, target: Path, form: str) -> None:
    library.llama_model_quantize_default_params.restype = Parameters
    parameters = library.llama_model_quantize_default_params()
    parameters.form = FORMS[form]
    names = (str(source).encode(), str(target).encode())
    if library.llama_model_quantize(*names, ctypes.byref(parameters)):
        raise RuntimeError(f"llama.cpp did not make {form}")


def main() -> None:
    root, library = Path(sys.argv[1]), ctypes.CDLL(str(Path(sys.argv[2]).absolute()))
    library.llama_backend_init()
    for form in FORMS:
        out = root / form
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        quantize(library, root / "F16" / "model.gguf", out / "model.gguf", form)
        types = Counter(tensor.tensor_type.name for tensor in GGUFReader(out / "model.gguf").tensors)
        expect(AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32), out)
        print(f"{form}: made, {dict(types)}", flush=True)


if __name__ == "__main__":
    main()
