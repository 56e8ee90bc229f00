"""Data sets and models of the Hugging Face hub, downloaded into its cache; the data sets of the
paper by name."""

import re
import sys
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from huggingface_hub import HfApi, constants, errors, snapshot_download, utils

from ttcd_jax import storage, units
from ttcd_jax.data.documents import glob_of, lists_files
from ttcd_jax.errors import DataError, UserError

_ERRORS = (OSError, errors.HTTPError, LookupError, TypeError, ValueError)  # pyright: ignore[reportPrivateImportUsage]
_PROBLEMS = {
    errors.GatedRepoError: "is gated: accept its terms there, and set HF_TOKEN",
    errors.RepositoryNotFoundError: "is not there, or private: check the name, or set HF_TOKEN",
    errors.RevisionNotFoundError: "has no such revision: check what follows the @",
}
_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^:]+))?(?::(.+))?")
_MODEL_FILES = ["*.json", "*.jinja", "model*.safetensors"]


class Source(NamedTuple):
    """A data set of the hub: its files that `glob` matches, by default those of the one kind it
    holds, and how they are read. `validation_files`: the last files, which are held out."""

    repo: str
    revision: str | None = None
    glob: str | None = None
    field: str = "text"
    validation_files: int = 0
    samples_are_rows: bool = False


_PROLONG = Source("princeton-nlp/prolong-data-64K", field="input_ids", samples_are_rows=True)
NAMED = {
    "long_data_collections": Source(
        "emozilla/Long-Data-Collections-Pretrain-Without-Books", validation_files=50
    ),
    "prolong_64k": _PROLONG._replace(glob="*/proc*-64/index.json"),
    "prolong_64k_books": _PROLONG._replace(glob="book-65536/proc*-64/index.json"),
}


def parse_source(text: str) -> Source:
    """The data set of a name in `NAMED`, or of `owner/name[@revision][:glob]`."""
    if text in NAMED:
        return NAMED[text]
    if match := _ID.fullmatch(text):
        return Source(match[1], match[2], match[3])
    raise UserError(
        f"--source={text!r} is neither one of {', '.join(NAMED)} nor OWNER/NAME[@REVISION][:GLOB]"
    )


def download(source: Source, cache: str | None = None) -> tuple[Path, str]:
    """(folder, glob) of the files, which are downloaded unless they are in the cache. Raises
    `DataError` when the hub does not have them, or not for this user, or cannot be reached."""
    utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    where = f"{constants.ENDPOINT}/datasets/{source.repo}"
    try:
        info = HfApi().dataset_info(source.repo, revision=source.revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        glob = source.glob or glob_of(where, map(PurePosixPath, sizes))
        # The hub's * also matches /: it may send more than is read.
        pattern = glob.replace("**/", "*")
        if lists_files(name := PurePosixPath(glob)):
            pattern = pattern.removesuffix(name.name.lstrip("*")) + "*"
        names = list(utils.filter_repo_objects(sizes, allow_patterns=pattern))
        if not names:
            raise DataError(f"{where} has no file that matches {glob!r}: pass another --glob")
        total = units.size(sum(sizes[name] for name in names))
        print(f"{len(names):,} files ({total}) of {where}", file=sys.stderr, flush=True)
        options = {"repo_type": "dataset", "revision": info.sha, "cache_dir": cache}
        folder = Path(snapshot_download(source.repo, allow_patterns=pattern, **options))
    except UserError:
        raise
    except _ERRORS as error:
        raise DataError(f"{where} {_problem(error)} by --input") from error
    return folder, glob


def model_folder(text: str) -> Path:
    """The folder of a model: `text`, or of a model of the hub, `owner/name[@revision]`, its files
    in the hub's cache, downloaded unless they are there. Raises `DataError` when they cannot be."""
    path, match = storage.copy_of(text), _ID.fullmatch(text)
    if path.exists() or match is None or match[3] is not None:
        return path
    where = f"{constants.ENDPOINT}/{match[1]}"
    try:
        utils.disable_progress_bars()
        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=_MODEL_FILES))
    except _ERRORS as error:
        raise DataError(f"no folder {text}, and {where} {_problem(error)}") from error


def _problem(error: Exception) -> str:
    return next(
        (text for kind, text in _PROBLEMS.items() if isinstance(error, kind)),
        f"cannot be downloaded ({' '.join(str(error).split())}): try again, set HF_ENDPOINT to a "
        "mirror, or give a local copy",
    )
