"""The rules of docs/house_style.md that a program can check, and that shapes are checked at all."""

import ast
import dataclasses
import functools
import graphlib
import re
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from ttcd_jax.nn.linear import rms_norm
from ttcd_jax.run.bindings import reachable_classes
from ttcd_jax.run.config import RunConfig

ROOT = Path(__file__).parent.parent
REFEREES = ("tests/parity", "tests/soak", "tests/machine_code")
SOURCES = sorted(
    path
    for folder in ("ttcd_jax", "kernels", "experiments", *REFEREES)
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.startswith("test_")
)
FILES = sorted({*SOURCES, *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")})
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 60, 150

# Triton and Mosaic compile these: their arguments are pointers and compile-time constants.
DEVICE_CODE = ("columns.py", "triton_kernels.py", "mosaic_kernel.py")

# A library may raise the bare class, or a class that it hides, which is caught alone.
BARE = (
    "if type(error) is not Exception:",
    "if type(error) is not Exception and type(error).__name__ != 'PanicException':",
)
# Who may import whom, within the project.
LOW = (
    *("ttcd_jax.allocation", "ttcd_jax.axes", "ttcd_jax.config", "ttcd_jax.errors"),
    *("ttcd_jax.files", "ttcd_jax.precision", "ttcd_jax.registry", "ttcd_jax.tokens"),
    *("ttcd_jax.terminal", "ttcd_jax.units", "ttcd_kernels"),
)
SHARDING = ("ttcd_jax.sharding",)
NN = (*SHARDING, "ttcd_jax.nn")
MEMORY = (*NN, "ttcd_jax.memory")
METHODS = (*MEMORY, "ttcd_jax.methods")
MODELS = (*METHODS, "ttcd_jax.models")
TRAIN = (*MODELS, "ttcd_jax.data", "ttcd_jax.train")
INFERENCE = (*TRAIN, "ttcd_jax.inference")
MEASURE = (*INFERENCE, "ttcd_jax.measure")
TASKS = (*MEASURE, "ttcd_jax.tasks")
INTEROP = (*TASKS, "ttcd_jax.interop")
OURS = ("ttcd_jax", "ttcd_kernels", "experiments", "tests")
MAY_IMPORT = {
    "kernels": ("ttcd_kernels",),
    "ttcd_jax/sharding": SHARDING,
    "ttcd_jax/nn": NN,
    "ttcd_jax/memory": MEMORY,
    "ttcd_jax/methods": METHODS,
    "ttcd_jax/models": MODELS,
    "ttcd_jax/data": ("ttcd_jax.data",),
    "ttcd_jax/train": TRAIN,
    "ttcd_jax/inference": INFERENCE,
    "ttcd_jax/measure": MEASURE,
    "ttcd_jax/tasks": TASKS,
    "ttcd_jax/interop": INTEROP,
    "ttcd_jax/run": (*INTEROP, "ttcd_jax.run"),
    "experiments": ("ttcd_jax", "ttcd_kernels", "experiments"),
}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _imports(path: Path) -> set[str]:
    """Full names of everything a file imports, wherever in the file."""
    names = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def test_files_are_short():
    lengths = {_name(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short():
    long = {}
    for path in FILES:
        cap = MAX_KERNEL_LINES if _name(path).startswith("kernels/") else MAX_FUNCTION_LINES
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > cap:
                    long[f"{_name(path)}:{node.lineno} {node.name}"] = lines
    assert long == {}


def test_functions_are_annotated():
    bare = []
    for path in (path for path in SOURCES if path.name not in DEVICE_CODE):
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef):
                args = [arg for arg in ast.iter_child_nodes(node.args) if isinstance(arg, ast.arg)]
                given = [arg.annotation or arg.arg in ("self", "cls") for arg in args]
                if not (node.returns and all(given)):
                    bare.append(f"{_name(path)}:{node.lineno} {node.name}")
    assert bare == []


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_one_way(folder):
    for path in (ROOT / folder).rglob("*.py"):
        ours = {name for name in _imports(path) if _is_in(name, OURS)}
        allowed = (*MAY_IMPORT[folder], *(() if folder == "kernels" else LOW))
        wrong = {name for name in ours if not _is_in(name, allowed)}
        assert not wrong, f"{_name(path)} imports {', '.join(sorted(wrong))}"


def test_no_file_imports_itself_through_others():
    """Registries aside: a package that imports all of its modules."""
    modules = {
        _name(path.with_suffix("")).replace("/", ".").removeprefix("kernels."): path
        for path in SOURCES
        if path.name != "__init__.py"
    }
    graph = {
        module: {name if name in modules else name.rpartition(".")[0] for name in _imports(path)}
        & modules.keys()
        for module, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_studies_are_imported_by_no_command_but_the_report():
    for path in SOURCES:
        if not _name(path).startswith(("experiments/studies/", "experiments/report/", "tests/")):
            assert not any(_is_in(name, ("experiments.studies",)) for name in _imports(path)), path


def test_every_folder_of_the_library_has_its_place_in_the_import_order():
    folders = {_name(path.parent) for path in ROOT.glob("ttcd_jax/*/*.py")}
    assert folders <= MAY_IMPORT.keys()


def test_commands_stay_in_experiments_and_gin_in_one_file():
    for path in SOURCES:
        if not _name(path).startswith(("experiments/", "tests/")):
            outside = ("experiments", "tests")
            assert not any(_is_in(name, outside) for name in _imports(path)), path
        if _name(path) != "ttcd_jax/run/bindings.py":
            assert not any(_is_in(name, ("gin",)) for name in _imports(path)), path


def test_evaluation_never_imports_the_training_loop():
    folders = (ROOT / "ttcd_jax" / name for name in ("measure", "tasks"))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        assert not any(_is_in(name, ("ttcd_jax.train.loop",)) for name in _imports(path))


def test_no_error_is_swallowed_whole():
    wide = []
    for path in FILES:
        for node in _nodes(path):
            if isinstance(node, ast.ExceptHandler):
                caught = [] if node.type is None else [node.type]
                caught = caught[0].elts if caught and isinstance(caught[0], ast.Tuple) else caught
                names = {getattr(x, "id", getattr(x, "attr", "")) for x in caught}
                is_bare = ast.unparse(node.body[0]).startswith(BARE)
                if not names or (names & {"Exception", "BaseException"} and not is_bare):
                    wide.append(f"{_name(path)}:{node.lineno}")
    assert wide == []


def test_nothing_is_left_to_be_done():
    mark = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")  # in pieces, or this file would match
    assert [_name(path) for path in FILES if mark.search(path.read_text())] == []


def test_every_module_of_the_library_says_what_it_is():
    filled = [path for path in SOURCES if path.read_text().strip()]
    assert [_name(path) for path in filled if not ast.get_docstring(_nodes(path)[0])] == []


def test_every_field_of_a_run_is_explained_in_the_docstrings_of_its_class():
    reachable = reachable_classes(RunConfig).items()  # classes of other tests among them
    ours = [(name, cls) for name, cls in reachable if cls.__module__.startswith("ttcd_jax.")]
    fields = [(name, x.name, cls) for name, cls in ours for x in dataclasses.fields(cls)]
    assert len(fields) > 200
    silent = [f"{name}.{x}" for name, x, cls in fields if f"`{x}`" not in cls.__doc__]
    assert silent == []


def test_shapes_are_checked_in_tests():
    with pytest.raises(TypeCheckError):
        rms_norm(jnp.ones((2, 3)), jnp.ones(4), 1e-6)
