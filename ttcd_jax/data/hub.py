"""Data sets of the Hugging Face hub, downloaded into its cache; those of the paper by name."""

import fnmatch
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from huggingface_hub import HfApi, constants, errors, hf_hub_download, utils

from ttcd_jax import units
from ttcd_jax.data.documents import companions, glob_of
from ttcd_jax.errors import DataError, UserError

_DOWNLOADS = 8  # at once
_HTTP_ERROR = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
_ERRORS = (OSError, _HTTP_ERROR, LookupError, TypeError, ValueError)
_REMEDIES = {
    errors.GatedRepoError: "is gated: accept its terms there, and set HF_TOKEN",
    errors.RepositoryNotFoundError: "is not there, or private: check the name, or set HF_TOKEN",
    errors.RevisionNotFoundError: "has no such revision: check what follows the @",
    errors.OfflineModeIsEnabled: "is not asked while HF_HUB_OFFLINE is set: unset it, or give a "
    "local copy by --input",
}
_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^:]+))?(?::(.+))?")


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
        "emozilla/Long-Data-Collections-Pretrain-Without-Books",
        glob="data/*.parquet",
        validation_files=50,
    ),
    "prolong_64k": _PROLONG._replace(glob="*/proc*-64/index.json"),
    "prolong_64k_books": _PROLONG._replace(glob="book-65536/proc*-64/index.json"),
}


def parse_source(text: str) -> Source:
    """The data set of a name in `NAMED`, or of `owner/name[@revision][:glob]`."""
    if text in NAMED:
        return NAMED[text]
    match = _ID.fullmatch(text)
    if match is None:
        raise UserError(
            f"--source={text!r} is neither one of {', '.join(NAMED)} nor OWNER/NAME[@REVISION]"
            "[:GLOB]"
        )
    repo, revision, glob = match.groups()
    return Source(repo, revision, glob)


def download(source: Source, cache: str | None = None) -> tuple[Path, str]:
    """(folder, glob) of the files, which are downloaded unless they are in the cache. Raises
    `DataError` when the hub does not have them, or not for this user, or cannot be reached."""
    utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    where = f"{constants.ENDPOINT}/datasets/{source.repo}"
    try:
        return _download(where, source, cache)
    except UserError:
        raise
    except _ERRORS as error:
        kind = next((kind for kind in _REMEDIES if isinstance(error, kind)), None)
        problem = _REMEDIES.get(kind) or (
            f"cannot be downloaded ({' '.join(str(error).split())}): try again, set HF_ENDPOINT to "
            "a mirror, or give a local copy by --input"
        )
        raise DataError(f"{where} {problem}") from error


def _download(where: str, source: Source, cache: str | None) -> tuple[Path, str]:
    info = HfApi().dataset_info(source.repo, revision=source.revision, files_metadata=True)
    sizes = {PurePosixPath(file.rfilename): file.size or 0 for file in info.siblings or ()}
    glob = source.glob or glob_of(where, sizes)
    matching = {name for name in sizes if _matches(name.parts, glob.split("/"))}
    folders = companions(matching)
    names = [name for name in sizes if name in matching or name.parent in folders]
    if not names:
        raise DataError(f"{where} has no file that matches {glob!r}: pass another --glob")
    total = units.size(sum(sizes[name] for name in names))
    print(f"{len(names):,} files ({total}) of {where}", file=sys.stderr, flush=True)

    def fetch(name: PurePosixPath) -> str:
        options = {"revision": info.sha, "repo_type": "dataset", "cache_dir": cache}
        return hf_hub_download(source.repo, str(name), **options)

    pool = ThreadPoolExecutor(_DOWNLOADS)
    try:
        paths = list(pool.map(fetch, names))
    finally:
        pool.shutdown(cancel_futures=True)
    return Path(paths[0]).parents[len(names[0].parts) - 1], glob


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not (parts and patterns):
        return not (parts or patterns)
    if patterns[0] == "**":
        return any(_matches(parts[i:], patterns[1:]) for i in range(len(parts)))
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])
