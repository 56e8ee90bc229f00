"""Generates text with the model of a run directory, after prompts or from a saved state.

    ttcd generate --run_dir=DIR --prompt_file=FILE [--prompt_file=FILE ...]
                  [--max_new_tokens=N] [--temperature=T] [--stop=TEXT ...]
    ttcd generate --run_dir=DIR --chat [--prompt_file=FILE ...] [--system=TEXT]
    ttcd generate --run_dir=DIR --prompt_file=BOOK --max_new_tokens=0
                  --save_state=STATE
    ttcd generate --run_dir=DIR --load_state=STATE --prompt_file=-
    ttcd generate --run_dir=DIR --prompt_file=BOOK --max_new_tokens=0
                  --save_memory=MEMORY
    ttcd generate --run_dir=DIR --load_memory=MEMORY ... --prompt_file=-

The text after a single prompt is printed as it is generated; several prompts form one batch, and
each text is printed under the name of its file when it is finished. A prompt is the bytes of a
file; `-` reads standard input. --save_state stores the state after everything read and generated;
--load_state continues from it, with one --prompt_file for each of its rows. --save_memory stores
what the text left in the memory alone; every prompt begins with the sum of those of --load_memory.

--chat: the model answers by the template of its checkpoint. Every --prompt_file is a message;
without one, every line of standard input is, until an empty one. --special_tokens: in other prompts
the name of a special token (<|im_end|>) is that token. Texts go to standard output, everything else
to standard error.
"""

import dataclasses
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from absl import flags

from ttcd_jax import storage, units
from ttcd_jax.commands import cli
from ttcd_jax.data.compressed import MAX_BYTES, import_for
from ttcd_jax.data.tokenizer import JsonTokenizer, Tokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import check_unused, write_json
from ttcd_jax.terminal import Progress, note

if TYPE_CHECKING:
    from ttcd_jax.inference.generate import Generation
    from ttcd_jax.inference.model import InferenceModel
    from ttcd_jax.inference.state import InferenceState

FLAGS = flags.FLAGS
flags.DEFINE_string("run_dir", None, "The run directory.", required=True)
flags.DEFINE_integer("step", None, "The checkpoint (default: the newest).")
flags.DEFINE_multi_string(
    "param", [], "A binding of the model, as in a .gin file; may be repeated."
)
flags.DEFINE_multi_string("prompt_file", [], "A prompt, - for standard input; may be repeated.")
flags.DEFINE_bool("chat", False, "Answer messages by the template of the checkpoint.")
flags.DEFINE_string("system", None, "The system's message of --chat.")
flags.DEFINE_bool("special_tokens", False, "Names of special tokens in a prompt are these tokens.")
flags.DEFINE_integer("max_new_tokens", None, "Tokens to generate; 0 reads only.")
flags.DEFINE_multi_string(
    "stop",
    [],
    "End before this text, or a token by its name; \\n alone: a new line; may be repeated.",
)
flags.DEFINE_float("temperature", None, "Of the draws; 0 takes the likeliest token (default: 0).")
flags.DEFINE_integer("top_k", None, "Draw from the k likeliest tokens.")
flags.DEFINE_float("top_p", None, "Draw from the likeliest tokens that have this mass together.")
flags.DEFINE_float("min_p", None, "Draw from tokens with this share of the top probability.")
flags.DEFINE_float("repetition_penalty", None, "Above 1: tokens seen before are less likely.")
flags.DEFINE_integer("seed", None, "Of the draws; the same for all prompts.")
flags.DEFINE_enum(
    "memory",
    None,
    ["kept", "frozen", "published"],
    "Whether the memory learns while generating too, is only read after the prompt, or is off as "
    "in the published code.",
)
flags.DEFINE_integer("piece_size", None, "Tokens read at once.", lower_bound=1)
flags.DEFINE_integer(
    "max_length", None, "Full attention: the most tokens a text will ever have.", lower_bound=1
)
flags.DEFINE_string("save_state", None, "A folder for the state after the texts.")
flags.DEFINE_string("load_state", None, "The folder of --save_state to continue from.")
flags.DEFINE_string("save_memory", None, "A folder for what the text left in the memory.")
flags.DEFINE_multi_string("load_memory", [], "One of --save_memory to begin with; may be repeated.")
flags.DEFINE_string("output", None, "A file for the texts and their tokens, in JSON.")

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_CHAT_LENGTH = 4096  # tokens of a conversation under full attention, unless --max_length says more


def main(argv: list[str]) -> None:
    _check_flags()
    prompts = [_prompt(file) for file in FLAGS.prompt_file]
    from ttcd_jax.inference.generate import Generation, Request
    from ttcd_jax.inference.model import inference_model
    from ttcd_jax.inference.saved_state import save_state
    from ttcd_jax.run.directory import load_run

    note(f"loading {FLAGS.run_dir}; its programs are compiled at the first text")
    cli.keep_programs()
    run = load_run(FLAGS.run_dir, FLAGS.step, FLAGS.param)
    if run.tokenizer is None:
        raise UserError(
            f"{FLAGS.run_dir} has no tokenizer: its data is not text, or it was imported without "
            "one; import it again with --tokenizer=FILE.json"
        )
    model = inference_model(run.model)
    if FLAGS.chat:
        _chat(model, _marking(run.tokenizer), prompts)
        return
    if FLAGS.special_tokens:
        rows = [_marking(run.tokenizer).encode_marked(_message(prompt)) for prompt in prompts]
    else:
        rows = [run.tokenizer.encode(prompt) for prompt in prompts]
    requests = [Request(tokens=row, **_settings()) for row in rows]
    (state, loaded), options = _state(model, len(rows)), _given("piece_size", "memory")
    before = 0 if state is None else int(state.position[0])
    generation = Generation(model, run.tokenizer, requests, state=state, **options)
    texts = _texts(generation)
    if FLAGS.save_state is not None:
        save_state(folder := storage.to_path(FLAGS.save_state), generation.model, generation.state)
        note(f"saved in {folder.absolute()}: {_tokens_read(generation.state)}")
    if FLAGS.save_memory is not None:
        from ttcd_jax.inference.text_memory import memories_of

        (memory,) = memories_of(generation.model, generation.state)
        prompts = before + generation.num_prompt_tokens
        read = prompts if FLAGS.memory == "frozen" else memory.tokens_read
        memory = dataclasses.replace(memory, tokens_read=loaded + read)
        memory.save(folder := storage.to_path(FLAGS.save_memory))
        note(f"memory saved in {folder.absolute()}: {units.size(memory.nbytes)}")
    if FLAGS.output is not None:
        record = {"run_dir": storage.shown(storage.to_path(FLAGS.run_dir)), "step": run.step}
        record |= {"changes": FLAGS.param} if FLAGS.param else {}
        named = zip(FLAGS.prompt_file, rows, texts, strict=True)
        texts = [{"prompt_file": x, "prompt_tokens": len(row)} | text for x, row, text in named]
        write_json(storage.to_path(FLAGS.output), record | {"texts": texts})


def _check_flags() -> None:
    file = FLAGS.output and storage.to_path(FLAGS.output)
    others = ("load_state", "save_state", "load_memory", "save_memory", "output", "special_tokens")
    others += ("memory", "piece_size")
    is_idle = not (FLAGS.prompt_file or FLAGS.chat)
    has_others = FLAGS.chat and any(FLAGS[name].value for name in others)
    has_both = FLAGS.load_state is not None and FLAGS.max_length is not None
    is_lost = file and storage.address(file) is None
    is_lost = is_lost and (file.is_dir() or not file.absolute().parent.is_dir())
    has_two = FLAGS.load_memory and (FLAGS.load_state is not None or FLAGS.memory == "published")
    is_of_many = FLAGS.save_memory is not None and len(FLAGS.prompt_file) != 1
    is_cut = [x for x in ("top_k", "top_p", "min_p") if FLAGS[x].value] and not FLAGS.temperature
    is_unwritten = FLAGS.save_memory is not None and FLAGS.memory == "published"
    texts = f"--{', --'.join(others)} are for texts, not for the conversation of --chat"
    mistakes = {
        "nothing to do: pass --prompt_file=FILE (- is standard input) or --chat": is_idle,
        texts: has_others,
        "--system is a message of --chat: give both": FLAGS.system is not None and not FLAGS.chat,
        "standard input is read once: by one --prompt_file=-": FLAGS.prompt_file.count("-") > 1,
        "--max_length is for the start of a text: --load_state has its own": has_both,
        "--load_memory begins a text: leave --load_state and --memory=published out": has_two,
        "--save_memory is the memory of one text: pass one --prompt_file": is_of_many,
        "--memory=published writes no memory: leave it or --save_memory out": is_unwritten,
        "--top_k, --top_p and --min_p cut draws: pass a --temperature above 0": is_cut,
        f"--output={FLAGS.output} must be a file in a folder that exists": is_lost,
    }
    for message, is_made in mistakes.items():
        if is_made:
            raise UserError(message)
    for folder in (FLAGS.save_state, FLAGS.save_memory):
        if folder is not None:
            check_unused(storage.to_path(folder))


def _prompt(file: str) -> bytes:
    try:
        with sys.stdin.buffer if file == "-" else open(file, "rb") as source:
            text = source.read(MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"--prompt_file={file} cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise DataError(f"--prompt_file={file} has more than {MAX_BYTES} bytes, the longest prompt")
    return text


def _chat(model: "InferenceModel", tokenizer: JsonTokenizer, messages: list[bytes]) -> None:
    """Answers the messages, or without any the lines of standard input until an empty one."""
    import_for("the template of --chat", "jinja2")
    from ttcd_jax.inference.chat import Chat
    from ttcd_jax.run.directory import RunDirectory, chat_template

    template = chat_template(RunDirectory(FLAGS.run_dir))
    options = {"system": FLAGS.system, "max_length": FLAGS.max_length or _CHAT_LENGTH}
    chat = Chat(model, tokenizer, template, **options, **_settings())
    for message in messages or iter(lambda: sys.stdin.buffer.readline().rstrip(b"\r\n"), b""):
        is_pressed = threading.Event()  # Ctrl-C stops an answer between two tokens
        before = signal.signal(signal.SIGINT, lambda *_, event=is_pressed: event.set())
        try:
            for event in chat.answer(_message(message)):
                _show(event.text)
                if is_pressed.is_set():
                    break
        finally:
            signal.signal(signal.SIGINT, before)
        _show("\n")


def _marking(tokenizer: Tokenizer) -> JsonTokenizer:
    if not isinstance(tokenizer, JsonTokenizer):
        raise UserError("a tokenizer of bytes has no special tokens to name: leave the flag out")
    return tokenizer


def _message(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"a message is not UTF-8 at byte {error.start}: convert it") from error


def _settings() -> dict[str, Any]:
    """The flags that are settings of a `Request`."""
    from ttcd_jax.inference.sampling import SamplingConfig
    from ttcd_jax.inference.text import typed

    sampling, stop = SamplingConfig(**_given(*_SAMPLING)), tuple(map(typed, FLAGS.stop))
    return {"sampling": sampling, "stop": stop} | _given("max_new_tokens")


def _state(model: "InferenceModel", num_rows: int) -> tuple["InferenceState | None", int]:
    """(the state that texts continue from, the tokens of its loaded memory); None: the start of a
    document."""
    from ttcd_jax.inference.saved_state import load_state
    from ttcd_jax.inference.state import is_frozen, start_state
    from ttcd_jax.inference.text_memory import load_memory, start_from

    length = FLAGS.max_length
    if FLAGS.load_memory:
        first, *others = (load_memory(folder, model) for folder in FLAGS.load_memory)
        memory = sum(others, first)
        note(f"a memory of {memory.tokens_read:,} tokens")
        return start_from(model, [memory] * num_rows, max_length=length), memory.tokens_read
    if FLAGS.load_state is None:
        return length and start_state(model, num_rows, max_length=length), 0
    state = load_state(FLAGS.load_state, model)
    if len(state.position) != num_rows:
        raise UserError(
            f"--load_state={FLAGS.load_state} has {len(state.position)} rows, and there "
            f"are {num_rows} prompts: pass one for each row"
        )
    if is_frozen(state):
        for flag in ("memory", "save_memory"):
            if FLAGS[flag].value is not None:
                raise UserError(
                    f"--load_state={FLAGS.load_state} was saved after --memory=frozen: its memory "
                    f"is read and never written, so --{flag} has no effect; leave it out"
                )
        note("its memory is read only (--memory=frozen)")
    note(f"{FLAGS.load_state}: {_tokens_read(state)}")
    return state, 0


def _texts(generation: "Generation") -> list[dict[str, Any]]:
    """The record of each text. Prints a single text as it is generated, several when finished; then
    the numbers and rates of the tokens read and generated, and the size of the state."""
    import jax

    spoken = [_read(generation)]
    texts = [{"text": "", "tokens": []} for _ in generation.state.position]
    first = 0.0
    for event in generation:
        # The first tokens include compilation, so the rate starts after them.
        first = first or time.monotonic()
        text = texts[event.row]
        text["text"] += event.text
        text["tokens"] += [] if event.token is None else [event.token]
        text["finish_reason"] = event.finish_reason
        is_over = bool(text["tokens"]) and event.finish_reason is not None
        if len(texts) == 1:
            _show(event.text + "\n" * is_over)
        elif is_over:
            _show(f"--- {units.printable(FLAGS.prompt_file[event.row])}\n{text['text']}\n")
    later = sum(len(text["tokens"]) for text in texts) - len(texts)
    if later > 0:
        rate = later / (time.monotonic() - first)
        spoken.append(f"generated {later + len(texts):,} ({rate:,.0f}/s)")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(generation.state))
    note(", ".join([*spoken, f"state {units.size(size)}"]))
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
    """The number and rate of the prompts' tokens. Reads them, with lines of progress."""
    begin, num_read, total = time.monotonic(), 0, generation.num_prompt_tokens
    progress = Progress(sys.stderr, total, seconds=2.0)
    for num_read in generation.read():
        if num_read < total:
            progress.report(num_read, f"{num_read:,} of {total:,} tokens read")
    progress.end()
    rate = num_read / (time.monotonic() - begin)
    return f"read {num_read:,} tokens ({rate:,.0f}/s with compilation)"


def _given(*names: str) -> dict[str, Any]:
    """The flags of `names` that were passed; the library has the defaults of the others."""
    return {name: FLAGS[name].value for name in names if FLAGS[name].value is not None}


def _tokens_read(state: "InferenceState") -> str:
    return f"{', '.join(f'{count:,}' for count in state.position.tolist())} tokens read"


if __name__ == "__main__":
    cli.run(main)
