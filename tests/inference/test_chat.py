"""Conversations by a template: its text, special tokens as tokens, a state that is kept."""

import commands
import numpy as np
import pytest
from checks import randomize, refused
from small_models import config_of, model_of
from tiny_run import save_text_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ttcd_jax.data.tokenizer import JsonTokenizer, TokenizerConfig
from ttcd_jax.errors import DataError
from ttcd_jax.inference import Generation, Request, inference_model
from ttcd_jax.inference.chat import Chat, rendered
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.run.directory import IMPORT, IMPORTED, RunDirectory, chat_template, load_run

TEMPLATE = """{%- for message in messages %}
<|{{ message.role }}|>{{ message.content }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
NAMED = '{"chat_template": [{"name": "default", "template": "c"}]}'
SPECIALS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(SPECIALS)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(built.to_str())
    config = TokenizerConfig(kind="json", path=str(path), bos_id=256, eos_id=256, adds_bos=False)
    return JsonTokenizer(config)


@pytest.fixture(scope="module", params=["ipttcd", "full"])
def model(request):
    config = config_of(request.param, vocab_size=260, num_layers=2)
    return inference_model(randomize(Transformer, config, std=0.8))


def _whole(model, tokenizer, text, count):
    """The answer after a prompt that is read at once."""
    request = Request(tokens=tokenizer.encode_marked(text), max_new_tokens=count)
    return "".join(event.text for event in Generation(model, tokenizer, [request]))


def test_a_template_is_rendered_with_its_tokens_and_cannot_do_harm():
    messages = [{"role": "user", "content": "<|end|> {{ 1 }}"}]
    text = rendered(TEMPLATE, messages, eos_token="<|end|>")
    assert text == "<|user|><|end|> {{ 1 }}<|end|><|assistant|>"
    # As transformers does: no newline at the end, JSON without escapes of HTML, its own tag.
    own = "{% generation %}\n{{ 'é<\\'' | tojson }}\n{% endgeneration %}\n{{ 2 }}\n"
    assert rendered(own, messages) == '"é<\'"\n2'
    for template, words in [
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.clear() }}", "SecurityError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[9].content.x }}", "UndefinedError"),
    ]:
        refused(f"of the checkpoint fails |{words}", rendered, template, messages, error=DataError)


def test_names_of_special_tokens_are_these_tokens_only_where_asked(tokenizer):
    ids = [258, *tokenizer.encode("a"), 256]
    assert tokenizer.encode_marked("<|user|>a<|end|>").tolist() == ids
    assert tokenizer.encode("<|user|>").max() < 256
    assert tokenizer.encode("<|user|>").size == 8
    message = "<|us<|end|>er|>"  # of a user, whose names are text
    quoted = f"<|user|>{tokenizer.quoted(message)}<|end|>"
    assert tokenizer.encode_marked(quoted).tolist() == [258, *tokenizer.encode(message), 256]


def test_turns_continue_from_a_state_that_has_read_the_conversation(model, tokenizer, float64):
    chat = Chat(model, tokenizer, TEMPLATE, system="short", max_length=400, max_new_tokens=9)
    answers, read, new = [], 0, "<|system|>short<|end|>"
    for text in ("one", "two<|end|> and three"):
        new += f"<|user|>{tokenizer.quoted(text)}<|end|><|assistant|>"
        events = [*chat.answer(text)]
        answers.append("".join(event.text for event in events))
        # Nothing is read twice, though an answer's bytes may be no text; a stop token comes next.
        read += len(tokenizer.encode_marked(new)) + len(events)
        read -= events[-1].finish_reason == "eos"
        assert chat._state.position.tolist() == [read]
        new = "<|end|>"
    first = "<|system|>short<|end|><|user|>one<|end|><|assistant|>"
    assert answers[0] == _whole(model, tokenizer, first, 9)
    assert [x["role"] for x in chat.messages] == ["system", *["user", "assistant"] * 2]
    assert [x["content"] for x in chat.messages if x["role"] == "assistant"] == answers


def test_a_template_that_rewrites_history_is_read_from_its_beginning(model, tokenizer, float64):
    last = "{{ messages | length }}<|user|>{{ messages[-1].content }}<|assistant|>"
    chat = Chat(model, tokenizer, last, max_length=400, max_new_tokens=5)
    [*chat.answer("a")]
    found = "".join(event.text for event in chat.answer("b"))
    assert found == _whole(model, tokenizer, "3<|user|>b<|assistant|>", 5)


@pytest.mark.parametrize("leaves_early", [False, True])
def test_what_is_in_no_message_is_not_remembered(leaves_early, model, tokenizer, float64):
    """The beginning of a stop string is read before it is known to be one; left early it is too."""
    first = "<|user|>one<|end|><|assistant|>"
    stop = _whole(model, tokenizer, first, 20)[5:8]
    chat = Chat(model, tokenizer, TEMPLATE, max_length=400, max_new_tokens=20, stop=(stop,))
    events = chat.answer("one")
    [next(events) for _ in range(2)] if leaves_early else [*events]
    events.close()
    kept = chat.messages[-1]["content"]
    found = "".join(event.text for event in chat.answer("two"))
    second = f"{first}{tokenizer.quoted(kept)}<|end|><|user|>two<|end|><|assistant|>"
    assert found == _whole(model, tokenizer, second, 20).partition(stop)[0]


def test_full_attention_needs_the_length_of_a_conversation(tokenizer):
    model = inference_model(model_of("full", vocab_size=260))
    refused("give max_length", next, (chat := Chat(model, tokenizer, TEMPLATE)).answer("a"))
    assert not chat.messages


def test_bos_is_added_as_the_checkpoint_does(model, tokenizer, float64):
    prompt = tokenizer.encode("abc")
    read = [
        Generation(model, tokenizer, [Request(tokens=prompt, begins_with_bos=x)]).num_prompt_tokens
        for x in (None, False, True)
    ]
    assert read == [3, 3, 4]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"chat_template.jinja": "a"}, "a"),
        ({"tokenizer_config.json": '{"chat_template": "b"}'}, "b"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "x"}]}'}, None),
        ({"tokenizer_config.json": NAMED}, "c"),
        ({"tokenizer_config.json": "{}"}, None),
        ({}, None),
    ],
)
def test_the_template_is_that_of_the_import(tmp_path, texts, expected):
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.write({"model": {}}, {"text_files": texts}, IMPORT)
    if expected is None:
        refused("has no chat template", chat_template, directory)
    else:
        assert chat_template(directory) == expected


def test_the_command_answers_lines_until_an_empty_one(tokenizer, tmp_path):
    config = config_of("swa", vocab_size=260, has_tied_head=False, init_std=0.5)

    def change(params):  # its likeliest tokens are printable
        params["head"] = params["head"] * (np.arange(260) < 94)[:, None]

    save_text_model(tmp_path / "run", config, change)
    (tmp_path / "run/tokenizer.json").write_text(tokenizer._tokenizer.to_str())
    own = TokenizerConfig(kind="json", path="tokenizer.json", bos_id=256, eos_id=256)
    data = {"type": IMPORTED, "seq_len": 32, "tokenizer": own.replace(adds_bos=False).to_dict()}
    texts = {"text_files": {"chat_template.jinja": TEMPLATE}}
    content = {"model": config.to_dict(), "data": data}
    RunDirectory(tmp_path / "run").write(content, texts, IMPORT)
    run = load_run(tmp_path / "run")
    chat = Chat(inference_model(run.model), run.tokenizer, TEMPLATE, system="s", max_new_tokens=7)
    answers = ["".join(x.text for x in chat.answer(text)) for text in ("one", "two, and three")]
    line = "generate", f"--run_dir={tmp_path / 'run'}", "--max_new_tokens=7"
    lines = "one\ntwo, and three\n\nfour\n"
    assert commands.output(*line, "--chat", "--system=s", input=lines) == "\n".join([*answers, ""])
    prompt = "<|system|>s<|end|><|user|>one<|end|><|assistant|>"
    flags = "--special_tokens", "--prompt_file=-"
    assert commands.output(*line, *flags, input=prompt) == answers[0] + "\n"
