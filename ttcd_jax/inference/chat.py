"""A conversation with a model, by the template of its checkpoint (docs/generation.md)."""

import functools
import json
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from ttcd_jax.data.tokenizer import JsonTokenizer
from ttcd_jax.errors import DataError
from ttcd_jax.inference.generate import Event, Generation, Request
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.state import InferenceState, start_state

Message = dict[str, str]  # role (system, user, assistant) and content
_FAILURES = jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RuntimeError
_FAILURES += AttributeError, MemoryError


class _Marked(jinja2.ext.Extension):
    """The tag with which templates mark what a model learns to say: here its content alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def rendered(template: str, messages: list[Message], **names: Any) -> str:
    """The text of a conversation, up to where the assistant's next message begins, as transformers
    renders it. A template is code of a checkpoint: it runs in jinja2's sandbox. Raises `DataError`
    for one that fails, or refuses these messages."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    functions = {"raise_exception": refuse, "strftime_now": time.strftime}
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marked, "jinja2.ext.loopcontrols"]
    )
    # Theirs, for jinja2's escapes <, >, & and '.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    try:
        compiled = environment.from_string(template, globals=functions)
        return compiled.render(messages=messages, tools=None, add_generation_prompt=True, **names)
    except _FAILURES as error:
        raise DataError(
            f"the chat template of the checkpoint fails ({type(error).__name__}: {error}): answer "
            "prompts without it"
        ) from error


class Chat:
    """Messages, and the state of the model that has read them, which is kept from turn to turn;
    where the template writes earlier messages in another way, or an answer ended at a stop string
    or was left early, all is read again. `max_length`: the most tokens of a conversation under full
    attention. `settings` are those of every `Request`."""

    def __init__(
        self,
        model: InferenceModel,
        tokenizer: JsonTokenizer,
        template: str,
        *,
        system: str | None = None,
        max_length: int | None = None,
        **settings: Any,
    ) -> None:
        first = {"role": "system", "content": system}
        self.messages: list[Message] = [] if system is None else [first]
        self._model, self._tokenizer, self._template = model, tokenizer, template
        self._settings, self._max_length = settings, max_length
        self._state: InferenceState | None = None
        self._read = ""  # the text that the state has read

    def answer(self, text: str) -> Iterator[Event]:
        """The events of the assistant's answer to a message of the user. An answer that the caller
        leaves early is as long as it was. Raises `UserError` for more tokens than `max_length`, and
        then, or where the template fails, the message is none of the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        tokenizer = self._tokenizer
        bos, eos = map(tokenizer.token, (tokenizer.bos_id, tokenizer.eos_id))
        spelled = [x | {"content": tokenizer.quoted(x["content"])} for x in messages]
        whole = rendered(self._template, spelled, bos_token=bos, eos_token=eos)
        if not self._read or not whole.startswith(self._read):
            self._read = ""
            self._state = start_state(self._model, 1, max_length=self._max_length)
        new = tokenizer.encode_marked(whole.removeprefix(self._read))
        request = Request(tokens=new, begins_with_bos=False, **self._settings)
        generation = Generation(self._model, tokenizer, [request], state=self._state)
        self.messages, answer, end = messages, "", None
        try:
            for event in generation:
                answer, end = answer + event.text, event.finish_reason
                yield event
        finally:
            # What was held back, perhaps the beginning of a stop string, is read and in no message.
            is_whole = end in ("eos", "length")
            self._state = generation.state
            self._read = whole + tokenizer.quoted(answer) if is_whole else ""
            self.messages.append({"role": "assistant", "content": answer})
