"""A run as a checkpoint of another implementation: tensors and small files."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from ttcd_kernels.table import Row, cells

from ttcd_jax.data.sources import row_length
from ttcd_jax.data.tokenizer import build_tokenizer
from ttcd_jax.errors import CheckpointError
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.text_memory import dense, load_memory
from ttcd_jax.interop.checkpoint import CONFIG
from ttcd_jax.interop.hugging_face import MODELING, TRIED, export_hugging_face, is_own, text_files
from ttcd_jax.interop.reference_config import export_reference
from ttcd_jax.measure.results import FILE, read_results
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.run.directory import (
    IMPORTED,
    TOKENIZER,
    RunDirectory,
    imported_texts,
    load_params,
    tokenizer_config,
)
from ttcd_jax.train.state import with_params

_METADATA = ("config_json", "dtypes", "format", "tied_head")  # of an import
_NOTE = (
    "Prompts of different lengths are padded on the left. Refused are what would take tokens back "
    "(assistants, prompt lookup), other classes of cache, and weights of attention."
)


def exported_run(
    run_dir: str | os.PathLike[str],
    form: str,
    step: int | None,
    dtype: str | None,
    memory: str | os.PathLike[str] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, str], int]:
    """(tensors, small files, step) of the newest checkpoint of a run, or of `step`, in the format
    "reference" or "huggingface", which has files of its tokenizer and a model card. A run imported
    from the same format is exported as it was. With the folder of a saved `memory` it is the plain
    model that has it in its weights (`inference.text_memory.dense`)."""
    directory = RunDirectory(run_dir)
    metadata = directory.read_import()
    if metadata is not None and not all(name in metadata for name in _METADATA):
        raise CheckpointError(f"{run_dir}/import.json is damaged: import the checkpoint again")
    metadata = metadata if metadata and metadata["format"] == form else None
    (params, config, step), added = load_params(run_dir, step), {}
    if memory is not None:
        found = load_memory(memory, inference_model(model := with_params(config, params)))
        model, metadata = dense(model, found), None
        params, config = nnx.to_pure_dict(nnx.state(model, nnx.Param)), model.config
        added = {"tokens of texts in the down projections": found.tokens_read}
    if form == "reference":
        tensors, text = export_reference(params, config, metadata, dtype)
        file = directory.path / TOKENIZER
        copied = {TOKENIZER: file.read_bytes().decode()} if file.is_file() else {}
        return tensors, {CONFIG: text} | copied, step
    length = row_length(directory.read_part("data"))
    keys: dict[str, Any] = {"max_position_embeddings": length}
    tensors, text = export_hugging_face(params, config, metadata, dtype, **keys)
    files = {CONFIG: text} | ({MODELING.name: MODELING.read_text()} if is_own(config) else {})
    if (tokenizer := tokenizer_config(directory)) is not None:
        stored = imported_texts(directory)
        files |= text_files(build_tokenizer(tokenizer), stored) | (stored if metadata else {})
        if tokenizer.path is not None:
            files["tokenizer.json"] = Path(tokenizer.path).read_text()
    count = sum(tensor.size for tensor in tensors.values())
    files["README.md"] = _card(directory, config, step, count, added)
    return tensors, files, step


def _card(
    directory: RunDirectory, config: TransformerConfig, step: int, count: int, added: dict[str, int]
) -> str:
    """`added`: entries of a model that is not the run's, whose results are left out."""
    has_code = is_own(config)
    flag = ", trust_remote_code=True" if has_code else ""
    notes = [f"Tried with transformers {', '.join(TRIED)}.", _NOTE, ""] if has_code else []
    entries = _entries(directory, config, step) | added
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: [ttcd_jax, {config.method}]",
        "---",
        "",
        f"# {config.label}, {count:,} parameters",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{flag})',
        f'model = AutoModelForCausalLM.from_pretrained("FOLDER"{flag})',
        "```",
        "",
        *notes,
        *_table([{"": name, "value": x} for name, x in entries.items()]),
    ]
    for path in () if added else sorted(directory.path.glob(f"eval/*/{FILE}")):
        if (result := read_results(path)).step == step:
            lines += ["", f"## {result.task.name}: {result.label}", "", *_table(result.table)]
    return "\n".join(lines) + "\n"


def _entries(directory: RunDirectory, config: TransformerConfig, step: int) -> dict[str, Any]:
    run, settings = directory.read_config(), config.settings
    entries = {
        "layers": config.num_layers,
        "width": config.dim,
        "window": config.window,
        "layers with a memory": ", ".join(map(str, config.fast_layers)) or None,
        "student window": config.student_window if config.fast_layers else None,
        "chunk": getattr(settings, "chunk_size", None),
        "eta": getattr(settings, "eta", None),
    }
    if run["data"]["type"] == IMPORTED:
        return entries | {"imported from": (directory.read_import() or {}).get("path")}
    length = row_length(run["data"])
    schedule = run["optimizer"]["schedule"]
    return entries | {
        "started from": run["start_from"],
        "steps": step,
        "tokens": step * run["batch_size"] * length,
        "tokens in a row": length,
        "optimizer": run["optimizer"]["kind"],
        "peak learning rate": schedule["peak"],
        "seed": run["seed"],
    }


def _table(rows: Sequence[Row]) -> list[str]:
    header, body = cells(rows)
    rule = ["---:" if is_numeric else "---" for _, is_numeric in header]
    lines = [[name for name, _ in header], rule, *body]
    return [f"| {' | '.join(text.replace('|', '/') for text in line)} |" for line in lines]
