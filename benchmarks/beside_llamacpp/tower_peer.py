"""llama.cpp's side of `tower`: make GGUF files of a tower of Qwen3-VL, and encode a picture for each line of stdin.

    python tower_peer.py make TOWER.npz CONFIG.json GGUF_DIR FORM ...
    python tower_peer.py run GGUF_DIR FORM PICTURE.npy THREADS ROWS.npy

It runs in an environment of its own, with `xllamacpp`, whose extension has the C interface of mtmd, and `gguf`. `run`
prints the seconds and the CPU seconds of each encode. ROWS.npy gets what the first one makes, float32
[tokens, parts * D].
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCAB = [f"<0x{i:02X}>" for i in range(256)] + ["<|vision_start|>", "<|vision_end|>", "<s>"]
BLOCK = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
TOP = {
    "visual.patch_embed.proj.bias": "v.patch_embd.bias",
    "visual.pos_embed.weight": "v.position_embd.weight",
    "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
}


def name_of(name: str, deepstack: list[int]) -> str:
    """Return llama.cpp's name of a tensor of the tower."""
    stem, _, kind = name.rpartition(".")
    if name in TOP:
        return TOP[name]
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, place, number, rest = stem.split(".", 3)
    if place == "blocks":
        return f"v.blk.{number}.{BLOCK[rest]}.{kind}"
    return f"v.deepstack.{deepstack[int(number)]}.{rest.removeprefix('linear_')}.{kind}"


def make(weights: Path, config: dict[str, Any], out: Path, forms: list[str]) -> None:
    """Write mmproj-FORM.gguf for each form (F32, F16, BF16 or Q8_0), and text.gguf, a language model to go with it."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = dict(np.load(weights))
    for form in forms:
        kind = gguf.GGMLQuantizationType[form]
        writer = gguf.GGUFWriter(out / f"mmproj-{form}.gguf", "clip")
        writer.add_clip_has_vision_encoder(True)
        writer.add_clip_projector_type("qwen3vl_merger")
        writer.add_vision_image_size(config["table"] * config["patch_size"])
        writer.add_vision_patch_size(config["patch_size"])
        writer.add_vision_embedding_length(config["hidden_size"])
        writer.add_vision_feed_forward_length(config["intermediate_size"])
        writer.add_vision_block_count(config["depth"])
        writer.add_vision_head_count(config["num_heads"])
        writer.add_vision_attention_layernorm_eps(config["norm_eps"])
        writer.add_vision_projection_dim(config["out_size"])
        writer.add_vision_spatial_merge_size(config["merge"])
        writer.add_vision_use_gelu(True)
        writer.add_vision_image_mean(config["mean"])
        writer.add_vision_image_std(config["std"])
        writer.add_vision_is_deepstack_layers([block in config["deepstack"] for block in range(config["depth"])])
        for name, values in tensors.items():
            if name == "visual.patch_embed.proj.weight":  # a kernel for each of the two frames
                for frame, target in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
                    writer.add_tensor(target, np.ascontiguousarray(values[:, :, frame]))
            elif values.ndim == 2 and form != "F32" and "pos_embed" not in name:
                target = name_of(name, config["deepstack"])
                writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name_of(name, config["deepstack"]), values)
        finish(writer)
    make_text(out / "text.gguf", config["out_size"], len(config["deepstack"]))


def make_text(path: Path, size: int, num_deepstack: int) -> None:
    """Write a language model, because mtmd is not opened without one. No encode runs it."""
    ffn, layers = 64, max(1, num_deepstack)
    writer = gguf.GGUFWriter(path, "qwen3vl")
    writer.add_context_length(4096)
    writer.add_embedding_length(size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_sections([8, 12, 12, 0])
    writer.add_num_deepstack_layers(num_deepstack)
    writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(VOCAB)
    writer.add_token_scores([0.0] * len(VOCAB))
    writer.add_token_types([6] * 256 + [3] * (len(VOCAB) - 256))
    writer.add_bos_token_id(len(VOCAB) - 1)
    writer.add_eos_token_id(len(VOCAB) - 1)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(VOCAB), size), "output_norm": (size,)}
    for layer in range(layers):
        own = {"attn_norm": (size,), "ffn_norm": (size,), "attn_q_norm": (64,), "attn_k_norm": (64,)}
        own |= {"attn_q": (64, size), "attn_k": (64, size), "attn_v": (64, size), "attn_output": (size, 64)}
        own |= {"ffn_gate": (ffn, size), "ffn_up": (ffn, size), "ffn_down": (size, ffn)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Params(ctypes.Structure):
    """Parameters of which only the defaults are used, with room for those of any version."""

    _fields_ = (("bytes", ctypes.c_ubyte * 1024),)


class TowerParams(ctypes.Structure):
    """The beginning of mtmd_context_params, and room for the rest. What follows an argument by value is not read."""

    _fields_ = (
        ("use_gpu", ctypes.c_bool),
        ("device", ctypes.c_void_p),
        ("print_timings", ctypes.c_bool),
        ("n_threads", ctypes.c_int),
        ("image_marker", ctypes.c_char_p),
        ("media_marker", ctypes.c_char_p),
        ("flash_attn_type", ctypes.c_int),
        ("warmup", ctypes.c_bool),
        ("rest", ctypes.c_ubyte * 960),
    )


class Text(ctypes.Structure):
    """mtmd_input_text."""

    _fields_ = (
        ("text", ctypes.c_char_p),
        ("text_len", ctypes.c_size_t),
        ("add_special", ctypes.c_bool),
        ("parse_special", ctypes.c_bool),
    )


def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """Return a C function with its types."""
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


def run(directory: Path, form: str, picture: np.ndarray, threads: int, rows: Path) -> None:
    """Encode the picture, uint8 [height, width, 3], once for each line of stdin."""
    from xllamacpp import xllamacpp  # noqa: PLC0415  `make` does without

    pointer, library = ctypes.c_void_p, ctypes.CDLL(xllamacpp.__file__)
    log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)
    silent = log(lambda level, text, _: sys.stderr.write(text.decode()) if level == 4 else None)
    for setter in ("llama_log_set", "mtmd_log_set", "mtmd_helper_log_set"):
        function(library, setter, None, log, pointer)(silent, None)
    function(library, "llama_backend_init", None)()
    defaults = function(library, "llama_model_default_params", Params)()
    load = function(library, "llama_model_load_from_file", pointer, ctypes.c_char_p, Params)
    model = load(str(directory / "text.gguf").encode(), defaults)
    assert model, "llama.cpp does not load the language model"
    params = function(library, "mtmd_context_params_default", TowerParams)()
    marker = function(library, "mtmd_default_marker", ctypes.c_char_p)()
    assert params.media_marker == marker and params.warmup, "this version of mtmd has other parameters"
    params.use_gpu, params.n_threads, params.warmup, params.print_timings = False, threads, False, False
    start = function(library, "mtmd_init_from_file", pointer, ctypes.c_char_p, pointer, TowerParams)
    tower = start(str(directory / f"mmproj-{form}.gguf").encode(), model, params)
    assert tower, "llama.cpp does not load the tower"
    height, width, _ = picture.shape
    sides = ctypes.c_uint32, ctypes.c_uint32
    pixels = function(library, "mtmd_bitmap_init", pointer, *sides, ctypes.c_char_p)(width, height, picture.tobytes())
    chunks = function(library, "mtmd_input_chunks_init", pointer)()
    tokenize = function(
        library, "mtmd_tokenize", ctypes.c_int, pointer, pointer, ctypes.POINTER(Text), pointer, ctypes.c_size_t
    )
    text, bitmaps = Text(marker, len(marker), False, True), (pointer * 1)(pixels)
    assert tokenize(tower, chunks, ctypes.byref(text), bitmaps, 1) == 0, "the picture was not taken"
    chunk_of = function(library, "mtmd_input_chunks_get", pointer, pointer, ctypes.c_size_t)
    type_of = function(library, "mtmd_input_chunk_get_type", ctypes.c_int, pointer)
    count = function(library, "mtmd_input_chunks_size", ctypes.c_size_t, pointer)(chunks)
    (chunk,) = [each for each in (chunk_of(chunks, i) for i in range(count)) if type_of(each) == 1]
    num_tokens = function(library, "mtmd_input_chunk_get_n_tokens", ctypes.c_size_t, pointer)(chunk)
    encode = function(library, "mtmd_encode_chunk", ctypes.c_int, pointer, pointer)
    output = function(library, "mtmd_get_output_embd", ctypes.POINTER(ctypes.c_float), pointer)
    row_size = function(library, "llama_model_n_embd_inp", ctypes.c_int, pointer)(model)
    for number, _ in enumerate(sys.stdin):
        began, spent = time.perf_counter(), time.process_time()
        assert encode(tower, chunk) == 0
        print(time.perf_counter() - began, time.process_time() - spent, flush=True)
        if number == 0:
            np.save(rows, np.ctypeslib.as_array(output(tower), (num_tokens, row_size)))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()), Path(sys.argv[4]), sys.argv[5:])
    else:
        run(Path(sys.argv[2]), sys.argv[3], np.load(sys.argv[4]), int(sys.argv[5]), Path(sys.argv[6]))
