"""Training documents: the source of the Python standard library, or the user's files."""

import functools
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NoReturn, Self

from absl import logging

from ttcd_jax import units
from ttcd_jax.config import Bound, Config, NonNegative
from ttcd_jax.data.documents import Document, LeftOut, holds_many, read_documents, with_companions
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import reach_of_links

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

MAX_TEXT_BYTES = 2**30  # of one split in memory

# Installed packages and test suites differ between installations of one Python release.
LEFT_OUT_OF_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

MEASURED = "3.12.1"  # the Python whose library the tables of README are of
_NAMED_SPLIT = re.compile(r"(?i)(?:^|[/._-])(?:(train)|val|valid|validation|dev|test)[/._-]")
_OF_A_RECIPE = """(in a recipe --param="TEXT='PATH'" or "BOOKS='PATH'")"""
_CLAIM = {"lock", "environment.json", "data.json", "config.gin"}  # of a run that starts
_BELOW = Bound(
    "a pattern below path, such as **/*.txt",
    lambda glob: (
        (PurePath(glob).name != "" and glob[0] != "/")
        and all(x != ".." and ("**" not in x or x == "**") for x in glob.split("/"))
    ),
)


class CorpusConfig(Config):
    """The documents, and which of them are held out for validation.

    `kind`: the source of Python's standard library, or the text at `path`. It is a plain file, a
    file of many documents with their text in `field`, or a folder of the files that match `glob`,
    without run directories and hidden files. Of a plain file the last `validation_percent` percent
    are held out. The folders `train/` and `validation/` are the splits of a folder; without them
    the last `validation_files`, by name, are held out. If that is 0, and in a file of many, a hash
    of the documents' names chooses.
    """

    kind: Literal["stdlib", "text"] = "stdlib"
    path: str | None = None
    glob: Annotated[str, _BELOW] = "**/*.txt"
    field: str = "text"
    validation_percent: Annotated[int, Bound("between 0 and 99", lambda p: 0 <= p < 100)] = 5
    validation_files: NonNegative = 0

    def validate(self) -> None:
        if (self.kind == "text") != (self.path is not None):
            raise UserError(
                f"CorpusConfig kind={self.kind!r} with path={self.path!r}; "
                "kind 'text' takes the path of a file or a folder, kind 'stdlib' takes none"
            )
        for name in ("validation_files", "glob", "field"):
            if self.path is None and self.binds(name):
                raise UserError(
                    f"CorpusConfig.{name} {getattr(self, name)!r} is for files of yours: set kind "
                    "'text' and path"
                )

    def binds(self, name: str) -> bool:
        return getattr(self, name) != getattr(CorpusConfig, name)


class Census:
    """The number, total bytes and digest of the documents added so far."""

    def __init__(self, documents: Iterable[Document] = ()) -> None:
        self._counts, self._digest = {"num_documents": 0, "num_bytes": 0}, hashlib.sha256()
        for document in documents:
            self.add(document)

    def add(self, document: Document) -> None:
        self._counts["num_documents"] += 1
        self._counts["num_bytes"] += len(document.content)
        for part in (_name_bytes(document), document.content):
            self._digest.update(len(part).to_bytes(8))  # so that no two lists have one digest
            self._digest.update(part)

    def summary(self) -> dict[str, Any]:
        return self._counts | {"sha256": self._digest.hexdigest()}


def manifest(config: CorpusConfig, documents: Iterable[Document]) -> dict[str, Any]:
    """The manifest of the documents for a run directory, ready for JSON."""
    python = {} if config.path else {"python": platform.python_version()}
    return {"kind": config.kind} | python | Census(documents).summary()


def library(manifest: dict[str, Any]) -> str:
    """What a run says of the standard library that it reads; nothing of another text."""
    if (version := manifest.get("python")) is None:
        return ""
    other = "" if version == MEASURED else f", not {MEASURED} as in the tables"
    return f"text: {manifest['num_documents']} modules of Python {version}{other}"


def _name_bytes(document: Document) -> bytes:
    return document.name.encode(errors="surrogateescape")  # a file's name may be any bytes


def stream_documents(
    config: CorpusConfig, splits: tuple[Split, ...] = SPLITS, left_out: LeftOut | None = None
) -> Iterator[tuple[Split, Document]]:
    """The non-empty documents, each with its split, file by file in the order of names. In a folder
    with splits, only `splits` are read. A few lines without a document are counted in `left_out`,
    with a warning. Raises `DataError` when the path is missing, nothing matches, a file cannot be
    read, or too many lines are left out."""
    files, left_out = _input_files(config, splits), left_out or LeftOut()
    if config.binds("field") and not any(holds_many(path) for _, _, path in files):
        raise DataError(
            f"field {config.field!r} is for files of many documents, and {config.path} has plain "
            "text alone: leave it out"
        )
    parts: Iterator[tuple[Split, Document]]
    for split, name, path in files:
        documents = read_documents(path, name, config.field, left_out)
        if path == Path(config.path or "") and not holds_many(path):
            parts = _parts_of_file(config, documents)
        else:
            parts = ((split or _drawn_split(config, x), x) for x in documents)
        for part, document in parts:
            text = b"" if config.path else document.text
            if document.content and text.decode(errors="ignore").encode() == text:
                yield part, document
    left_out.check()
    if left_out.num_lines:
        logging.warning("%s", left_out)


def load_documents(config: CorpusConfig, split: Split) -> list[Document]:
    """The documents of one split. Raises the errors of `stream_documents`, `DataError` without a
    document, and `UserError` for more than `MAX_TEXT_BYTES`."""
    documents, num_bytes = [], 0
    for found, document in stream_documents(config, (split,)):
        if found == split:
            documents.append(document)
            num_bytes += len(document.content)
        if num_bytes > MAX_TEXT_BYTES:
            raise UserError(
                f"{config.path} has {units.size(num_bytes)} of text and more, text in memory may "
                f"have {units.size(MAX_TEXT_BYTES)}: make token records of it (ttcd "
                f"prepare --input={config.path} --tokenizer=tokenizer.json "
                "--output=DIR) and name them (RecordsConfig.paths)"
            )
    if not documents:
        raise EmptySplitError.of(config, split)
    return documents


def has_splits(path: Path) -> bool:
    return all((path / split).is_dir() for split in SPLITS)


def input_bytes(config: CorpusConfig, splits: tuple[Split, ...] = SPLITS) -> int:
    """Bytes of the files at `config.path`, packed as they are."""
    files = (with_companions(file) for _, _, file in _input_files(config, splits))
    return sum(file.stat().st_size for file in set().union(*files) if file.is_file())


class EmptySplitError(DataError):
    """A split without documents."""

    @classmethod
    def of(cls, config: CorpusConfig, split: Split) -> Self:
        where = sysconfig.get_paths()["stdlib"] if config.path is None else config.path
        return cls(
            f"the {split} split of {where} is empty (validation_percent="
            f"{config.validation_percent}); add text, or give a folder with train/ and validation/"
        )


def _drawn_split(config: CorpusConfig, document: Document) -> Split:
    digest = int.from_bytes(hashlib.sha256(_name_bytes(document)).digest())
    return "validation" if digest % 100 < config.validation_percent else "train"


def _parts_of_file(
    config: CorpusConfig, documents: Iterator[Document]
) -> Iterator[tuple[Split, Document]]:
    """The parts of the only document, divided after a line, else after a word, else between
    characters, where the first has half of its share or more; only one part and the whole text are
    in memory."""
    name, text, *_ = next(documents)
    end = len(text) * (100 - config.validation_percent) // 100
    if end < len(text):
        while end and text[end] & 0xC0 == 0x80:
            end -= 1
        cuts = (text.rfind(end_of, end // 2, end) + 1 for end_of in (b"\n", b" "))
        end = next(filter(None, cuts), end)
    yield "validation", Document(name, text[end:])
    text = text[:end]
    yield "train", Document(name, text)


def _input_files(
    config: CorpusConfig, splits: tuple[Split, ...]
) -> list[tuple[Split | None, str, Path]]:
    """(split, name, path) of each file of `splits`, in order; None: it is divided between them."""
    if config.path is None:
        found = _files(Path(sysconfig.get_paths()["stdlib"]), "**/*.py").items()
        return [(None, *x) for x in found if LEFT_OUT_OF_STDLIB.isdisjoint(x[0].split("/"))]
    path, num_held_out = Path(config.path), config.validation_files
    if not (path.is_file() or path.is_dir() or path.is_fifo()):  # but a device
        raise DataError(f"no file or folder at {path}: give the path of the text {_OF_A_RECIPE}")
    if num_held_out and (has_splits(path) or not path.is_dir()):
        raise DataError(f"{path} has no files to hold out: it is one file or has its own splits")
    if not path.is_dir() and config.binds("glob"):
        raise DataError(
            f"CorpusConfig.glob {config.glob!r} chooses files of a folder and {path} is a file: "
            "leave the glob out"
        )
    if has_splits(path):
        _warn_of_files_beside(path, config.glob)
        found = {split: _folder_files(path, split, config.glob) for split in splits}
        return [(split, *file) for split in splits for file in found[split].items()]
    named = _folder_files(path, ".", config.glob) if path.is_dir() else {path.name: path}
    files = list(named.items())
    if (first := len(files) - num_held_out) < 1:
        raise DataError(f"{path} has {len(files)} files: {num_held_out} cannot be held out")
    if not num_held_out:
        _warn_of_split_names(path, named)
        return [(None, *file) for file in files]
    held_out: dict[Split, Any] = {"train": files[:first], "validation": files[first:]}
    return [(split, *file) for split in splits for file in held_out[split]]


def _warn_of_split_names(path: Path, names: Iterable[str]) -> None:
    """Warns of files that were meant to be held out, if others were meant to be trained on."""
    found = {bool(match[1]): name for name in names if (match := _NAMED_SPLIT.search(name))}
    if len(found) == 2:
        _warn_once(
            f"{path}: {found[False]} is read as {found[True]} is, their names say nothing here: "
            "put files into folders train/ and validation/, or choose some by a glob"
        )


def _warn_of_files_beside(path: Path, glob: str) -> None:
    """Warns of files that are in neither split of a folder."""
    others = [x for x in _files(path, glob) if PurePath(x).parts[0] not in SPLITS]
    if others:
        _warn_once(
            f"{path}: {others[0]} and all else outside train/ and validation/ ({len(others)} of "
            "its files) is not read: move it into one of them"
        )


_warn_once = functools.cache(functools.partial(logging.warning, "%s"))


def _folder_files(root: Path, part: str, glob: str) -> dict[str, Path]:
    """The files of a part of `root` by name. Raises `DataError` without one, and for a file that a
    link brings in from elsewhere."""
    files, links = _files(root / part, glob), _links_passed_over(root / part, glob)
    if not (files or links):
        raise DataError(
            f"no file under {root / part} matches {glob!r} (CorpusConfig.glob of a recipe): put "
            "text there, or name a file"
        )
    inside = reach_of_links(root)
    for found in {*links, *(x if x.is_symlink() else x.parent for x in files.values())}:
        if not found.resolve().is_relative_to(inside):
            raise DataError(
                f"{found} is a link that leaves {root}: give a copy of the folder (cp -rLl makes "
                "one of hard links)"
            )
    return files


def _files(folder: Path, glob: str) -> dict[str, Path]:
    """The matching files outside run directories by relative name, sorted; hidden ones, those of
    editors and file managers, if `glob` names one."""

    @functools.cache
    def is_in_run(part: PurePath) -> bool:
        return _is_run(folder / part) or (part != part.parent and is_in_run(part.parent))

    depth = len(folder.parts)  # `relative_to` is slow
    # Of links to nothing, the locks of editors (.#name) are passed over, others an error to read.
    found = (
        PurePath(*path.parts[depth:])
        for path in folder.glob(glob)
        if path.is_file() or (path.is_symlink() and not path.exists() and path.name[0] != ".")
    )
    if not any(part.startswith(".") for part in PurePath(glob).parts):
        found = (name for name in found if not any(part[0] == "." for part in name.parts))
    kept = sorted(name.as_posix() for name in found if not is_in_run(name.parent))
    return {name: folder / name for name in kept}


def _links_passed_over(folder: Path, glob: str) -> list[Path]:
    """The linked folders below `folder` with files of the kind: `**` does not enter them."""
    if "**" not in (parts := PurePath(glob).parts):
        return []
    head = PurePath(*parts[: parts.index("**")]).as_posix()
    trees = [folder] if head == "." else folder.glob(head)
    walks = (os.walk(top, onerror=_unreadable) for top in trees)
    below = (Path(x, name) for walk in walks for x, names, _ in walk for name in names)
    return [x for x in below if x.is_symlink() and any(x.rglob(parts[-1]))]


def _unreadable(error: OSError) -> NoReturn:
    """For a folder that a glob passes over without a word."""
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}; allow it, or choose files by a glob"
    ) from error


def _is_run(folder: Path) -> bool:
    """Whether `folder` is that of a run, a sweep or a study, or is being claimed by a run: then it
    holds nothing else. A lock that was left among text says nothing."""
    lock, has_config = folder / "lock", (folder / "config.json").is_file()
    if not (lock.is_file() and lock.read_bytes().startswith(b"process ")):
        return has_config and (folder / "checkpoints").is_dir()
    names = {x.name for x in folder.iterdir() if x.name[0] != "."}
    return has_config or "study.json" in names or names <= _CLAIM
