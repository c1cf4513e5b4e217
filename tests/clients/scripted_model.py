"""Make a model whose answers are written down here: python -m tests.clients.scripted_model DIR [--refuse-late-system]

Coding agents send prompts that are longer than the demo model's context and expect answers that it cannot give. This is
a Llama whose next token depends on its last one alone, and whose chat template ends a prompt with the token that begins
an answer. Agents run whole loops with it on a CPU, at the usual routes and with the usual parsers. With --pictures it
is a Qwen3-VL, whose tower makes rows of zeros, and whose template takes pictures.
"""

import argparse
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

from tests.clients.run import DEMO

CONTEXT = 131072
HIDDEN = 64  # one for each token of an answer
CERTAIN = 10.0  # nothing else is drawn at any temperature that clients ask for
END = "<|im_end|>"
# each answer in pieces, each of them one token that stands in no other answer
ANSWERS = {
    "call": (
        '<tool_call>\n{"name": "bash", ',
        '"arguments": {"command": "echo made > made.txt", ',
        '"description": "Make it"}}\n</tool_call>',
    ),
    "Call": (  # the same for Claude Code, whose tool has another name
        '<tool_call>\n{"name": "Bash", ',
        '"arguments": {"command": "echo made > made.txt", "description": ',
        '"Make the file"}}\n</tool_call>',
    ),
    "helper": (  # Claude Code's subagent does it; a description and a prompt are required
        '<tool_call>\n{"name": "Agent", "arguments": {"description": "Make it", ',
        '"subagent_type": "general-purpose", "prompt": ',
        '"Make made.txt"}}\n</tool_call>',
    ),
    "search": (  # Claude Code leaves most tools out until it is asked for them
        '<tool_call>\n{"name": "ToolSearch", "arguments": ',
        '{"query": "select:CronList", "max_results": 5',
        "} }\n</tool_call>",
    ),
    "found": ('<tool_call>\n{"name": "CronList", ', '"arguments": {', "} } \n</tool_call>"),
    "exec": (  # the same for Codex
        '<tool_call>\n{"name": "exec_command", "arguments": ',
        '{"cmd": "echo made > made.txt"',
        "}}\n</tool_call>",
    ),
    "look": (  # Claude Code's way to a picture
        '<tool_call>\n{"name": "Read", ',
        '"arguments": {"file_path": "',
        'picture.png"}}\n</tool_call>',
    ),
    "view": (  # the same for Codex
        '<tool_call>\n{"name": "view_image", "arguments": ',
        '{"path": "picture.png"',
        "} }\n</tool_call>",
    ),
    "told": ("The file ", "made.txt ", "is there."),
    "edit": ("hello.py\n```\n", "print('hello from aider')\n", "```\n"),
}
# Claude Code's loops are told apart by words of the user's
CHOICE = """
{%- if add_generation_prompt -%}
    {%- set called = messages | selectattr('role', 'equalto', 'tool') | list | length -%}
    {%- set names = (tools or []) | map(attribute='function') | map(attribute='name') | list -%}
    {%- set asked = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(' ') -%}
    {%- set calls = 20 if 'in 20 calls' in asked else 1 -%}
    {%- if 'in this picture' in asked -%}{{- '<|told|>' -}}
    {%- elif 'Read' in names and 'at picture.png' in asked and not called -%}{{- '<|look|>' -}}
    {%- elif 'view_image' in names and 'at picture.png' in asked and not called -%}{{- '<|view|>' -}}
    {%- elif 'Agent' in names and 'with a helper' in asked and not called -%}{{- '<|helper|>' -}}
    {%- elif 'ToolSearch' in names and 'with a search' in asked and called < 2 -%}
        {{- '<|found|>' if called else '<|search|>' -}}
    {%- elif 'Bash' in names and called < calls -%}{{- '<|Call|>' -}}
    {%- elif 'exec_command' in names and not called -%}{{- '<|exec|>' -}}
    {%- elif tools and not called -%}{{- '<|call|>' -}}
    {%- elif tools or messages | length == 1 or 'hello.py' not in messages | string -%}{{- '<|told|>' -}}
    {%- else -%}{{- '<|edit|>' -}}
    {%- endif -%}
{%- endif -%}
"""
# what stands for a picture, in place of the demo template's refusal
PICTURE = "'<|fim_prefix|><|fim_middle|><|fim_suffix|>'"
NO_PICTURE = "raise_exception('Only text parts are supported, not ' ~ part.type)"
TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [],
}
# put before the template, it does what the templates of some families do
REFUSAL = """
{%- if messages[1:] | selectattr('role', 'in', ['system', 'developer']) | list -%}
    {{- raise_exception('System message must be at the beginning.') -}}
{%- endif -%}
"""


def make_tokenizer(directory: Path, *, refuses_late_system: bool, pictures: bool) -> Tokenizer:
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(DEMO / name, directory / name)
    template = (DEMO / "chat_template.jinja").read_text() + CHOICE
    assert NO_PICTURE in template
    if pictures:
        template = template.replace(NO_PICTURE, PICTURE)
    (directory / "chat_template.jinja").write_text(REFUSAL + template if refuses_late_system else template)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in ANSWERS])
    pieces = [piece for answer in ANSWERS.values() for piece in answer]
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def successors(tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Each token that has one, and the token after it."""
    words = [[f"<|{name}|>", *answer, END] for name, answer in ANSWERS.items()]
    vocabulary = tokenizer.get_vocab()
    chains = [[vocabulary[word] for word in chain] for chain in words]
    return [pair for chain in chains for pair in pairwise(chain)]


def make_weights(directory: Path, vocab: int, pairs: list[tuple[int, int]], *, pictures: bool) -> None:
    """A layer that adds nothing: the last token's row of the embedding meets the rows of the output."""
    embedding, output = np.zeros((2, vocab, HIDDEN), np.float32)
    for column, (token, following) in enumerate(pairs):
        embedding[token, column], output[following, column] = 1.0, CERTAIN
    layer, square = "model.layers.0", np.zeros((HIDDEN, HIDDEN), np.float32)
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    tensors = {f"{layer}.{name}.weight": square.copy() for name in names}
    norms = [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"]
    tensors |= {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
    tensors |= {"model.embed_tokens.weight": embedding}
    if pictures:
        tensors |= {f"{layer}.self_attn.{name}_norm.weight": np.ones(HIDDEN // 4, np.float32) for name in "qk"}
        tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
        tensors |= {f"model.visual.{name}": np.zeros(shape, np.float32) for name, shape in tower_shapes().items()}
    tensors["lm_head.weight"] = output
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def tower_shapes() -> dict[str, tuple[int, ...]]:
    size, merged = 32, 4 * 32
    layers = {"attn.qkv": (3 * size, size), "attn.proj": (size, size)}
    layers |= {f"mlp.linear_fc{number}": (size, size) for number in (1, 2)}
    shapes: dict[str, tuple[int, ...]] = {f"blocks.0.{name}.weight": shape for name, shape in layers.items()}
    shapes |= {"merger.linear_fc1.weight": (merged, merged), "merger.linear_fc2.weight": (HIDDEN, merged)}
    shapes |= {f"{name}.weight": (size,) for name in ("blocks.0.norm1", "blocks.0.norm2", "merger.norm")}
    shapes["patch_embed.proj.weight"] = (size, 3, 2, 16, 16)
    shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    return shapes | {"pos_embed.weight": (4, size)}


def make(directory: Path, *, refuses_late_system: bool = False, pictures: bool = False) -> None:
    """refuses_late_system: the template raises an error for a system message behind the first message"""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(directory, refuses_late_system=refuses_late_system, pictures=pictures)
    config = json.loads((DEMO / "config.json").read_text()) | {
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": HIDDEN // 4,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
    }
    if pictures:
        rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        config = {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "text_config": config | {"model_type": "qwen3_vl_text", "rope_parameters": rotation},
            "vision_config": TOWER,
            "image_token_id": tokenizer.token_to_id("<|fim_middle|>"),
        }
        sizes = {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
        (directory / "preprocessor_config.json").write_text(json.dumps(sizes))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    make_weights(directory, tokenizer.get_vocab_size(), successors(tokenizer), pictures=pictures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--refuse-late-system", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    arguments = parser.parse_args()
    make(arguments.directory, refuses_late_system=arguments.refuse_late_system, pictures=arguments.pictures)
