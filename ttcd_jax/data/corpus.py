"""Documents to train on: the Python standard library's own source, or text files of the user."""

import dataclasses
import hashlib
import pathlib
import sysconfig
from typing import Any, Literal, NamedTuple

from ttcd_jax.config import Config
from ttcd_jax.errors import DataError, UserError

Split = Literal["train", "validation"]

# Installed packages and test suites differ between installations of one Python release.
LEFT_OUT_OF_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class Document(NamedTuple):
    """One text with the name it is known by: its path relative to the corpus."""

    name: str
    text: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig(Config):
    """Which documents, and which of them are held out.

    `path` (kind "text") is a file, whose last `validation_percent` are held out, or a folder. The
    `train/` and `validation/` inside a folder are its splits; without them a document is held out
    by the hash of its name. `max_bytes` keeps a sample of whole training documents.
    """

    kind: Literal["stdlib", "text"] = "stdlib"
    path: str | None = None
    glob: str = "**/*.txt"
    validation_percent: int = 5
    max_bytes: int | None = None

    def validate(self) -> None:
        if (self.kind == "text") != (self.path is not None):
            raise UserError(
                f"CorpusConfig kind={self.kind!r} with path={self.path!r}; "
                "kind 'text' takes the path of a file or a folder, kind 'stdlib' takes none"
            )
        if not self.glob or self.glob.startswith("/"):
            raise UserError(
                f"CorpusConfig.glob is {self.glob!r}; give a pattern below path, such as **/*.txt"
            )
        if not 0 <= self.validation_percent < 100:
            raise UserError(
                f"CorpusConfig.validation_percent is {self.validation_percent}; give 0 to 99"
            )
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise UserError(f"CorpusConfig.max_bytes is {self.max_bytes}; give 1 or more, or None")


def load_documents(config: CorpusConfig, split: Split) -> list[Document]:
    """The non-empty documents of one split, sorted by name.

    Raises `DataError` when the path is missing, nothing matches, or every document is empty.
    """
    if config.path is None:
        documents = _held_out_by_name(_stdlib_documents(), config, split)
        where = sysconfig.get_paths()["stdlib"]
    else:
        documents = _text_documents(pathlib.Path(config.path), config, split)
        where = config.path
    documents = [document for document in documents if document.text]
    if not documents:
        raise DataError(
            f"the {split} split of {where} is empty (validation_percent="
            f"{config.validation_percent}); add text, or give a folder with train/ and validation/"
        )
    if split == "train" and config.max_bytes is not None:
        return _sample(documents, config.max_bytes)
    return documents


def fingerprint(documents: list[Document]) -> str:
    """sha256 over the names and contents of `documents`, in their order."""
    digest = hashlib.sha256()
    for name, text in documents:
        for part in (name.encode(), text):
            digest.update(len(part).to_bytes(8))  # so that no two lists run into the same bytes
            digest.update(part)
    return digest.hexdigest()


def manifest(config: CorpusConfig, documents: list[Document]) -> dict[str, Any]:
    """What a run directory records of its documents, ready for JSON."""
    return {
        "kind": config.kind,
        "num_documents": len(documents),
        "num_bytes": sum(len(document.text) for document in documents),
        "sha256": fingerprint(documents),
    }


def _stdlib_documents() -> list[Document]:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return [d for d in _read_folder(root, "**/*.py", LEFT_OUT_OF_STDLIB) if _is_utf8(d.text)]


def _text_documents(path: pathlib.Path, config: CorpusConfig, split: Split) -> list[Document]:
    if path.is_file():
        return [_part_of_file(path, config.validation_percent, split)]
    if not path.is_dir():
        raise DataError(f"no file or folder at {path}; set CorpusConfig.path")
    has_splits = (path / "train").is_dir() and (path / "validation").is_dir()
    folder = path / split if has_splits else path
    documents = _read_folder(folder, config.glob)
    if not documents:
        raise DataError(f"no file under {folder} matches {config.glob!r}; set CorpusConfig.glob")
    return documents if has_splits else _held_out_by_name(documents, config, split)


def _read_folder(
    folder: pathlib.Path, glob: str, left_out: frozenset[str] = frozenset()
) -> list[Document]:
    names = {
        path.relative_to(folder).as_posix(): path
        for path in folder.glob(glob)
        if path.is_file() and left_out.isdisjoint(path.relative_to(folder).parts)
    }
    return [Document(name, names[name].read_bytes()) for name in sorted(names)]


def _part_of_file(path: pathlib.Path, validation_percent: int, split: Split) -> Document:
    text = path.read_bytes()
    # A cut after a line keeps characters of several bytes whole.
    cut = text.rfind(b"\n", 0, len(text) * (100 - validation_percent) // 100) + 1
    return Document(path.name, text[:cut] if split == "train" else text[cut:])


def _held_out_by_name(
    documents: list[Document], config: CorpusConfig, split: Split
) -> list[Document]:
    return [
        document
        for document in documents
        if (_hash(document) % 100 < config.validation_percent) == (split == "validation")
    ]


def _hash(document: Document) -> int:
    return int.from_bytes(hashlib.sha256(document.name.encode()).digest())


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _sample(documents: list[Document], max_bytes: int) -> list[Document]:
    # In the order of the hashes, so that a small sample is not one corner of the corpus.
    kept: set[str] = set()
    total = 0
    for document in sorted(documents, key=_hash):
        if total + len(document.text) <= max_bytes:
            kept.add(document.name)
            total += len(document.text)
    if not kept:
        smallest = min(len(document.text) for document in documents)
        raise DataError(
            f"max_bytes {max_bytes} is less than the smallest training document "
            f"({smallest} bytes); raise CorpusConfig.max_bytes"
        )
    return [document for document in documents if document.name in kept]
