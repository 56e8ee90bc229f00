import functools

import jax
import numpy as np
import pytest
from checks import refused
from flax import nnx
from small_models import byte_model

from ttcd_jax import MemoryConfig, Transformer
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError
from ttcd_jax.inference import SamplingConfig, inference_model, start_state
from ttcd_jax.inference.generate import Event, Generation, Request, next_token

TOKENIZER = ByteTokenizer()
MEMORY = MemoryConfig(chunk_size=32)
CONFIG = byte_model(window=16, student_window=8, dim=8, mlp_dim=12, init_std=0.5, memory=MEMORY)
PLAIN = CONFIG.replace(method="full", window=None, fast_layers=(), memory=None)
WARM = SamplingConfig(temperature=1.0, seed=3)
PROMPT = "a text of a certain length:"  # its text crosses the end of a chunk


def _model(config=CONFIG):
    return inference_model(Transformer(config, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def model():
    return _model()


@pytest.fixture(scope="module")
def greedy():
    """The tokens after the prompt, by the forward pass over the whole text."""
    transformer, start = Transformer(CONFIG, rngs=nnx.Rngs(0)), len(PROMPT) + 1
    forward = jax.jit(lambda tokens: transformer(tokens)[0].argmax(-1))
    tokens = np.zeros(start + 12, np.int32)
    tokens[:start] = [TOKENIZER.bos_id, *PROMPT.encode()]
    for index in range(start, len(tokens)):
        tokens[index] = forward(tokens[None])[index - 1]
    return tokens[start:].tolist()


def _request(prompt=PROMPT, **fields):
    defaults = {"tokens": TOKENIZER.encode(prompt), "max_new_tokens": 12, "stop_tokens": ()}
    return Request(**defaults | fields)


def _tokens(events, row=0):
    return [event.token for event in events if event.row == row]


def _run(model, *requests, **options):
    generation = Generation(model, TOKENIZER, requests, **options)
    return list(generation), generation.state


def test_greedy_text_is_that_of_the_forward_pass_and_the_state_has_read_it(model, greedy):
    events, state = _run(model, _request())
    assert _tokens(events) == greedy
    assert "".join(event.text for event in events) == TOKENIZER.decode(greedy)
    assert [event.finish_reason for event in events] == [None] * 11 + ["length"]
    assert state.position.tolist() == [1 + len(PROMPT) + 12]
    generation = Generation(model, TOKENIZER, [_request()])
    assert [next(generation).token for _ in range(5)] == greedy[:5]
    assert generation.state.position.tolist() == [1 + len(PROMPT) + 5]
    rest = _request(tokens=[greedy[5]], max_new_tokens=6)
    assert _tokens(_run(model, rest, state=generation.state)[0]) == greedy[6:]


def test_a_row_does_not_depend_on_its_neighbours(model, greedy):
    settings = [
        {"sampling": WARM, "max_new_tokens": 9},
        {},
        {"prompt": "", "sampling": WARM},
        {"prompt": PROMPT * 2, "sampling": WARM.replace(top_k=5), "max_new_tokens": 3},
    ]
    together, _ = _run(model, *(_request(**fields) for fields in settings))
    assert _tokens(together, row=1) == greedy
    for row in (0, 2):
        alone, _ = _run(model, _request(**settings[row]))
        assert _tokens(alone) == _tokens(together, row)
    ends = [event.row for event in together if event.finish_reason]
    assert (sorted(ends), ends[0]) == ([0, 1, 2, 3], 3)


def test_a_state_and_a_part_of_the_text_are_gone_on_from(model, greedy):
    _, state = _run(model, _request(PROMPT[:9], max_new_tokens=0))
    assert state.position.tolist() == [10]
    assert _tokens(_run(model, _request(PROMPT[9:]), state=state)[0]) == greedy
    whole = _tokens(_run(model, _request(sampling=WARM))[0])
    begun = np.concatenate([TOKENIZER.encode(PROMPT), whole[:5]])
    rest, _ = _run(model, _request(tokens=begun, sampling=WARM, max_new_tokens=7))
    assert _tokens(rest) == whole[5:]


@pytest.mark.parametrize("reason", ["eos", "stop"])
def test_the_token_that_ends_a_row_is_an_event_and_not_read(model, greedy, reason):
    end = next(i for i, token in enumerate(greedy) if token < 128 and token not in greedy[:i])
    stop = {"eos": {"stop_tokens": (greedy[end],)}, "stop": {"stop": (chr(greedy[end]),)}}[reason]
    events, state = _run(model, _request(**stop), _request("x"))
    ours = [event for event in events if event.row == 0]
    assert [event.token for event in ours] == greedy[: end + 1]
    assert ours[-1].finish_reason == reason
    assert "".join(event.text for event in ours) == TOKENIZER.decode(greedy[:end])
    # The other row goes on for several steps, and the first keeps its state.
    assert state.position.tolist() == [1 + len(PROMPT) + end, 2 + 12]
    (tokenizer := ByteTokenizer()).eos_id = greedy[0]  # ends a row by default
    request = Request(tokens=TOKENIZER.encode(PROMPT), max_new_tokens=4)
    assert [*Generation(model, tokenizer, [request])] == [Event(0, "", greedy[0], "eos")]


def test_the_name_of_a_special_token_stops_a_text(model, greedy):
    """Its own text is empty, so that no string is found."""
    end = next(i for i, token in enumerate(greedy) if token not in greedy[:i] and i)
    tokenizer = ByteTokenizer()
    tokenizer.special_id = {"<|im_end|>": greedy[end]}.get
    request = _request(stop=("<|im_end|>",))
    events = [*Generation(model, tokenizer, [request])]
    assert [event.token for event in events] == greedy[: end + 1]
    assert events[-1].finish_reason == "eos"


def test_one_program_serves_all_tokens_and_settings(model):
    next_token.clear_cache()
    model = jax.device_put(model, jax.devices()[0])  # committed to it, as a restored one is
    for fields in ({}, {"sampling": WARM}, {"sampling": WARM.replace(top_k=3, min_p=0.1)}):
        _run(model, _request(**fields), _request("other"))
    assert next_token._cache_size() == 1


def test_reading_yields_the_tokens_read(model):
    requests = [_request(max_new_tokens=2), _request("ab")]
    generation = Generation(model, TOKENIZER, requests, piece_size=16)
    counts = list(generation.read())
    assert counts == sorted(set(counts))
    assert counts[-1] == generation.num_prompt_tokens == 1 + len(PROMPT) + 3
    assert len(counts) > 1
    assert list(generation.read()) == []
    assert len(list(generation)) == 2 + 12


def test_a_document_opens_with_bos_once_and_the_penalty_counts_prompt_and_text(model):
    framed = np.concatenate([[TOKENIZER.bos_id], TOKENIZER.encode(PROMPT)])
    requests = _request(tokens=framed, max_new_tokens=1), _request("", max_new_tokens=0)
    events, state = _run(model, *requests)
    assert state.position.tolist() == [len(framed) + 1, 1]
    assert Event(1, "", None, "length") in events
    events, _ = _run(model, _request(sampling=SamplingConfig(repetition_penalty=1e9)))
    assert len({*_tokens(events), *PROMPT.encode()}) == 12 + len({*PROMPT.encode()})


def test_published_memory_is_another_text_and_needs_a_memory(model):
    request = _request(PROMPT * 3)
    published, _ = _run(model, request, memory="published")
    assert _tokens(published) != _tokens(_run(model, request)[0])
    plain = _model(PLAIN.replace(method="swa", window=16))
    refused("published", Generation, plain, TOKENIZER, [request], memory="published")


def test_full_attention_takes_the_room_it_needs_and_no_more_than_it_has():
    full = _model(PLAIN)
    events, state = _run(full, _request(max_new_tokens=4))
    assert len(events) == 4
    more, longer = _request("a", max_new_tokens=0), _request("abc", max_new_tokens=7)
    refused("33 tokens|holds 32|max_length", Generation, full, TOKENIZER, [more], state=state)
    state = start_state(full, 1, max_length=10)
    refused("11 tokens|holds 10", Generation, full, TOKENIZER, [longer], state=state)


def test_what_cannot_be_generated_is_refused_by_name(model):
    def generation(*requests, model=model, **options):
        return Generation(model, TOKENIZER, requests, **options)

    data = functools.partial(refused, error=DataError)
    refused("no request", generation)
    refused("2 requests|1 rows", generation, *[_request()] * 2, state=start_state(model, 1))
    _, state = _run(model, _request("ab", max_new_tokens=0))
    refused("request 0 is empty|3 tokens", generation, _request(""), state=state)
    refused("max_new_tokens|-1", _request, max_new_tokens=-1)
    refused("[T]|(1, 3)", _request, tokens=[[1, 2, 3]])
    refused("a stop string is empty", _request, stop=("a", ""))
    refused("pass ('END',)", _request, stop="END")
    refused("max_new_tokens 2.5", _request, max_new_tokens=2.5)
    refused("stop_tokens are tokens, not 5", _request, stop_tokens=5)
    refused("stop_tokens are tokens, not ('x',)", _request, stop_tokens=("x",))
    refused("sampling is a SamplingConfig, not {}", _request, sampling={})
    data("request 1: token 258 at position 2", generation, _request(), _request(tokens=[1, 2, 258]))
    data("token ids are float64", generation, _request(tokens=[1.5, 2.0]))
    small = _model(CONFIG.replace(vocab_size=200))
    data("token 256|vocabulary of 200 tokens", generation, _request(), model=small)
    narrow = _model(CONFIG.replace(vocab_size=257))  # the tokenizer has one token more: eos
    assert [*generation(_request(max_new_tokens=1), model=narrow)]
    data("request 0: token 257|257 tokens", generation, _request(tokens=[257]), model=narrow)
