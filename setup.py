"""What pyproject.toml cannot say: packages in other folders, and README.md as a registry shows it,
without pictures and links to files of the repository."""

import re
from pathlib import Path

from setuptools import find_packages, setup

_LOCAL = r"(?!https?:)"
_PARTS = (
    (r"(?s)<picture>.*?</picture>\s*", ""),
    (rf'<img[^>]*src="{_LOCAL}[^>]*>\s*', ""),
    (rf"!\[[^\]]*\]\({_LOCAL}[^)]*\)\s*", ""),
    (rf"\[([^\]]*)\]\({_LOCAL}[^)]*\)", r"\1"),
    (r"<!--.*?-->", ""),
)
readme = Path("README.md").read_text()
for pattern, text in _PARTS:
    readme = re.sub(pattern, text, readme)

FOLDERS = {f"ttcd_jax.{name}": f"experiments/{name}" for name in ("configs", "cluster")}
setup(
    packages=[*find_packages(include=["ttcd_jax*"]), *FOLDERS],
    package_dir=FOLDERS,
    long_description=readme,
    long_description_content_type="text/markdown",
)
