"""Writes token records from raw text, for runs on RecordsConfig (configs/data/records.gin).

    ttcd prepare --input=PATH --tokenizer=FILE.json|byte --output=FOLDER
                 [--glob=PATTERN] [--field=text] [--validation_percent=5]
                 [--validation_files=N] [--processes=N] [--samples_are_rows]
    ttcd prepare --source=NAME [--download=CACHE] ...
    ttcd prepare --input=PATH --train_tokenizer=VOCAB_SIZE --output=FILE.json
    ttcd prepare --verify=FOLDER

PATH is a file or a folder of
    .txt                a document each
    .jsonl              a document in --field of each line
    .parquet, .arrow    a document in --field of each row: text, or a list of token ids
    index.json          the same: MDS shards
    .idx                Megatron-LM's documents of token ids, with the .bin beside it
Token ids are those of --tokenizer; the tokens that begin and end documents are named by
tokenizer_config.json, generation_config.json and config.json next to it, or have a usual name.
.txt.gz, .jsonl.gz, .json.gz and .zst are unpacked while they are read. Subfolders `train/` and
`validation/` are the splits. .zst, .parquet and .arrow need zstandard and pyarrow (pip install
'ttcd-jax[data]'). A document, or a line, has 256 MiB at most. A line without a document is left out
and reported; more than one, and more than 0.1 % of them, are refused. A document is its bytes:
marks of order and ends of lines stay.

NAME is a data set of the Hugging Face hub, OWNER/NAME[@REVISION][:GLOB], which is downloaded into
its cache (or CACHE) and read as --input, or one of
    long_data_collections   Long-Data-Collections without books, the last 50 of 474 files held out
    prolong_64k             ProLong's rows of 65,536 token ids of Llama 3, each a row of the run
    prolong_64k_books       its books (--glob='book-65536/proc0?-64/index.json': a part of them)

--samples_are_rows, for token ids packed to rows by others: each sample is one row of the run,
neither cut nor joined to another; the run's seq_len is their length, or less by one. The documents
in a row are one: MDS columns of their positions, such as ProLong's `indices`, are ignored.

FOLDER appears when it is complete, and is the same for any number of processes. A stopped command
leaves .FOLDER.unfinished: repeat it, and it tokenizes the rest. --verify reads all of a FOLDER.
"""

import itertools
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from ttcd_jax import storage, units
from ttcd_jax.commands import cli
from ttcd_jax.data import tokenizer
from ttcd_jax.data.compressed import bytes_read
from ttcd_jax.data.corpus import CorpusConfig, input_bytes, stream_documents
from ttcd_jax.data.documents import Document, glob_of
from ttcd_jax.data.records import prepare_records, stored_tokens, verify_records
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import whole_folder, write_whole
from ttcd_jax.terminal import Progress, note

FLAGS = flags.FLAGS
flags.DEFINE_string("input", None, "A file or a folder of documents.")
flags.DEFINE_string("source", None, "A data set of the hub, instead of --input.")
flags.DEFINE_string("download", None, "The folder for --source (default: the hub's cache).")
flags.DEFINE_string("output", None, "The folder to make; with --train_tokenizer the file.")
flags.DEFINE_string("tokenizer", None, "byte, or the path of a tokenizer.json.")
flags.DEFINE_integer("train_tokenizer", None, "Make a tokenizer with this number of tokens.")
flags.DEFINE_string("verify", None, "A folder of records whose digests to check.")
flags.DEFINE_string("glob", None, "Files of a folder (default: all of the one kind it holds).")
flags.DEFINE_string("field", "text", "Key or column of the text or the token ids.")
flags.DEFINE_integer("validation_percent", 5, "Documents held out, unless the input has splits.")
flags.DEFINE_integer("validation_files", 0, "Hold out the last files instead.", lower_bound=0)
flags.DEFINE_bool("samples_are_rows", False, "Each sample of token ids is one row of the run.")
flags.DEFINE_integer("processes", None, "Workers (default: one for each core).", lower_bound=1)

_TOKENIZER_BYTES = 2**32  # of files: a tokenizer counts their words in memory


def main(argv: list[str]) -> None:
    actions = {"tokenizer": _prepare, "train_tokenizer": _train_tokenizer, "verify": _verify}
    chosen = [name for name in actions if FLAGS[name].present]
    if len(chosen) != 1:
        raise UserError(f"pass one of --{', --'.join(actions)} ({len(chosen)} are given)")
    unread: dict[str, tuple[str, ...]] = {"train_tokenizer": ("samples_are_rows", "processes")}
    unread["verify"] = ("input", "source", "output", "glob", *unread["train_tokenizer"])
    if surplus := [x for x in unread.get(chosen[0], ()) if FLAGS[x].present]:
        raise UserError(f"--{surplus[0]} has no effect with --{chosen[0]}: leave it out")
    source = "input" if FLAGS.source is None else "source"
    for name in () if chosen == ["verify"] else (source, "output"):
        if not FLAGS[name].present:
            raise UserError(f"--{chosen[0]} also needs --{name}")
    if source != "input" and FLAGS.input is not None:
        raise UserError("pass --input or --source, not both")
    cli.clean_up_on_sigterm()
    actions[chosen[0]]()


def _prepare() -> None:
    folder = storage.to_path(FLAGS.output)
    config, corpus = _tokenizer(), _corpus()
    progress = _Progress(input_bytes(corpus))
    with whole_folder(folder, stored_tokens) as unfinished:
        if stored := stored_tokens(unfinished):
            note(f"{stored:,} tokens are stored: reading their text again")
        manifest = prepare_records(
            corpus,
            config,
            unfinished,
            num_processes=FLAGS.processes or len(os.sched_getaffinity(0)),
            samples_are_rows=FLAGS.samples_are_rows,
            on_progress=progress.add,
        )
    progress.add(0, is_last=True)
    _print_manifest(folder, manifest)


def _tokenizer() -> TokenizerConfig:
    """The tokenizer of a file; that of a run's own file begins and ends documents as the run's."""
    if FLAGS.tokenizer == "byte":
        return TokenizerConfig()
    from ttcd_jax.run.directory import RunDirectory, tokenizer_config

    path = storage.to_path(FLAGS.tokenizer)
    run = RunDirectory(path.parent)
    own = tokenizer_config(run) if run.checkpoints.is_dir() else None
    return own if own and own.path == str(path) else tokenizer.tokenizer_of(path)


def _corpus() -> CorpusConfig:
    if FLAGS.source is not None:
        _download()
    path = Path(FLAGS.input)
    names = ("field", "validation_percent", "validation_files")
    options: dict[str, Any] = {name: FLAGS[name].value for name in names}
    if FLAGS.glob or path.is_dir():
        options["glob"] = FLAGS.glob or glob_of(path, filter(Path.is_file, path.rglob("*")))
    return CorpusConfig(kind="text", path=FLAGS.input, **options)


def _download() -> None:
    """Makes the flags those of the downloaded files; a flag that is given stays."""
    endpoint = os.environ.get("HF_ENDPOINT", "")
    if not re.fullmatch(r"|https?://[\w.-]+(:\d+)?(/[!-~]*)?", endpoint):
        raise UserError(f"HF_ENDPOINT={endpoint!r} is no address such as https://huggingface.co")
    from ttcd_jax.data.hub import download, parse_source

    source = parse_source(FLAGS.source)
    for name in ("glob", "field", "validation_files", "samples_are_rows"):
        if not FLAGS[name].present:
            FLAGS[name].value = getattr(source, name)
    folder, FLAGS.glob = download(source._replace(glob=FLAGS.glob), FLAGS.download)
    FLAGS.input = str(folder)


class _Progress:
    """Progress lines; the time left is that of `num_bytes` of files."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._num_tokens = num_bytes, 0
        self._begin(0)

    def _begin(self, done: int) -> None:
        self._start = time.monotonic()
        self._line = Progress(sys.stderr, self._num_bytes, done)

    def add(self, num_tokens: int, is_last: bool = False) -> None:
        if not (num_tokens or is_last):  # text whose tokens were stored has been read
            self._begin(bytes_read())
        self._num_tokens += num_tokens
        seconds, done = max(time.monotonic() - self._start, 1e-9), bytes_read()
        line = f"{self._num_tokens:,} tokens, {self._num_tokens / seconds:,.0f} tokens/s"
        if 0 < done <= self._num_bytes:
            line += f", {done / self._num_bytes:.1%} of {units.size(self._num_bytes)}"
        self._line.report(done, line, is_last)


def _train_tokenizer() -> None:
    path = storage.copy_of(FLAGS.output)
    if path.exists():
        raise UserError(f"{path} exists: choose another --output")
    corpus = _corpus()
    documents = (d for split, d in stream_documents(corpus, ("train",)) if split == "train")
    step = 1 + input_bytes(corpus, ("train",)) // _TOKENIZER_BYTES
    if step > 1:
        note(f"one document of {step} is read, about {units.size(_TOKENIZER_BYTES)} of the input")
    chosen = itertools.islice(documents, None, None, step)
    texts = (tokenizer.decoded(_text(d), name=f"{d.name}: ") for d in chosen)
    write_whole(path, tokenizer.train_tokenizer(texts, FLAGS.train_tokenizer))
    made = tokenizer.build_tokenizer(TokenizerConfig(kind="json", path=str(path)))
    print(f"{made.vocab_size:,} tokens in {path.absolute()}")


def _text(document: Document) -> bytes:
    if document.tokens is not None:
        raise DataError(f"{document.name} has token ids: name a column of text in --field")
    return document.text


def _verify() -> None:
    _print_manifest(path := storage.to_path(FLAGS.verify), verify_records(path))


def _print_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    for split, entry in manifest["splits"].items():
        text = entry["text"]
        print(
            f"{split}: {entry['num_documents']:,} documents, {units.size(text['num_bytes'])}, "
            f"{entry['num_tokens']:,} tokens in {len(entry['shards'])} shards"
        )
    print(f"{manifest['vocab_size']:,} vocabulary entries; sha256 {manifest['sha256']}")
    print(f"token records in {folder.absolute()}")


if __name__ == "__main__":
    cli.run(main)
