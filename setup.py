"""The wheel's layout: the top-level folders `configs` and `cluster` become folders of the package, since other packages may
have folders of these names beside theirs. All else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["raysim*", "methods*"]), "raysim.configs", "raysim.cluster"],
    package_dir={"raysim.configs": "configs", "raysim.cluster": "cluster"},
    package_data={"raysim": ["py.typed"], "raysim.configs": ["**/*.yaml", "**/*.csv"], "raysim.cluster": ["*"]},
)
