"""`ttcd`: its commands are the modules, its recipes are found, a shell completes it."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import commands
import pytest
from commands import ROOT

from ttcd_jax.commands.cli import CONFIG_DIR
from ttcd_jax.commands.completion import candidates
from ttcd_jax.commands.main import COMMANDS
from ttcd_jax.commands.study.runs import StudyConfig
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig

FIRST_SECONDS = 2.0
_INSPECTED = "--run_dir=x", f"--text={ROOT / 'README.md'}"
# Lines of commands that are right as far as they are checked before something slow is imported.
LINES = {
    "launch": "--gin=quickstart.gin",
    "plan": "--gin=quickstart.gin",
    "evaluate": "--run_dir=x --task=ppl",
    "inspect": " ".join((*_INSPECTED, "--output=y")),
    "report": "--run_dir=x",
    "generate": "--run_dir=x --prompt_file=/dev/null",
    "convert": "import --format=gguf x y",
    "prepare": "--help",
    "study": "--gin=study/small.gin",
    "lm_eval": "--help",
    "show": "quickstart.gin",
}
# In the place of the package.
JAX = """
import sys, time
slow = {"flax", "lm_eval", "matplotlib", "orbax", "tensorstore", "torch"}
print(sorted(slow & {*sys.modules}), time.process_time(), file=sys.stderr)
sys.exit(9)
"""
COMPLETED = {
    "la": ["launch"],
    "launch --gin=compare/lac": ["compare/lact.gin"],
    "study --gin=study/lang": ["study/language.gin"],
    "show recal": ["recall.gin", "recall_swa.gin"],
    "evaluate --task=rul": ["ruler"],
    "plan --dry": ["--dry_run"],
    "convert exp": ["export"],
    "launch --gin='": [],
}


def _ttcd(*arguments, **options):
    return commands.run("main", *arguments, **options)


def test_a_command_of_ttcd_is_the_module_of_that_name():
    assert "\n    ttcd plan --gin=" in _ttcd("plan", "--help").stdout
    for name, module in (("launch", "launch"), ("prepare", "prepare_data"), ("study", "study")):
        assert _ttcd(name, "--help").stdout == commands.output(module, "--help")
    assert "values of" not in commands.output("study", "--gin=study/small.gin", "--help")
    line = ("--gin=recall.gin", "--topology=absent")
    planned = commands.refused("main", "plan", *line)
    assert planned == commands.refused("launch", *line, "--dry_run")
    assert planned != commands.refused("launch", *line)
    listed = _ttcd().stdout
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    started = [sys.executable, "-m", "ttcd_jax", "--version"]
    assert re.fullmatch(r"ttcd \d+\.\d+\.\d+\n", subprocess.check_output(started, text=True))


def test_what_is_missing_or_misspelt_is_named():
    output = f"--output={__file__}"
    to_a_file = ("report", "--run_dir=x", output), ("inspect_text", *_INSPECTED, output)
    commands.refuse(
        [
            (("main", "lanch"), 2, "no command 'lanch'; did you mean 'launch'?"),
            (("main", "xyz"), 2, "no command 'xyz'; there are launch, plan, "),
            (("main", "recipes", "quickstart", "zebra"), 2, "all of the words quickstart zebra"),
            (("launch",), 2, "--gin is missing. One of `ttcd recipes`, or a path."),
            (("report",), 2, "JSON file of a benchmark; repeat.\n"),
            (("launch", "--gin=study/small.gin"), 2, "StudyConfig is for ttcd study, not"),
            (("study", "--gin=recall.gin"), 2, "RunConfig is for ttcd launch"),
            (("launch", "--gin=recal.gin"), 2, "did you mean recall.gin or study/recall.gin?\n"),
            (("launch", "--gin=tiny.gin"), 2, "; `ttcd recipes` lists them"),
            *((line, 2, f"--output={__file__} is a file: name a folder") for line in to_a_file),
        ]
    )


@pytest.mark.parametrize(("name", "root"), [("evidence", RunConfig), ("study/small", StudyConfig)])
def test_what_show_prints_is_the_recipe_whole(name, root, tmp_path):
    shown = commands.output("show", f"{name}.gin")
    (tmp_path / "whole.gin").write_text(shown)
    files = [str(tmp_path / "whole.gin"), f"{name}.gin"]
    whole, recipe = (load_config(root, file, config_dir=CONFIG_DIR) for file in files)
    assert whole == recipe
    places = re.findall(r"(?m)^(\w+\.\w+) = .*# (\S+):(\d+)$", shown)
    assert len(places) > 8
    for field, file, number in places:
        assert field in (CONFIG_DIR / file).read_text().splitlines()[int(number) - 1]
    if root is RunConfig:
        changed = commands.output("show", "evidence.gin", "--param=RunConfig.steps=7")
        assert re.search(r"(?m)^RunConfig.steps = 7 +# --param RunConfig.steps=7$", changed)


def test_show_names_the_scope_of_a_binding_and_default_settings():
    mixture = commands.output("show", "study/swa.gin")
    assert re.search(r"(?m)^CorpusConfig.path = 'books' +# data/\S+:\d+ \(of books\)$", mixture)
    muon = commands.output("show", "study/width_256_muon.gin")
    assert re.search(r"(?m)^MuonSettings.momentum = 0.95$", muon)


def test_recipes_are_found_by_all_words():
    words = (("Evidence", "DELTA"), ())
    lines = [_ttcd("recipes", *x).stdout.splitlines() for x in words]
    found, names = ([x.split()[2].removeprefix("--gin=") for x in part] for part in lines)
    assert {"evidence_delta.gin"} < {*found} < {*names}
    assert 100 < len(names) == len({*names})
    assert all((CONFIG_DIR / name).is_file() for name in names)


def test_bash_completes_commands_flags_recipes_and_tasks():
    script = [f'ttcd() {{ {sys.executable} -m ttcd_jax "$@"; }}; eval "$(ttcd completion bash)"']
    script.append("complete -p ttcd")
    for line in COMPLETED:
        script.append(f"COMP_LINE={shlex.quote(f'ttcd {line}')}; COMP_POINT=${{#COMP_LINE}}")
        script.append("_ttcd; echo ${COMPREPLY[@]}")
    options = {"text": True, "cwd": ROOT, "env": commands.cpu_environment()}
    done = subprocess.check_output(["bash", "-c", "\n".join(script)], **options)
    first, *found = done.splitlines()
    assert "-F _ttcd ttcd" in first
    assert found == [" ".join(words) for words in COMPLETED.values()]
    assert commands.output("completion", "bash", "ttcd").split()[:2] == ["launch", "plan"]
    for name in ("launch", "evaluate", "generate", "convert"):
        flags = {re.match(r"--(\w+)", word)[1] for word in candidates([name, "-"])} - {"help"}
        shown = commands.output(name, "--help")
        assert flags == {*re.findall(r"(?m)^  --(?:\[no\])?(\w+):", shown)}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is absent")
def test_zsh_completes_words_and_files():
    """Its completion system is stood in for by what the script calls of it."""
    script = [f'ttcd() {{ {sys.executable} -m ttcd_jax "$@"; }}', "compdef() { print $@; }"]
    script += ["compadd() { [[ $1 == -S ]] && shift 2; print -rn -- ${@[2,-1]}; }"]
    script += ["compset() { print -n files; }", "_files() {}", 'eval "$(ttcd completion zsh)"']
    for words in ("launch '--gin=compare/lac'", "plan '--dry'", "evaluate '--run_dir=/'"):
        script.append(f"words=(ttcd {words}) CURRENT=3 PREFIX={words.split()[1]}; _ttcd; print")
    options = {"text": True, "cwd": ROOT, "env": commands.cpu_environment()}
    found = subprocess.check_output(["zsh", "-fc", "\n".join(script)], **options).splitlines()
    assert found == ["_ttcd ttcd", "--gin=compare/lact.gin", "--dry_run", "files"]


@pytest.mark.parametrize("line", ["--help", "recipes"])
def test_a_reader_that_is_gone_is_no_error(line):
    reader, writer = os.pipe()
    os.close(reader)
    with commands.start("main", *line.split(), stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (141, "")


def test_every_command_says_what_it_does_before_anything_slow_is_imported(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(JAX)
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "kernels")))
    environment = commands.cpu_environment(PYTHONPATH=path)
    assert LINES.keys() == COMMANDS.keys() - {"recipes", "completion"}
    for name, line in LINES.items():
        program = [sys.executable, "-m", "ttcd_jax", name, *line.split()]
        options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
        result = subprocess.run(program, **options)
        said, imported, *rest = result.stderr.splitlines() or [""]
        assert (result.returncode, said, rest) == (9, "loading JAX", []), (name, result.stderr)
        slow, seconds = imported.rsplit(maxsplit=1)
        assert (slow, float(seconds) < FIRST_SECONDS) == ("[]", True), (name, imported)
