"""The names of the package: completed by an editor, known to a type checker, imported on use."""

import ast
from importlib import metadata, resources

import ttcd_jax


def test_a_type_checker_sees_every_name_where_it_is_defined():
    source = resources.files(ttcd_jax).joinpath("__init__.py").read_text()
    (block,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and node.body and isinstance(node.test, ast.Name)
    )
    declared = {
        node.names[0].asname: node.module for node in block.body if isinstance(node, ast.ImportFrom)
    }
    assert sorted([*declared, "__version__"]) == sorted(dir(ttcd_jax))
    for name, module in declared.items():
        value = getattr(ttcd_jax, name)
        assert (value.__name__, value.__module__) == (name, module)
    assert resources.files(ttcd_jax).joinpath("py.typed").is_file()
    assert ttcd_jax.__version__ == metadata.version("ttcd-jax")
