"""Shows the configuration of a recipe, whole: every field, and the file of each that is bound.

    ttcd show FILE [--param='RunConfig.steps=20' ...]

FILE is one of `ttcd recipes`, or a path. The lines are those of a .gin file; a field without a file
has the default of its class, and so have the settings of a method or optimizer that none binds. Of
configurations in scopes, as the parts of a mixture, every bound value has its scope.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from absl import flags

from ttcd_jax.commands import cli
from ttcd_jax.config import Config
from ttcd_jax.run.bindings import find_gin_file, load_config, read_file, read_params

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("param", [], "A binding that overrides the file, as Class.field=value.")


def main(argv: list[str]) -> None:
    path = find_gin_file(argv[1], cli.CONFIG_DIR)
    bindings = read_file(path, cli.CONFIG_DIR) | read_params(FLAGS.param, cli.CONFIG_DIR)
    from ttcd_jax.commands.study.runs import StudyConfig
    from ttcd_jax.run.config import RunConfig
    from ttcd_jax.run.start import inherited_model

    is_study = any(binding.owner == "StudyConfig" for binding in bindings.values())
    options = {"config_dir": cli.CONFIG_DIR, "inherit": inherited_model()}
    root: type[Config] = StudyConfig if is_study else RunConfig
    config = load_config(root, argv[1], FLAGS.param, **options)
    places: dict[str, list[str]] = {}
    for x in bindings.values():
        scope = f" (of {x.scope})" if x.scope else ""
        places.setdefault(f"{x.owner}.{x.field}", []).append(x.where + scope)
    lines = [*_lines(config)]
    width = min(60, max(map(len, lines)))
    for line in lines:
        where = " or ".join(places.get(line.partition(" = ")[0], ()))
        print(f"{line:<{width}}  # {where}" if where else line)


def _lines(config: Config) -> Iterator[str]:
    """A line of every field, then those of the configurations in them."""
    inner: list[Config] = []

    def text(value: Any) -> str:
        if isinstance(value, Config):
            inner.append(value)
            return f"@{type(value).__name__}()"
        if isinstance(value, tuple):
            return f"({', '.join(map(text, value))}{',' * (len(value) == 1)})"
        return repr(value)

    defaults = {"memory": getattr(config, "settings", None)}
    defaults["settings"] = getattr(config, "constants", None)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        value = defaults.get(field.name) if value is None else value
        yield f"{type(config).__name__}.{field.name} = {text(value)}"
    for value in inner:
        yield from _lines(value)


if __name__ == "__main__":
    cli.run(main, ("FILE",))
