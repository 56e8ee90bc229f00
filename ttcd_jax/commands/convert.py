"""Imports checkpoints of Hugging Face, GGUF files and checkpoints of the reference implementation,
exports to the first and the last.

    ttcd convert import --format=huggingface|gguf|reference PATH RUN_DIR
                 [--tokenizer=byte|none|FILE.json]
    ttcd convert export --format=huggingface|reference RUN_DIR PATH
                 [--step=N] [--dtype=float32|bfloat16|float16] [--memory=MEMORY]

import: PATH is a folder with config.json and weights (.safetensors; .bin and .pt with torch
installed), a weight file next to a config.json, with --format=huggingface also
OWNER/NAME[@REVISION] of the hub, with --format=gguf a file of llama.cpp. A tokenizer in PATH comes
along. docs/checkpoints.md names the families of models, and how a run starts from RUN_DIR.

export: writes such a folder from the newest step of a run whose method the reference, or
transformers with the code that the folder then has, computes. An imported model is exported bit for
bit, except with --dtype. --memory: a folder of `ttcd generate --save_memory`, which is written into
the down projections for good: the export is a plain model.
"""

import contextlib
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from absl import flags

from ttcd_jax import storage, units
from ttcd_jax.commands import cli
from ttcd_jax.data.hub import model_folder
from ttcd_jax.data.tokenizer import TokenizerConfig, build_tokenizer, special_tokens
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import check_unused, whole_folder
from ttcd_jax.tokens import check_tokens

FLAGS = flags.FLAGS
_FORMATS = ["huggingface", "gguf", "reference"]
flags.DEFINE_enum("format", None, _FORMATS, "Format of the checkpoint.", required=True)
flags.DEFINE_string(
    "tokenizer", None, "import: byte, none or a tokenizer.json (default: the one in PATH, if any)."
)
flags.DEFINE_integer("step", None, "export: the checkpoint (default: the newest).")
_DTYPES = ["float32", "bfloat16", "float16"]
flags.DEFINE_enum(
    "dtype", None, _DTYPES, "export: of all tensors (default: as imported, or float32)."
)
flags.DEFINE_string("memory", None, "export: a memory to write into the weights.")

_SEQ_LEN = 2048  # for a model whose configuration has no length


def main(argv: list[str]) -> None:
    _, action, source, destination = argv
    of_export = ("step", "dtype", "memory")
    commands = {"import": (_import, of_export), "export": (_export, ("tokenizer",))}
    if action not in commands:
        raise UserError(f"{action!r} is neither import nor export")
    command, foreign = commands[action]
    if (FLAGS.format, action) == ("gguf", "export"):
        raise UserError("--format=gguf is a format of import: export --format=huggingface")
    for name in foreign:
        if FLAGS[name].present:
            raise UserError(f"--{name} is no option of {action} --format={FLAGS.format}")
    check_unused(path := storage.to_path(destination))
    cli.clean_up_on_sigterm()
    command(source, path)


def _import(name: str, run_dir: Path) -> None:
    from ttcd_jax.interop.gguf_files import open_gguf
    from ttcd_jax.interop.hugging_face import open_hugging_face
    from ttcd_jax.interop.reference_config import open_reference
    from ttcd_jax.run.directory import IMPORT, IMPORTED, TOKENIZER, RunDirectory
    from ttcd_jax.train.checkpoint import StreamedCheckpoints

    is_theirs = FLAGS.format == "huggingface"
    source = model_folder(name) if is_theirs else storage.copy_of(name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = source if source.is_dir() else source.parent
        if FLAGS.format == "gguf":
            folder = Path(scratch)
            params, config, metadata = open_gguf(source, folder)
        else:
            params, config, metadata = (open_hugging_face if is_theirs else open_reference)(source)
        tokenizer = _tokenizer(folder, config.vocab_size)
        length = json.loads(metadata["config_json"]).get("max_position_embeddings")
        is_length = type(length) is int and 2 <= length < 2**31
        data: dict[str, Any] = {"type": IMPORTED, "seq_len": length if is_length else _SEQ_LEN}
        with whole_folder(run_dir) as unfinished:
            if tokenizer is not None:
                if tokenizer.path is not None:
                    shutil.copyfile(storage.copy_of(tokenizer.path), unfinished / TOKENIZER)
                    tokenizer = tokenizer.replace(path=TOKENIZER)
                data["tokenizer"] = tokenizer.to_dict()
            directory = RunDirectory(unfinished)
            with contextlib.closing(StreamedCheckpoints(directory.checkpoints)) as checkpoints:
                checkpoints.save(0, {"params": params})
            directory.write({"model": config.to_dict(), "data": data}, metadata, IMPORT)
    _print_import(metadata)
    print(units.printable(f"run directory {run_dir.absolute()}"))


def _tokenizer(folder: Path, vocab_size: int) -> TokenizerConfig | None:
    """The tokenizer to import, or None. Raises `DataError` if the model lacks one of its special
    tokens; of other tokens, a text that has one is refused."""
    file = folder / "tokenizer.json"
    chosen = FLAGS.tokenizer or (str(file) if file.is_file() else "none")
    if chosen == "none":
        return None
    if chosen == "byte":
        config = TokenizerConfig()
    else:
        ends = special_tokens(Path(chosen).parent)
        config = TokenizerConfig(kind="json", path=chosen, **ends)
    try:
        tokenizer = build_tokenizer(config)
        check_tokens([tokenizer.bos_id, tokenizer.eos_id], vocab_size)
    except DataError as error:
        raise DataError(f"{error}; or pass --tokenizer=none") from error
    if tokenizer.vocab_size > vocab_size:
        print(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}: a text with "
            "one of the others is refused"
        )
    return config


def _print_import(metadata: dict[str, Any]) -> None:
    kinds = ", ".join(sorted({*metadata["dtypes"].values()}))
    print(f"{metadata['model_type']}: {metadata['num_parameters']:,} parameters, {kinds}")
    if types := metadata.get("dequantized"):
        print(f"dequantized: {', '.join(f'{n} tensors of {kind}' for kind, n in types.items())}")
    unused = len(metadata["dropped"]) + (metadata["tied_head"] is not None)
    print(f"{len(metadata['dtypes']) - unused} tensors mapped, {len(metadata['dropped'])} dropped")
    for name in metadata["dropped"]:
        print(f"  dropped: {name}")
    if metadata["tied_head"]:
        print(f"  stored head: {metadata['tied_head']}")
    if metadata["ignored_keys"]:
        print(f"keys of config.json without effect: {', '.join(metadata['ignored_keys'])}")


def _export(run_dir: str, folder: Path) -> None:
    from ttcd_jax.interop.weight_files import write_safetensors
    from ttcd_jax.run.export import exported_run

    options: Any = (FLAGS[name].value for name in ("format", "step", "dtype", "memory"))
    tensors, files, step = exported_run(run_dir, *options)
    with whole_folder(folder) as unfinished:
        write_safetensors(unfinished, tensors)
        for name, content in files.items():
            (unfinished / name).write_bytes(content.encode())
    count = sum(math.prod(tensor.shape) for tensor in tensors.values())
    path = units.printable(str(folder.absolute()))
    print(f"{len(tensors)} tensors, {count:,} numbers of step {step} in {path}")


if __name__ == "__main__":
    cli.run(main, ("import|export", "FROM", "TO"))
