"""Data sets and models of the Hugging Face hub, and models of file servers, downloaded into the
hub's cache; the data sets of the paper by name."""

import os
import re
import sys
import urllib.parse
from email.utils import parsedate_to_datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from huggingface_hub import HfApi, constants, errors, snapshot_download, utils

from ttcd_jax import units
from ttcd_jax.data.documents import glob_of, lists_files
from ttcd_jax.data.tokenizer import TEXT_FILES
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_index, whole_file

_HTTP_ERROR = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
_ERRORS = (OSError, _HTTP_ERROR, LookupError, TypeError, ValueError)
_PROBLEMS = {
    errors.GatedRepoError: "is gated: accept its terms there, and set HF_TOKEN",
    errors.RepositoryNotFoundError: "is not there, or private: check the name, or set HF_TOKEN",
    errors.RevisionNotFoundError: "has no such revision: check what follows the @",
}
_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^:]+))?(?::(.+))?")
_MODEL_FILES = ["*.json", "*.jinja", "model*.safetensors"]
# The same on a server that lists no files.
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


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
        if lists_files(glob):
            pattern = pattern.removesuffix(PurePosixPath(glob).name.lstrip("*")) + "*"
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
    """The folder of a model: `text`, unless it is the address of such a folder on a file server
    (http, https), or names no path and has the form of a model of the hub, `owner/name[@revision]`:
    then its configuration, tokenizer and .safetensors in the hub's cache, downloaded unless they
    are there. Raises `DataError` when they cannot be."""
    if text.startswith(("http://", "https://")):
        return _from_server(text.rstrip("/"))
    path, match = Path(text), _ID.fullmatch(text)
    if path.exists() or match is None or match[3] is not None:
        return path
    where = f"{constants.ENDPOINT}/{match[1]}"
    try:
        utils.disable_progress_bars()
        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=_MODEL_FILES))
    except _ERRORS as error:
        raise DataError(f"no folder {text}, and {where} {_problem(error)}") from error


def _from_server(address: str) -> Path:
    """The folder of the cache with the files of a model at `address`. Those of the same time and
    size are not read again; config.json comes last, so a folder that has it is whole, and is taken
    as it is in offline mode."""
    folder = Path(constants.HF_HOME) / "servers" / urllib.parse.quote(address, safe="")
    if constants.is_offline_mode() and (folder / _CONFIG).is_file():
        return folder
    try:
        if _fetched(address, folder, f"{_WEIGHTS}.index.json"):
            names = {*read_index(folder / f"{_WEIGHTS}.index.json").values()}
        else:
            names = {_WEIGHTS}
        absent = [name for name in sorted(names) if not _fetched(address, folder, name)]
        for name in ("tokenizer.json", *TEXT_FILES):
            _fetched(address, folder, name)
        if absent or not _fetched(address, folder, _CONFIG):
            raise DataError(f"{address} has no {(*absent, _CONFIG)[0]}: is it a model's folder?")
    except UserError:
        raise
    except _ERRORS as error:
        raise DataError(f"{address} {_problem(error)}") from error
    return folder


def _fetched(address: str, folder: Path, name: str) -> bool:
    """Whether the server has the file, which is then in the folder with the server's time."""
    path, url = folder / name, f"{address}/{urllib.parse.quote(name)}"
    with utils.get_session().stream("GET", url, timeout=constants.DEFAULT_REQUEST_TIMEOUT) as found:
        if found.status_code == 404:
            return False
        found.raise_for_status()
        date = found.headers.get("last-modified")
        time = parsedate_to_datetime(date).timestamp() if date else None
        if path.is_file():
            there = path.stat()
            if time == there.st_mtime and found.headers.get("content-length") == str(there.st_size):
                return True
        with whole_file(path) as unfinished:
            with unfinished.open("wb") as file:
                file.writelines(found.iter_bytes())
            if time is not None:
                os.utime(unfinished, (time, time))
    return True


def _problem(error: Exception) -> str:
    return next(
        (text for kind, text in _PROBLEMS.items() if isinstance(error, kind)),
        f"cannot be downloaded ({' '.join(str(error).split())}): try again, set HF_ENDPOINT to a "
        "mirror, or give a local copy",
    )
