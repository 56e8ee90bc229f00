"""The tokens that begin and end texts, as the files next to a `tokenizer.json` name them."""

from pathlib import Path
from typing import Any

from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.files import read_json

# What a checkpoint of transformers says about texts besides its tokenizer.
_TOKENIZER, _GENERATION = "tokenizer_config.json", "generation_config.json"
TEXT_FILES = (_TOKENIZER, _GENERATION, "special_tokens_map.json", "chat_template.jinja")


def tokenizer_of(file: Path) -> TokenizerConfig:
    """The tokenizer of a `tokenizer.json` with the special tokens of its folder."""
    return TokenizerConfig(kind="json", path=str(file), **special_tokens(file.parent))


def special_tokens(folder: Path) -> dict[str, Any]:
    """Fields of `TokenizerConfig`: `bos_id`, `eos_id` and `stop_ids`, {} where nothing is said.

    The tokens that `tokenizer_config.json` names come first, then the ids of
    `generation_config.json` and of `config.json`; a model without bos, as Qwen3, separates
    documents by eos.
    """
    tokenizer = _optional(folder / "tokenizer.json")
    added = tokenizer.get("added_tokens")
    tokens = [x for x in added if isinstance(x, dict)] if isinstance(added, list) else []
    ids = {str(token.get("content")): token.get("id") for token in tokens}
    names = _optional(folder / _TOKENIZER)
    others = [_optional(folder / name) for name in (_GENERATION, "config.json")]
    found: dict[str, list[int]] = {}
    for role in ("bos", "eos"):
        named = names.get(f"{role}_token")
        named = named.get("content") if isinstance(named, dict) else named
        values = [ids.get(named)] if isinstance(named, str) else []
        for source in others:
            value = source.get(f"{role}_token_id")
            values += value if isinstance(value, list) else [value]
        found[role] = [x for x in values if type(x) is int and x >= 0]
    if not found["eos"]:
        return {}
    eos = tuple(dict.fromkeys(found["eos"]))
    return {"bos_id": (found["bos"] or eos)[0], "eos_id": eos[0], "stop_ids": eos[1:]}


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
