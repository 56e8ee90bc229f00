"""Generates text with the model of a run directory, after prompts or from a saved state.

    python -m experiments.generate --run_dir=DIR --prompt_file=FILE [--prompt_file=FILE ...]
                                   [--max_new_tokens=N] [--temperature=T] [--stop=TEXT ...]
    python -m experiments.generate --run_dir=DIR --prompt_file=BOOK --max_new_tokens=0
                                   --save_state=STATE
    python -m experiments.generate --run_dir=DIR --load_state=STATE --interactive

The text after a single prompt is printed as it is generated; several prompts form one batch, and
each text is printed under the name of its file when it is finished. A prompt is the bytes of a
file; `-` reads standard input. --save_state stores the state after everything read and generated;
--load_state continues from it, with one --prompt_file for each of its rows.

--interactive: every line is a prompt that continues from the state after --load_state or
--prompt_file, not from the line before. An empty line or the end of input ends it, Ctrl-C stops a
text. No text is generated after --prompt_file itself.

--chat: the model answers by the template of its checkpoint. A --prompt_file is a message, and with
--interactive every line is one, after the lines before. --special_tokens: in other prompts the name
of a special token (<|im_end|>) is that token.

Texts go to standard output, everything else to standard error.
"""

import itertools
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from absl import flags

from experiments import cli
from ttcd_jax import units
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import check_unused, write_json

if TYPE_CHECKING:
    import numpy as np

    from ttcd_jax.data.tokenizer import JsonTokenizer
    from ttcd_jax.inference.chat import Chat
    from ttcd_jax.inference.generate import Generation
    from ttcd_jax.inference.state import InferenceState

FLAGS = flags.FLAGS
flags.DEFINE_string("run_dir", None, "The run directory.", required=True)
flags.DEFINE_integer("step", None, "The checkpoint; default: the newest.")
flags.DEFINE_multi_string(
    "param", [], "A binding of the model, as in a .gin file; may be repeated."
)
flags.DEFINE_multi_string("prompt_file", [], "A prompt, - for standard input; may be repeated.")
flags.DEFINE_bool("interactive", False, "Ask for prompts, a line each.")
flags.DEFINE_bool("chat", False, "Answer messages by the template of the checkpoint.")
flags.DEFINE_string("system", None, "The system's message of --chat.")
flags.DEFINE_bool("special_tokens", False, "Names of special tokens in a prompt are these tokens.")
flags.DEFINE_integer("max_new_tokens", None, "Tokens to generate; 0 reads only.")
flags.DEFINE_multi_string("stop", [], "End before this text, \\n: a new line; may be repeated.")
flags.DEFINE_float("temperature", None, "0 (the default) takes the likeliest token.")
flags.DEFINE_integer("top_k", None, "Draw from the k likeliest tokens.")
flags.DEFINE_float("top_p", None, "Draw from the likeliest tokens that have this mass together.")
flags.DEFINE_float("min_p", None, "Draw from tokens with this share of the top probability.")
flags.DEFINE_float("repetition_penalty", None, "Above 1: tokens seen before are less likely.")
flags.DEFINE_integer("seed", None, "Of the draws; the same for all prompts.")
flags.DEFINE_enum(
    "memory",
    None,
    ["kept", "published"],
    "Whether the memory keeps learning while generating, or is off as in the published code.",
)
flags.DEFINE_integer("piece_size", None, "Tokens read at once.", lower_bound=1)
flags.DEFINE_integer("max_length", None, "Full attention: the most tokens a text will ever have.")
flags.DEFINE_string("save_state", None, "A folder for the state after the texts.")
flags.DEFINE_string("load_state", None, "The folder of --save_state to continue from.")
flags.DEFINE_string("json", None, "A file for the texts and their tokens.")

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_PROGRESS_SECONDS = 2.0
_CHAT_LENGTH = 4096  # tokens of a conversation under full attention, unless --max_length says more


def main(argv: list[str]) -> None:
    _check_flags()
    prompts = [_prompt(file) for file in FLAGS.prompt_file]
    if sys.stderr.isatty():
        _say(f"loading {FLAGS.run_dir}; its programs are compiled at the first text")
    session = _Session()
    if FLAGS.chat:
        session.chat(prompts)
    elif prompts:
        texts = session.read_files(prompts)
        if FLAGS.save_state is not None:
            session.save(Path(FLAGS.save_state))
        if FLAGS.json is not None:
            write_json(Path(FLAGS.json), session.record | {"texts": texts})
    if FLAGS.interactive and not FLAGS.chat:
        session.answer_lines()


def _check_flags() -> None:
    files, json = FLAGS.prompt_file, FLAGS.json
    if not files and not FLAGS.interactive:
        _refuse("nothing to do: pass --prompt_file=FILE (- is standard input) or --interactive")
    if files.count("-") + FLAGS.interactive > 1:
        _refuse("standard input is read once: by one --prompt_file=- or by --interactive")
    if FLAGS.interactive and len(files) > 1:
        _refuse(f"--interactive continues from one text, and --prompt_file names {len(files)}")
    if FLAGS.interactive and json is not None:
        _refuse("--json reports on --prompt_file, not on --interactive: leave one out")
    others = [x for x in ("load_state", "save_state", "json", "special_tokens") if FLAGS[x].value]
    if FLAGS.chat and others:
        _refuse(f"--{others[0]} is for texts, not for the conversation of --chat: leave one out")
    if FLAGS.system is not None and not FLAGS.chat:
        _refuse("--system is a message of --chat: give both")
    if FLAGS.load_state is not None and FLAGS.max_length is not None:
        _refuse("--max_length is for the start of a text: --load_state has its own")
    if FLAGS.save_state is not None and not files:
        _refuse("--save_state stores the state after a text: pass --prompt_file=FILE")
    if FLAGS.save_state is not None:
        check_unused(Path(FLAGS.save_state))
    if json is not None and (Path(json).is_dir() or not Path(json).absolute().parent.is_dir()):
        _refuse(f"--json={json} must be a file in a folder that exists")


def _refuse(message: str) -> NoReturn:
    raise UserError(message)


def _prompt(file: str) -> bytes:
    from ttcd_jax.data.compressed import MAX_BYTES

    try:
        with sys.stdin.buffer if file == "-" else open(file, "rb") as source:
            text = source.read(MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"--prompt_file={file} cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise DataError(f"--prompt_file={file} has more than {MAX_BYTES} bytes, the longest prompt")
    return text


class _Session:
    """A model and the state that texts continue from (None: the start of a document)."""

    def __init__(self) -> None:
        from ttcd_jax.inference.model import inference_model
        from ttcd_jax.run.directory import load_run

        cli.keep_programs(None)
        run = load_run(FLAGS.run_dir, FLAGS.step, FLAGS.param)
        if run.tokenizer is None:
            raise UserError(f"{FLAGS.run_dir} has no tokenizer: its data is not text")
        self._tokenizer = run.tokenizer
        self._model = inference_model(run.model)
        self._state = self._start()
        self.record = {"run_dir": str(Path(FLAGS.run_dir).absolute()), "step": run.step}
        self.record |= {"changes": FLAGS.param} if FLAGS.param else {}

    def _start(self) -> "InferenceState | None":
        from ttcd_jax.inference.saved_state import load_state
        from ttcd_jax.inference.state import start_state

        num_rows = len(FLAGS.prompt_file) or 1
        if FLAGS.load_state is None:
            length = FLAGS.max_length
            return length and start_state(self._model, num_rows, max_length=length)
        state = load_state(FLAGS.load_state, self._model)
        if len(state.position) != num_rows:
            raise UserError(
                f"--load_state={FLAGS.load_state} has {len(state.position)} rows, and there "
                f"are {num_rows} prompts: pass one for each row"
            )
        _say(f"{FLAGS.load_state}: {_tokens_read(state)}")
        return state

    def read_files(self, prompts: list[bytes]) -> list[dict[str, Any]]:
        """The record of each text for --json, once all prompts are read and continued."""
        changes = {"max_new_tokens": 0} if FLAGS.interactive else {}
        rows = [self._encoded(prompt) for prompt in prompts]
        generation = self._generation(rows, self._state, **changes)
        texts = _texts(generation, threading.Event())
        self._state = generation.state
        return [
            {"prompt_file": file, "prompt_tokens": len(row)} | text
            for file, row, text in zip(FLAGS.prompt_file, rows, texts, strict=True)
        ]

    def answer_lines(self) -> None:
        """Generates text after each input line, always from the same state, until an empty line."""
        import jax

        while line := _line():
            state = jax.tree.map(lambda x: x.copy(), self._state)
            generation = self._generation([self._encoded(line)], state)
            # Ctrl-C stops no decode, whose state would be lost.
            is_pressed = threading.Event()
            before = signal.signal(signal.SIGINT, lambda *_, event=is_pressed: event.set())
            try:
                _texts(generation, is_pressed)
            finally:
                signal.signal(signal.SIGINT, before)

    def _encoded(self, prompt: bytes) -> "np.ndarray":
        if not FLAGS.special_tokens:
            return self._tokenizer.encode(prompt)
        return self._marking().encode_marked(_message(prompt))

    def _marking(self) -> "JsonTokenizer":
        from ttcd_jax.data.tokenizer import JsonTokenizer

        if not isinstance(self._tokenizer, JsonTokenizer):
            raise UserError(
                "a tokenizer of bytes has no special tokens to name: leave the flag out"
            )
        return self._tokenizer

    def chat(self, messages: list[bytes]) -> None:
        """Answers messages, then lines of standard input with --interactive, until an empty one."""
        from ttcd_jax.inference.chat import Chat
        from ttcd_jax.inference.sampling import SamplingConfig
        from ttcd_jax.run.directory import RunDirectory, chat_template

        template = chat_template(RunDirectory(FLAGS.run_dir))
        settings = {"sampling": SamplingConfig(**_given(*_SAMPLING))} | _given("max_new_tokens")
        length = FLAGS.max_length or _CHAT_LENGTH
        chat = Chat(
            self._model,
            self._marking(),
            template,
            system=FLAGS.system,
            max_length=length,
            **settings,
        )
        for message in itertools.chain(messages, iter(_line, b"") if FLAGS.interactive else ()):
            _answer(chat, message)

    def _generation(
        self, rows: "list[np.ndarray]", state: "InferenceState | None", **changes: Any
    ) -> "Generation":
        from ttcd_jax.inference.generate import Generation, Request
        from ttcd_jax.inference.sampling import SamplingConfig
        from ttcd_jax.inference.text import typed

        sampling, stop = SamplingConfig(**_given(*_SAMPLING)), tuple(map(typed, FLAGS.stop))
        settings = {"sampling": sampling, "stop": stop} | _given("max_new_tokens") | changes
        requests = [Request(tokens=row, **settings) for row in rows]
        options = _given("piece_size", "memory")
        return Generation(self._model, self._tokenizer, requests, state=state, **options)

    def save(self, folder: Path) -> None:
        from ttcd_jax.inference.saved_state import save_state

        assert self._state is not None, "nothing was read"
        save_state(folder, self._model, self._state)
        _say(f"saved in {folder.absolute()}: {_tokens_read(self._state)}")


def _answer(chat: "Chat", message: bytes) -> None:
    """Prints the answer as it comes; Ctrl-C stops it."""
    is_pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: is_pressed.set())
    try:
        for event in chat.answer(_message(message)):
            _show(event.text)
            if is_pressed.is_set():
                break
    finally:
        signal.signal(signal.SIGINT, before)
    _show("\n")


def _message(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"a message is not UTF-8 at byte {error.start}: convert it") from error


def _texts(generation: "Generation", is_stopped: threading.Event) -> list[dict[str, Any]]:
    """The record of each text, to which no token is added once `is_stopped`. Prints a single text
    as it is generated, several when finished; then the numbers and rates of the tokens read and
    generated, and the size of the state."""
    import jax

    spoken = [_read(generation)]
    texts = [{"text": "", "tokens": []} for _ in generation.state.position]
    first = 0.0
    for event in generation:
        # The first tokens include compilation, so the rate starts after them.
        first = first or time.monotonic()
        text, is_last = texts[event.row], is_stopped.is_set()
        text["text"] += event.text
        text["tokens"] += [] if event.token is None else [event.token]
        text["finish_reason"] = event.finish_reason
        is_over = bool(text["tokens"]) and (event.finish_reason is not None or is_last)
        if len(texts) == 1:
            _show(event.text + "\n" * is_over)
        elif is_over:
            _show(f"--- {units.printable(FLAGS.prompt_file[event.row])}\n{text['text']}\n")
        if is_last:
            break
    later = sum(len(text["tokens"]) for text in texts) - len(texts)
    if later > 0:
        rate = later / (time.monotonic() - first)
        spoken.append(f"generated {later + len(texts):,} ({rate:,.0f}/s)")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(generation.state))
    _say(", ".join([*spoken, f"state {units.size(size)}"]))
    return texts


def _show(text: str) -> None:
    """Prints `text` exactly; on a terminal without the control characters that could command it."""
    if sys.stdout.isatty():
        print(text, end="", flush=True)
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()


def _read(generation: "Generation") -> str:
    """The number and rate of the prompts' tokens. Reads them, with a progress line every few
    seconds."""
    begin = reported = time.monotonic()
    num_read, total = 0, generation.num_prompt_tokens
    for num_read in generation.read():
        if time.monotonic() - reported > _PROGRESS_SECONDS and num_read < total:
            reported = time.monotonic()
            _say(f"{num_read:,} of {total:,} tokens read")
    rate = num_read / (time.monotonic() - begin)
    return f"read {num_read:,} tokens ({rate:,.0f}/s with compilation)"


def _given(*names: str) -> dict[str, Any]:
    """The flags of `names` that were passed; the library has the defaults of the others."""
    return {name: FLAGS[name].value for name in names if FLAGS[name].value is not None}


def _line() -> bytes:
    """The next line of standard input without its line ending; empty at the end of input."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.buffer.readline().rstrip(b"\r\n")


def _tokens_read(state: "InferenceState") -> str:
    return f"{', '.join(f'{count:,}' for count in state.position.tolist())} tokens read"


def _say(line: str) -> None:
    print(units.printable(line), file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main)
