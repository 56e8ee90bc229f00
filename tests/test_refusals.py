"""What is refused, in a line with numbers and remedy: configurations, flags, files of a run."""

import dataclasses
import json
import math
import os
import pty
import shutil
import typing
from functools import partial
from pathlib import Path

import commands
import pytest
import tiny_run
from checks import refused
from flax import nnx
from small_models import FLOAT64, byte_model, config_of, recipe, small_attention

from ttcd_jax.config import Config
from ttcd_jax.errors import UserError
from ttcd_jax.inference.sampling import SamplingConfig
from ttcd_jax.methods.delta_net import DeltaNetConfig, DeltaRuleConfig, DeltaSublayerConfig
from ttcd_jax.methods.ipttcd import IPTTCDMLP, IPTTCDConfig, MemoryConfig
from ttcd_jax.methods.lact import LaCTConfig, LaCTMemoryConfig
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.attention import AttentionConfig, DualWindowConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.nn.rope import RopeConfig, YarnConfig
from ttcd_jax.precision import Precision
from ttcd_jax.run.bindings import reachable_classes
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import RunDirectory, load_run
from ttcd_jax.run.training import train_run
from ttcd_jax.train.groups import rate_factors
from ttcd_jax.train.hardware import parse_topology
from ttcd_jax.train.optimizer import MuonSettings, OptimizerConfig
from ttcd_jax.train.profile import step_window


def in_place(**memory):
    config = IPTTCDConfig(mlp=MLPConfig(dim=6, hidden_dim=8), memory=MemoryConfig(**memory))
    return IPTTCDMLP(config, rngs=nnx.Rngs(0))


def lact(attention=(), **memory):
    return LaCTConfig(
        attention=small_attention(**{"dim": 8, "num_heads": 2} | dict(attention)),
        memory=LaCTMemoryConfig(**{"num_fast_heads": 2, "chunk_size": 4, "low_rank": 2} | memory),
    )


def model(**changes):
    fields = {"vocab_size": 11, "dim": 8, "num_layers": 4, "num_heads": 2, "mlp_dim": 12}
    fields |= {"window": 8, "student_window": 4, "method": "swa"}
    return TransformerConfig(**fields | changes)


def muon(kind="muon", **settings):
    return OptimizerConfig(kind=kind, settings=MuonSettings(**settings))


def rates(rates):
    return rate_factors(config_of("ipttcd", precision=Precision()), rates)


def gin(name, binding):
    return recipe(f"{name}.gin", binding)


FOLDING = {"folds_state": True, "resets_at_document": False}
TARGETS = {"method": "ipttt", "fast_layers": (0,)}
DELTA = {"dim": 6, "num_heads": 2, "head_dim": 4, "precision": FLOAT64}
DELTA |= {"rule": DeltaRuleConfig(value_expansion=1.3)}
BEFORE = DeltaRuleConfig(conv_init="previous")
WINDOWS = {"attention": small_attention(window=4), "student_window": 5}
# The call, its arguments, and what the line must name.
CASES = [
    (small_attention, {"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads 3|num_heads 4"),
    (small_attention, {"head_dim": 5}, "head_dim 5|odd"),
    (DualWindowConfig, WINDOWS, "student_window 5|window 4"),
    (YarnConfig, {"factor": 0.5, "original_length": 64}, "factor 0.5|at least 1"),
    (YarnConfig, {"factor": 2.0, "original_length": 8, "slow_turns": 64.0}, "must be"),
    (RopeConfig, {"base": 1.0}, "base 1.0|greater than 1"),
    (in_place, {"student_conv_init": "previous", "num_taps": 1}, "num_taps=1|use 2"),
    (in_place, {"half_lives": (8.0,) * 4}, "4 half_lives|6 columns"),
    (in_place, {"output": "teacher_raw", "has_teacher_conv": False}, "'teacher_raw'|use 'teacher'"),
    (in_place, {"gate": "teacher", "has_token_rate": False}, "'teacher'|set has_token_rate=True"),
    (partial(in_place, error="learned"), {}, "'learned'|set has_proj=False"),
    (in_place, {"folds_state": True}, "folds_state|set resets_at_document=False"),
    (in_place, {"form": "attention", "orthogonalizes_updates": True}, "'attention'|orthogonalizes"),
    (in_place, {"corrects_errors": True, "form": "blocked"}, "no other form|'auto'"),
    (in_place, {"corrects_errors": True, "normalizes_keys": False}, "set normalizes_keys=True"),
    (in_place, {"corrects_errors": True, "renorm_chunks": 4}, "corrects_errors|renorm_chunks"),
    (in_place, {"corrects_errors": True, "orthogonalizes_updates": True}, "orthogonalizes_updates"),
    (in_place, {"half_lives": (0.0,)}, "half_lives"),
    (in_place, {"half_lives": (64.0,), "renorm_chunks": 4}, "renorm_chunks|set one of them"),
    (in_place, {"decay": "gated"}, "'gated'|set half_lives="),
    (in_place, FOLDING | {"half_lives": (8.0,)}, "folds_state|set half_lives=()"),
    (DeltaNetConfig, DELTA, "head_dim 4|value_expansion 1.3|5.2"),
    (DeltaNetConfig, DELTA | {"rule": BEFORE.replace(num_taps=1)}, "num_taps=1|use 2"),
    (DeltaSublayerConfig, DELTA | {"rule": BEFORE}, "no convolution|or take method gated_deltanet"),
    (lact, {"attention": {"num_kv_heads": 1}}, "num_kv_heads 1|num_heads 2"),
    (lact, {"attention": {"head_dim": 2}}, "num_heads 2|head_dim 2|dim 8"),
    (lact, {"attention": {"has_qk_norm": True}}, "set memory.has_qk_norm"),
    (lact, {"attention": {"has_qkv_bias": True}}, "set memory.has_qkv_bias"),
    (lact, {"num_fast_heads": 3}, "num_fast_heads 3|dim 8"),
    (lact, {"hidden_expansion": 0.2}, "hidden_expansion 0.2|fast head of"),
    (model, {"num_layers": 0}, "num_layers 0|in 1 .. 10,000"),
    (model, {"num_heads": 3}, "num_heads 3|dim 8|set head_dim"),
    (model, {"num_kv_heads": 3, "num_heads": 4}, "num_kv_heads 3|num_heads 4"),
    (model, {"fast_layers": (1, 4)}, "fast_layers [4]|0 .. 3"),
    (model, {"fast_layers": (-1,)}, "fast_layers [-1]|0 .. 3"),
    (model, {"fast_layers": (1, 1)}, "fast_layers (1, 1)|twice"),
    (model, {"method": "ipttcd", "fast_layers": (1,), "student_window": 9}, "student_window 9|8"),
    (model, {"method": "full"}, "'full'|no window|8"),
    (model, {"window": None}, "'swa'|needs a window"),
    (model, {"method": "mamba"}, "'mamba'|there are"),
    (model, {"method": "iptcd"}, "did you mean 'ipttcd'?"),
    (model, {"method": "ipttcd"}, "no layer with a memory|set fast_layers, e.g. (0,)"),
    (model, {"method": "deltanet_hybrid"}, "no layer with a memory"),
    (model, {"fast_layers": (1,)}, "'swa' has no memory|(1,)"),
    (model, {"method": "lact", "fast_layers": (1,)}, "memory in all layers"),
    (model, {"memory": MemoryConfig()}, "'swa'|MemoryConfig|set memory = None"),
    (model, TARGETS | {"memory": MemoryConfig()}, "set memory = @TargetMemoryConfig()"),
    (model, {"method": "lact", "num_heads": 4, "num_kv_heads": 2}, "num_kv_heads 2|num_heads 4"),
    (model, {"method": "lact", "dim": 6, "num_heads": 1}, "num_fast_heads 4|dim 6"),
    (model, {"method": "deltanet", "memory": DeltaRuleConfig(value_expansion=0.3)}, "whole number"),
    (SamplingConfig, {"top_p": 1.1}, "SamplingConfig.top_p 1.1 must be "),
    (SamplingConfig, {"min_p": 1.5}, "SamplingConfig.min_p 1.5 must be "),
    (SamplingConfig, {"seed": 2**32}, "SamplingConfig.seed 4294967296 must be "),
    (muon, {"kind": "sgd"}, "'sgd'|adamw, muon"),
    (muon, {"kind": "adamw"}, "'adamw'|MuonSettings"),
    (muon, {"momentum": 1.0}, "momentum 1.0|[0, 1)"),
    (muon, {"orthogonalization": "float16"}, "orthogonalization|'float64'"),
    (OptimizerConfig, {"rates": (("head", -1.0),)}, "rates|0 or more"),
    (rates, {"rates": (("layers/*/mlp/prj", 0.5),)}, "'layers/*/mlp/prj'|mlp/proj"),
    (rates, {"rates": (("*", 0.0),)}, "freezes every parameter"),
    (parse_topology, {"text": "h10x8"}, "did you mean 'h100'|a100, h100, h200, b200"),
    *(
        (parse_topology, {"text": text}, "as in 'h100x64'")
        for text in ("h100", "h100x0", "64xh100", "h100x" + "9" * 5000)
    ),
    (parse_topology, {"text": "h100x1000000"}, "1000000 devices|4096"),
    (parse_topology, {"text": "h100x12"}, "12 devices|nodes of 8"),
    *(
        (step_window, {"text": text, "steps": 24}, f"'{text}'|START:STOP|<= 24")
        for text in ("", "3", "2:2", "4:2", "-1:2", "a:b", "2:25", "2:4:6", ":4")
    ),
    *(
        (gin, {"name": name, "binding": binding}, words)
        for name, binding, words in (
            ("text", "TEXT=''", "CorpusConfig.path is empty"),
            ("ipttcd_760m", "RECORDS='GS://bucket/data'", "mount the bucket"),
            ("ipttcd_760m", "RecordsConfig.folders=('s3://a', 'b')", "mount the bucket"),
            ("recall", "TransformerConfig.num_layers=1000000000000", "1 .. 10,000"),
            ("recall", "RunConfig.batch_size=1000000000", "16,777,216"),
            ("recall", "STEPS=2147483648", "in 1 .. 2^31 - 1"),
            ("recall", "RunConfig.seed=4294967296", "RunConfig.seed|in 0 .. 2^32 - 1"),
            ("recall", "RunConfig.accumulation_steps=3", "3|32|accumulation_steps"),
            ("recall", "RunConfig.spike_factor=1", "spike_factor|above 1, at most 1e6, or None"),
        )
    ),
]


@pytest.mark.parametrize(("call", "arguments", "words"), CASES)
def test_what_does_not_fit_is_refused_in_one_line(call, arguments, words):
    refused(words, call, **arguments)


# The fields for which 0 has a meaning.
ZERO = {
    *("max_skipped_steps", "memory_warmup", "seed", "init_std", "norm_eps", "qk_norm_eps", "eta"),
    *("beta1", "beta2", "weight_decay", "momentum", "zero_slope", "warmup", "decay_ratio"),
    *("floor_ratio", "offset", "offset_max", "num_fewshot", "bos_id", "eos_id"),
    *("validation_percent", "validation_files", "temperature", "min_p", "sinks", "sink_tokens"),
    *("layer", "start", "num_between", "num_before", "data_workers"),
}


def test_no_number_is_negative_or_endless_and_0_is_one_where_it_has_a_meaning():
    more = (SamplingConfig, AttentionConfig, DualWindowConfig, MLPConfig)
    classes = {*reachable_classes(RunConfig).values(), *more}
    taken = {}
    for cls in (cls for cls in classes if cls.__module__.startswith("ttcd_jax.")):
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            options = {"bases": (Config,), "frozen": True, "kw_only": True}
            alone = dataclasses.make_dataclass("Alone", [("x", hints[field.name])], **options)
            for value in (0, -1, -0.5, math.nan, math.inf, 2**63, 10**400):
                try:
                    alone(x=value)
                except UserError:
                    continue
                taken.setdefault(str(value)[:20], set()).add(field.name)
    assert taken == {"0": ZERO, "-1": {"data", "fsdp", "seq", "tensor"}}


@pytest.mark.parametrize("path", ["az://b/x", Path("gs:///x"), Path("file:///x"), "abfss://b@c/x"])
@pytest.mark.parametrize(
    "call",
    [RunDirectory, load_run, lambda path: train_run(gin("recall", "RunConfig.steps=1"), path)],
)
def test_the_library_refuses_buckets_and_addresses(call, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"mount the bucket|BUCKET/NAME|give its path alone"):
        call(path)
    assert list(tmp_path.iterdir()) == []


RECALL = tiny_run.flags("recall.gin", *tiny_run.RECALL)
MODEL = byte_model(has_tied_head=False, memory=MemoryConfig(chunk_size=4))
DEEP = '{"a":' * 50_000
# The content of config.json, or what replaces some of its values; status, words.
CONFIGS = [
    ("null", 3, "is a NoneType, not an object"),
    ('["x"]', 3, "is a list, not an object"),
    (DEEP, 3, "nested too deeply"),
    ("{}", 2, "is a run directory of format 1, this version reads 3"),
    ('{"format": 2}', 2, "no data"),
    ('{"format": 3}', 4, "config.json was edited or damaged since it was written: restore a"),
    ({"model": None}, 2, "no model"),
    ({"model": {"type": "TransformerConfig"}}, 2, "TransformerConfig lacks"),
    ({"data": {"type": "os.system"}}, 2, "without a tokenizer"),
    ({"data": {"type": "TextConfig"}}, 2, "TextConfig lacks corpus"),
    ({"data": {"type": "RecordsConfig"}}, 2, "paths"),
]
RECORD = {"distance": "1-8", "queries": 4, "accuracy": 0.5}
RESULTS = {"task": "recall", "label": "on", "series": {"on": [RECORD]}, "chance": 0.25}
BAD = {"chance": 0.25}, *(RESULTS | {"series": x} for x in ({}, {"on": []}, {"on": [{}]}))
BAD_RESULTS = (*map(json.dumps, BAD), DEEP, "null")
PPL = "evaluate --run_dir=RUN --task=ppl --text=BOOK"
GENERATE = "generate --run_dir=RUN"
# A command (launch: with the flags of a tiny run), its status, what the line must name. FOLDER is
# empty, and stays so.
LINES = [
    ("launch --param=MemoryConfig.chunk_size=4096", 2, "chunk_size 4096"),
    (f"launch --run_dir=FOLDER/{'x' * 300}", 2, "File name too long"),
    ("launch --profile=2:281", 2, "'2:281' is not START:STOP with 0 <= START < STOP <= 24"),
    ("launch --topology=h100x8", 2, "--topology describes the devices of a plan"),
    ("launch --param=TransformerConfig.vocab_size=2000000000", 6, "GiB per device"),
    ("launch --param=TransformerConfig.dim=100000000", 6, "GiB per device"),
    ("launch --param=RecallConfig.num_slots=100000000000", 6, "--dry_run"),
    ("launch --gin=text.gin --param=TEXT='FOLDER'", 3, "FOLDER"),
    ("launch --gin=text.gin", 3, """no file or folder at text: |--param="TEXT='PATH'\""""),
    (f"{PPL} --seq_len=-4", 2, "Perplexity.seq_len -4"),
    (f"{PPL} --seq_len=1000000000", 3, "1 .. 1048576"),
    (f"{PPL} --batch_size=1000000000", 2, "1 .. 65,536"),
    ("evaluate --run_dir=FOLDER --task=ppl", 2, "FOLDER is not a run directory: it"),
    (GENERATE, 2, "nothing to do: pass --prompt_file"),
    (f"{GENERATE} --prompt_file=absent", 3, "--prompt_file=absent cannot be read: No such file"),
    (f"{GENERATE} --prompt_file=/dev/zero", 3, "more than 268435456 bytes, the lo"),
    (f"{GENERATE} --prompt_file=- --prompt_file=-", 2, "standard input is read once"),
    (f"{GENERATE} --prompt_file=- --load_state=x --max_length=9", 2, "--load_state has its own"),
    (f"{GENERATE} --prompt_file=- --max_length=0", 2, "--max_length=0: 0 is not a positive"),
    (f"{GENERATE} --chat --memory=frozen", 2, "are for texts, not for the conversation"),
    (f"{GENERATE} --prompt_file=- --save_state=tests", 2, "tests exists and is not an empty fol"),
    (f"{GENERATE} --prompt_file=- --load_memory=x --load_state=y", 2, "--load_memory begins a te"),
    (f"{GENERATE} --prompt_file=- --prompt_file=BOOK --save_memory=x", 2, "memory of one text"),
    (f"{GENERATE} --prompt_file=- --memory=published --save_memory=x", 2, "writes no memory"),
    (f"{GENERATE} --prompt_file=- --top_p=0.5", 2, "pass a --temperature above 0"),
    (f"{GENERATE} --prompt_file=- --output=FOLDER", 2, "--output=FOLDER must be a file in a fold"),
    (f"{GENERATE} --prompt_file=- --output=FOLDER/absent/x", 2, "must be a file in a fold"),
    (f"{GENERATE} --prompt_file=- --memory=none", 2, "memory"),
    (f"{GENERATE} --prompt_file=- --step=8", 4, "there is no checkpoint step 8"),
    ("report --run_dir=RUN --output=FOLDER/page", 2, "nothing was measured in"),
    ("report --run_dir=FOLDER/absent", 2, "nothing was measured in FOLDER/absent"),
    ("report --run_dir=GOOD --output=BOOK", 2, "BOOK is a file"),
    ("report --run_dir=GOOD --run_dir=FOLDER", 2, "nothing was measured in FOLDER:"),
    ("convert import --format=reference FOLDER/absent FOLDER/run", 3, "at FOLDER/absent"),
    ("convert grow --format=reference RUN FOLDER", 2, "'grow' is neither import nor export"),
    ("convert import --format=reference", 2, "FROM is missing"),
    *((f"{PPL} --run_dir=GIVEN/{i}", *ending) for i, (_, *ending) in enumerate(CONFIGS)),
    *((f"report --run_dir=GIVEN/bad{i}", 3, "results.json") for i in range(len(BAD_RESULTS))),
]


def _generates_escapes(params):
    """Of an odd and of an even sum one control character is the likeliest."""
    direction = params["head"][27]
    params["head"] = (params["head"] * 0).at[27].set(direction).at[28].set(-direction)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A model that generates control characters alone, in a folder whose name has some."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_run.save_text_model(folder / "run\x1b[31m", MODEL, _generates_escapes)
    (folder / "book.txt").write_text("It was a dark and stormy night. " * 8)
    return folder / "run\x1b[31m"


def test_a_command_refuses_with_a_line_and_a_status_and_writes_nothing(run_dir, tmp_path):
    given, empty = tmp_path / "given", tmp_path / "empty"
    empty.mkdir()
    for number, (content, *_) in enumerate(CONFIGS):
        shutil.copytree(run_dir, given / str(number))
        if isinstance(content, dict):
            stored = json.loads((run_dir / "config.json").read_text()) | content | {"format": 2}
            content = json.dumps({name: stored[name] for name in stored if name != "sha256"})
        (given / str(number) / "config.json").write_text(content)
    results = {f"bad{i}": content for i, content in enumerate(BAD_RESULTS)}
    for name, content in (results | {"good": json.dumps(RESULTS)}).items():
        (given / name / "eval/recall").mkdir(parents=True)
        (given / name / "eval/recall/results.json").write_text(content)
    places = {"RUN": run_dir, "BOOK": run_dir.parent / "book.txt", "FOLDER": empty}
    places |= {"GOOD": given / "good", "GIVEN": given}

    def placed(text):
        for name, path in places.items():
            text = text.replace(name, str(path))
        return text

    rows = []
    for line, status, words in LINES:
        command, *arguments = placed(line).split(" ")
        if command == "launch":
            base = tiny_run.flags("text.gin") if "text.gin" in line else RECALL
            arguments = [*base, f"--run_dir={tmp_path / 'run'}", *arguments]
        rows.append(([command, *arguments], status, placed(words)))
    commands.refuse(rows)
    assert [*empty.iterdir(), *(tmp_path / "run").rglob("*.*")] == []


def test_control_characters_reach_no_terminal(run_dir, tmp_path):
    """The name of the run and the text that it generates are escaped; a file gets the text."""
    book = run_dir.parent / "book.txt"
    line = ("generate", f"--run_dir={run_dir}", f"--prompt_file={book}", "--max_new_tokens=6")
    assert set(commands.output(*line).rstrip("\n")) <= {"\x1b", "\x1c"}
    ours, its = pty.openpty()
    with commands.start(*line, stdout=its, stderr=its) as process:
        assert process.wait(timeout=100) == 0
    os.close(its)
    shown = os.read(ours, 10_000).decode()
    assert "\\x1b" in shown or "\\x1c" in shown
    assert not {"\x1b", "\x1c"} & set(shown)
    place = f"--run_dir={tmp_path / 'run\x1b[31m'}"
    output = commands.output("launch", *RECALL, "--param=RunConfig.steps=1", place)
    assert "run\\x1b[31m" in output
    assert "\x1b" not in output
