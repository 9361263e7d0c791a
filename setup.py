"""The folders of the wheel: the top-level `configs` and `cluster` become folders of the package (pyproject.toml, package-dir),
since other packages may have folders of these names beside theirs. All else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["raysim*", "methods*"]), "raysim.configs", "raysim.cluster"])
