"""What an export must do in every version of transformers, on the folders that a test wrote.

    python properties.py DIR...     in an environment with torch and transformers

Every DIR has a checkpoint of a small model with the byte tokenizer and `expected.npz`: prompts
of other lengths, and the greedy tokens of ttcd_jax. Prints what fails.
"""

import copy
import inspect
import sys
import tempfile
import traceback
import types
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    pipeline,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"
COUNT, PAD = 11, 5
RELEASE = [int(x) for x in transformers.__version__.split(".")[:2]]


class Subject:
    """A model; the prompts one by one, as a batch with padding on the left, and its mask."""

    def __init__(self, folder):
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        stored = np.load(folder / "expected.npz")
        self.rows = [torch.tensor(stored[f"prompt{i}"])[None] for i in range(3)]
        self.expected = torch.tensor(stored["tokens"])
        length = max(x.shape[1] for x in self.rows)
        pads = [length - x.shape[1] for x in self.rows]
        self.mask = torch.cat([torch.arange(length)[None] >= pad for pad in pads]).long()
        pad = torch.nn.functional.pad
        self.batch = torch.cat([pad(x, (length - x.shape[1], 0), value=PAD) for x in self.rows])

    def generate(self, tokens, **options):
        settings = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None}
        return self.model.generate(tokens, **settings | {"pad_token_id": PAD} | options)


def same(found, expected, tolerance=2e-5):
    assert found.shape == expected.shape, (found.shape, expected.shape)
    worst = float((found - expected).abs().max() / expected.abs().max())
    assert worst <= tolerance, f"off by {worst:.1e}"


def refused(words, call, *args, **options):
    """The call ends in one line that has `words`."""
    found = "nothing"
    try:
        call(*args, **options)
    except (ValueError, TypeError, NotImplementedError, RuntimeError, ImportError) as error:
        found = f"{type(error).__name__}: {error}".strip()
    assert found != "nothing", f"not refused: {words}"
    assert words in found, found
    assert "\n" not in found, found


def in_pieces(s, tokens, cuts=(0, 1, 8, 9, 14), name="past_key_values", mask=None):
    """Logits of a batch in pieces of other sizes, with the cache by its old or new name."""
    cache, parts = None, []
    for start, stop in zip(cuts, (*cuts[1:], tokens.shape[1]), strict=True):
        options = {} if mask is None else {"attention_mask": mask[:, :stop]}
        piece = s.model(tokens[:, start:stop], use_cache=True, **{name: cache}, **options)
        cache, parts = piece[CACHE], [*parts, piece.logits]
    return torch.cat(parts, 1), cache


def test_a_row_is_one_pass_pieces_growing_rows_and_greedy_tokens_of_ours(s):
    for row, tokens in zip(s.rows, s.expected, strict=True):
        whole = torch.cat([row, tokens[None]], 1)
        logits = s.model(whole).logits
        assert (logits[0, row.shape[1] - 1 : -1].argmax(-1) == tokens).all()
        for name in ("past_key_values", "cache"):
            same(in_pieces(s, whole, name=name)[0], logits)
        parts = [s.model(whole[:, : n + 1]).logits[:, -1] for n in range(20)]
        same(torch.cat(parts), logits[0, :20])
        for options in ({}, {"use_cache": False}, {"num_beams": 1, "use_cache": True}):
            assert (s.generate(row, **options) == whole).all(), options
        assert (s.generate(row, generation_config=GenerationConfig(use_cache=False)) == whole).all()


def test_padding_changes_no_row(s):
    logits = s.model(s.batch, attention_mask=s.mask).logits
    pieces, cache = in_pieces(s, s.batch, (0, 15, 16, 21), mask=s.mask)
    tokens = s.expected[:, :1]
    mask = torch.cat([s.mask, s.mask[:, :1] * 0 + 1], 1)
    step = s.model(tokens, attention_mask=mask, past_key_values=copy.deepcopy(cache)).logits
    again = s.model(tokens, cache=cache).logits  # the cache knows its padding
    for i, row in enumerate(s.rows):
        whole = s.model(torch.cat([row, tokens[i : i + 1]], 1)).logits[0]
        for found in (logits, pieces):
            same(found[i, -row.shape[1] :], whole[:-1])
        for found in (step, again):
            same(found[i, -1], whole[-1])


def test_generation_of_ragged_prompts_is_that_of_each_row(s):
    options = {"attention_mask": s.mask}
    for more in ({}, {"use_cache": False}, {"token_type_ids": s.batch * 0}, {"max_length": None}):
        found = s.generate(s.batch, **options, **more)
        assert (found[:, -COUNT:] == s.expected).all(), more
    if hasattr(GenerationConfig(), "prefill_chunk_size"):
        for size in (1, 4, 100):
            found = s.generate(s.batch, **options, prefill_chunk_size=size)
            assert (found[:, -COUNT:] == s.expected).all(), size
    for more in ({"num_beams": 3}, {"num_beams": 3, "use_cache": False}):
        found = s.generate(s.batch, **options, **more)[:, -COUNT:]
        for i, row in enumerate(s.rows):
            assert (found[i] == s.generate(row, num_beams=3)[0, -COUNT:]).all(), more
    chosen = {"num_beams": 4, "num_return_sequences": 2, "output_scores": True}
    out = s.generate(s.batch, **options, **chosen, return_dict_in_generate=True)
    single = s.generate(s.rows[1], **chosen, return_dict_in_generate=True)
    assert (out.sequences[2:4, -COUNT:] == single.sequences[:, -COUNT:]).all()
    same(out.sequences_scores[2:4], single.sequences_scores)


def test_what_generate_returns_is_that_of_one_pass(s):
    outputs = dict.fromkeys(("output_logits", "output_scores", "output_hidden_states"), True)
    out = s.generate(s.batch, attention_mask=s.mask, return_dict_in_generate=True, **outputs)
    mask = torch.cat([s.mask, s.expected * 0 + 1], 1)
    whole = s.model(out.sequences, attention_mask=mask, output_hidden_states=True)
    same(torch.stack(out.logits, 1), whole.logits[:, -COUNT - 1 : -1])
    same(out.hidden_states[1][-1][:, 0], whole.hidden_states[-1][:, -COUNT])
    cache = out[CACHE]
    assert cache.get_seq_length() == s.batch.shape[1] + COUNT - 1
    again = s.generate(out.sequences, attention_mask=mask, **{CACHE: cache}, max_new_tokens=6)
    longer = s.generate(s.batch, attention_mask=s.mask, max_new_tokens=COUNT + 6)
    assert (again == longer).all()
    seen, end = [], lambda: seen.append("end")
    streamer = types.SimpleNamespace(put=lambda x: seen.extend(x.flatten().tolist()), end=end)
    s.generate(s.rows[0], streamer=streamer)
    assert seen == [*s.rows[0][0].tolist(), *s.expected[0].tolist(), "end"]
    torch.manual_seed(0)
    drawn = s.generate(s.rows[0], do_sample=True, num_return_sequences=3, guidance_scale=1.5)
    torch.manual_seed(0)
    options = {"do_sample": True, "num_return_sequences": 3, "use_cache": False}
    assert (drawn == s.generate(s.rows[0], **options, guidance_scale=1.5)).all()


def test_embeddings_and_hidden_states_are_those_of_a_llama(s):
    row, table = s.rows[0], s.model.get_input_embeddings()
    out = s.model(row, output_hidden_states=True)
    assert len(out.hidden_states) == s.model.config.num_hidden_layers + 1
    same(out.hidden_states[0], table(row), 0)
    same(s.model.lm_head(out.hidden_states[-1]), out.logits, 0)
    seen = []
    layers, keep = s.model.model.layers, lambda *x: seen.append(x[2][0])
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    s.model(row)
    [hook.remove() for hook in hooks]
    for found, expected in zip(out.hidden_states[1:-1], seen[:-1], strict=True):
        same(found, expected, 0)
    same(s.model.model.norm(seen[-1]), out.hidden_states[-1], 0)
    embedded = s.model(inputs_embeds=table(row), output_hidden_states=True)
    same(embedded.logits, out.logits, 0)
    found = s.generate(None, inputs_embeds=table(s.batch), attention_mask=s.mask)
    assert (found == s.expected).all()
    parts = s.model(row, return_dict=False, use_cache=False)
    assert [type(x) for x in (parts, *parts)] == [tuple, torch.Tensor]
    for kept in (3, torch.tensor([0, 4])):
        last = out.logits[:, -3:] if isinstance(kept, int) else out.logits[:, kept]
        same(s.model(row, logits_to_keep=kept).logits, last)
    s.model.config.output_hidden_states = True
    assert s.model(row).hidden_states is not None
    s.model.config.output_hidden_states = False


def test_no_cache_is_made_nor_written(s):
    row = s.rows[0]
    assert s.model(row, use_cache=False)[1:] == s.model(row, labels=row)[2:] == ()
    assert s.model(row).get(CACHE).get_seq_length() == row.shape[1]
    cache = s.model(row[:, :9], use_cache=True)[CACHE]
    for _ in range(2):
        rest = s.model(row[:, 9:], past_key_values=cache, use_cache=False)
        same(rest.logits, s.model(row).logits[:, 9:])
        assert (rest.get(CACHE), cache.get_seq_length()) == (None, 9)
    s.model.config.use_cache = False
    assert s.model(row).get(CACHE) is None
    s.model.config.use_cache = True


def test_positions_are_checked(s):
    n, t = s.batch.shape[1], s.rows[0].shape[1]
    of_rows, of_columns = (s.mask.cumsum(1) - 1).masked_fill(s.mask == 0, 1), torch.arange(n)[None]
    expected = s.model(s.batch, attention_mask=s.mask).logits
    for given in (of_rows, of_columns, of_columns[0]):
        same(s.model(s.batch, attention_mask=s.mask, position_ids=given).logits, expected, 0)
    same(s.model(s.batch, s.mask, cache_position=torch.arange(n)).logits, expected, 0)
    own = of_columns[:, :t]
    for given in (3 * own, own + 1, own[:, 1:], own % 5):
        refused("position_ids", s.model, s.rows[0], position_ids=given)
    for given in (torch.arange(t) * 2, torch.arange(t + 1), torch.arange(t).flip(0)):
        refused("cache_position", s.model, s.rows[0], cache_position=given)


def test_losses_and_gradients_with_padding_are_those_of_the_rows(s):
    model, row = s.model.train(), s.rows[0]
    rest = inspect.signature(model.forward).parameters["loss_kwargs"]  # for the Trainer of 4.46
    assert rest.kind == rest.VAR_KEYWORD
    rolled = torch.stack([x.roll(int(m.sum())) for x, m in zip(s.batch, s.mask, strict=True)])

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {name: x.grad.clone() for name, x in model.named_parameters()}

    with torch.enable_grad():
        losses = [(model(x, labels=x).loss, x.shape[1] - 1) for x in s.rows]
        loss = sum(x * n for x, n in losses) / sum(n for _, n in losses)
        expected = gradients(loss)
        for batch, mask in ((s.batch, s.mask), (rolled, s.mask.flip(1))):  # on the left, the right
            for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
                if options is not None:
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
                found = model(batch, attention_mask=mask, labels=batch).loss
                same(found.detach(), loss.detach())
                for name, gradient in gradients(found).items():
                    same(gradient, expected[name], 1e-4)
                model.gradient_checkpointing_disable()
        flat = torch.nn.functional.cross_entropy
        logits = model(row).logits[0, :-1]
        mean, total = flat(logits, row[0, 1:]), flat(logits, row[0, 1:], reduction="sum")
        same(model(row, labels=row).loss, mean)
        same(model(row, labels=row, num_items_in_batch=7).loss, total / 7)
        if "shift_labels" in inspect.signature(model.loss_function).parameters:
            same(model(row[:, :-1], shift_labels=row[:, 1:]).loss, mean)
        else:
            refused("takes no shift_labels", model, row, shift_labels=row)
        halves = [model(x, labels=x, num_items_in_batch=torch.tensor(60)).loss for x in s.rows]
        whole = model(s.batch, attention_mask=s.mask, labels=s.batch, num_items_in_batch=60).loss
        same(sum(halves), whole)
    s.model.eval()


def test_what_cannot_be_honoured_is_refused_by_name(s):
    m, row, n = s.model, s.rows[0], s.rows[0].shape[1]
    ones, embedded = torch.ones_like(row), m.get_input_embeddings()(row)
    returned = {"output_attentions": True, "return_dict_in_generate": True}
    holes, right, empty = ones.clone(), s.mask.flip(1), s.mask.clone()
    holes[0, 3] = empty[1] = 0
    for words, options in (
        ("attentoin_mask", {"attentoin_mask": ones}),
        ("made_up", {"made_up": None}),
        ("input_ids or inputs_embeds", {"inputs_embeds": embedded}),
        ("output_attentions", {"output_attentions": True}),
        ("token_type_ids", {"token_type_ids": ones}),
        ("DynamicCache", {"past_key_values": DynamicCache()}),
        ("tuple", {"past_key_values": ()}),
        ("logits_to_keep", {"labels": row, "logits_to_keep": 1}),
        ("between tokens", {"attention_mask": holes}),
        ("0 and 1", {"attention_mask": ones * 2}),
        ("attention_mask [1, 1, ", {"attention_mask": torch.ones(1, 1, n, n)}),
        ("attention_mask dict", {"attention_mask": {"full": ones}}),
    ):
        refused(words, m, row, **options)
    refused("input_ids or inputs_embeds", m)
    refused("output_attentions", s.generate, row, **returned)
    refused("no tokens", m, row[:, :0])
    refused("shift_labels", m, s.batch, attention_mask=s.mask, shift_labels=s.batch)
    read = {"labels": s.batch, "past_key_values": m(s.batch)[CACHE], "use_cache": False}
    later = torch.cat([torch.ones_like(right), right], 1)
    refused("pad on the left", m, s.batch, attention_mask=later, **read)
    refused("pad on the left", m, s.batch, attention_mask=right, labels=s.batch, use_cache=True)
    for call in (m, s.generate):
        for options in ({}, {"use_cache": False}):
            refused("pad on the left", call, s.batch, attention_mask=right, **options)
            refused("without tokens", call, s.batch, attention_mask=empty, **options)
    # A cache that was lost, or of other rows.
    refused("attention_mask [1, ", m, row[:, -1:], attention_mask=ones)
    refused("position_ids", m, row[:, -1:], position_ids=torch.tensor([[n - 1]]))
    cache = m(s.batch, attention_mask=s.mask)[CACHE]
    refused("has 3 rows", m, row, past_key_values=cache)
    whole = torch.ones(3, s.batch.shape[1] + 1)
    refused("cache's", m, s.batch[:, :1], past_key_values=cache, attention_mask=whole)
    refused("pass one", m, row, past_key_values=cache, cache=cache)
    for call in (cache.crop, cache.update):
        refused("takes no tokens back", call, -1)


def test_generation_modes_are_right_or_refused(s):
    row, kinds = s.rows[0], ("static", "offloaded_static", "offloaded", "quantized", "paged")
    for kind in (*kinds, "sliding_window", "made_up"):
        refused("ache", s.generate, row, cache_implementation=kind)
    tokenizer = AutoTokenizer.from_pretrained(s.folder, trust_remote_code=True)
    assert s.generate(row, stop_strings=["a"], tokenizer=tokenizer).shape[1] > row.shape[1]
    if RELEASE > [4, 50]:
        found = s.generate(row, cache_implementation="dynamic")
        assert (found[0, -COUNT:] == s.expected[0]).all()
    for words, options in (
        ("DynamicCache", {"past_key_values": DynamicCache()}),
        ("stateful", {"prompt_lookup_num_tokens": 3}),
        ("stateful", {"assistant_model": s.model}),
        ("made_up", {"made_up": 1}),
        ("", {"penalty_alpha": 0.6, "top_k": 4}),
    ):
        refused(words, s.generate, row, **options)
    if hasattr(s.model, "generate_batch"):
        inputs = {"inputs": [row[0].tolist()], "max_new_tokens": 3}
        refused("without paging", s.model.generate_batch, **inputs)


def test_a_cache_is_copied_reordered_and_repeated(s):
    cache = s.model(s.batch, attention_mask=s.mask)[CACHE]
    order = torch.tensor([2, 0, 0, 1])
    cache.reorder_cache(order)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1, 2, 7]))
    tokens = torch.tensor([[3], [4], [5]])
    found = s.model(tokens, past_key_values=cache).logits[:, -1]
    for i, row in enumerate((2, 0, 1)):
        whole = torch.cat([s.rows[row], tokens[i : i + 1]], 1)
        same(found[i], s.model(whole).logits[0, -1])
    cache.reset()
    same(s.model(s.rows[0], past_key_values=cache).logits, s.model(s.rows[0]).logits)


def test_a_copy_is_the_same_model(s):
    expected = s.model(s.batch, attention_mask=s.mask).logits
    with tempfile.TemporaryDirectory() as folder:
        s.model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        same(again(s.batch, attention_mask=s.mask).logits, expected, 0)
        tied = again.lm_head.weight is again.get_input_embeddings().weight
        assert tied == again.config.tie_word_embeddings
    size = again.config.vocab_size
    again.resize_token_embeddings(size + 3)
    assert again.config.vocab_size == size + 3
    same(again(s.batch, attention_mask=s.mask).logits[..., :size], expected)
    wide = copy.deepcopy(s.model).to(torch.bfloat16)
    out = wide(s.batch, attention_mask=s.mask)
    assert out.logits.dtype == torch.bfloat16
    same(out.logits.float(), expected, 0.1)
    assert wide.generate(s.batch, attention_mask=s.mask, max_new_tokens=8).shape[1] > 8
    fresh = AutoModelForCausalLM.from_config(s.model.config, trust_remote_code=True)
    assert fresh(s.rows[0]).logits.isfinite().all()


def test_a_tokenizer_pads_and_a_pipeline_generates(s):
    tokenizer = AutoTokenizer.from_pretrained(s.folder, trust_remote_code=True)
    texts = ["one", "a longer text", "two words"]
    options = {"max_new_tokens": 6, "do_sample": False}
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert batch["attention_mask"].sum(1).tolist() == [4, 14, 10]
    assert batch["attention_mask"][:, -1].all()
    found = s.model.generate(**batch, **options)
    for text, row in zip(texts, found, strict=True):
        single = s.model.generate(**tokenizer(text, return_tensors="pt"), **options)[0]
        one, other = (tokenizer.decode(x, skip_special_tokens=True) for x in (row, single))
        assert one == other
    write = pipeline("text-generation", model=str(s.folder), trust_remote_code=True)
    options["return_full_text"] = False
    alone = [write(x, **options)[0]["generated_text"] for x in texts]
    assert alone == [x[0]["generated_text"] for x in write(texts, batch_size=3, **options)]


def test_another_version_is_refused_or_warned_of(s):
    library, code = sys.modules["transformers"], (s.folder / "modeling_ttcd.py").read_text()
    found = library.__version__
    try:
        library.__version__ = "4.46.0"
        refused("4.46.0", exec, code, {"__name__": "x"})
        library.__version__ = "99.1.dev0"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(code, {"__name__": "x"})
        assert "not 99.1" in str(caught[-1].message), caught
    finally:
        library.__version__ = found


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tests = {name: call for name, call in globals().items() if name.startswith("test_")}
    wrong = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError)
    failed = 0
    for folder in map(Path, sys.argv[1:]):
        subject = Subject(folder)
        for name, call in tests.items():
            try:
                with torch.no_grad():
                    call(subject)
            except wrong:
                failed += 1
                print(transformers.__version__, folder.name, name, traceback.format_exc())
    print(f"{len(tests)} properties, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
