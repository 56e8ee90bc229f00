"""The rules of docs/house_style.md that a program can check, and that shapes are checked at all."""

import ast
import dataclasses
import functools
import graphlib
from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import ttcd_jax
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

# Who may import whom, within the project: a folder itself and those before it, besides what is low.
ORDER = (
    *("sharding", "nn", "memory", "methods", "models", "train", "inference", "measure", "tasks"),
    *("inspection", "interop", "run", "commands"),
)
LOW = (
    *("ttcd_jax.allocation", "ttcd_jax.axes", "ttcd_jax.config", "ttcd_jax.errors"),
    *("ttcd_jax.files", "ttcd_jax.precision", "ttcd_jax.registry", "ttcd_jax.tokens"),
    *("ttcd_jax.storage", "ttcd_jax.terminal", "ttcd_jax.units", "ttcd_kernels"),
)
OURS = ("ttcd_jax", "ttcd_kernels", "experiments", "tests")
MAY_IMPORT = {
    "kernels": ("ttcd_kernels",),
    "ttcd_jax/data": (*LOW, "ttcd_jax.data"),
    "experiments": ("ttcd_jax", "ttcd_kernels", "experiments"),
}
for _rank, _folder in enumerate(ORDER):
    _before = [f"ttcd_jax.{name}" for name in ORDER[: _rank + 1]]
    _data = ["ttcd_jax.data"] * (_rank >= ORDER.index("train"))
    MAY_IMPORT[f"ttcd_jax/{_folder}"] = (*LOW, *_before, *_data)
MAY_IMPORT["ttcd_jax/commands"] += ("experiments.studies",)  # `report` alone
# The files that alone may import a package.
IMPORTED_IN = {
    "experiments.studies": ("experiments/", "ttcd_jax/commands/report/", "tests/"),
    "experiments": ("experiments/", "ttcd_jax/commands/report/", "tests/"),
    "tests": ("experiments/", "tests/"),
    "gin": ("ttcd_jax/run/bindings.py",),
    "ttcd_jax.train.loop": ("ttcd_jax/run/", "experiments/", "tests/"),
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


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_one_way(folder):
    for path in (ROOT / folder).rglob("*.py"):
        ours = {name for name in _imports(path) if _is_in(name, OURS)}
        wrong = {name for name in ours if not _is_in(name, MAY_IMPORT[folder])}
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


@pytest.mark.parametrize("package", IMPORTED_IN)
def test_a_package_is_imported_where_it_may_be_alone(package):
    others = [path for path in SOURCES if not _name(path).startswith(IMPORTED_IN[package])]
    found = {_name(path) for path in others if any(_is_in(x, (package,)) for x in _imports(path))}
    assert found == set()


def test_every_folder_of_the_library_has_its_place_in_the_import_order():
    folders = {_name(path.parent) for path in ROOT.glob("ttcd_jax/*/*.py")}
    assert folders <= MAY_IMPORT.keys()


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


def test_a_type_checker_sees_every_name_of_the_package_where_it_is_defined():
    nodes = _nodes(ROOT / "ttcd_jax" / "__init__.py")
    (block,) = (x for x in nodes if isinstance(x, ast.If) and isinstance(x.test, ast.Name))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    declared = {node.names[0].asname: node.module for node in imports}
    assert sorted([*declared, "__version__"]) == sorted(dir(ttcd_jax))
    for name, module in declared.items():
        value = getattr(ttcd_jax, name)
        assert (value.__name__, value.__module__) == (name, module)
    assert (ROOT / "ttcd_jax" / "py.typed").is_file()
    assert ttcd_jax.__version__ == metadata.version("ttcd-jax")
