"""The text a run is measured on: a text of the user's, or the held-out part of its corpus."""

from typing import Any

from ttcd_jax.errors import UserError


def text_records(run_dir: str, source: dict[str, Any], run: Any, text: str | None) -> list:
    """The documents, as token records: those of `text` (--text), or the validation split of the run
    whose configuration is `source`. Raises `UserError` for a run that has no text or tokenizer."""
    from ttcd_jax.data.corpus import CorpusConfig, load_documents
    from ttcd_jax.data.packing import encode_documents
    from ttcd_jax.data.sources import RecordsConfig, TextConfig, held_out
    from ttcd_jax.run.directory import IMPORTED

    kind = source["data"]["type"]
    if run.tokenizer is None and kind == IMPORTED:
        raise UserError(
            f"{run_dir} was imported without a tokenizer: import it again with "
            "--tokenizer=FILE.json or --tokenizer=byte"
        )
    if run.tokenizer is None:
        raise UserError(
            f"{run_dir} was trained on synthetic data, not on text: measure it by "
            "experiments.evaluate --task=recall"
        )
    if text is not None:
        corpus = CorpusConfig(kind="text", path=text, validation_percent=0)
        return [encode_documents(load_documents(corpus, "train"), run.tokenizer)]
    if kind == IMPORTED:
        raise UserError(f"{run_dir} was imported and has no corpus: pass --text=PATH")
    classes = {cls.__name__: cls for cls in (TextConfig, RecordsConfig)}
    return held_out(classes[kind].from_dict(source["data"]))
