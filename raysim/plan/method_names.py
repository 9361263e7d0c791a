"""`raysim.methods.fedprox(mu=0.1)`: methods with options, checked where they are written, for lists of `raysim.run`."""

from __future__ import annotations

from collections.abc import Callable

from methods import METHODS
from raysim.core.errors import refuse
from raysim.plan.find import build_methods

#: A method with its options as a configuration has it.
Spec = dict[str, dict[str, object]]


class MethodNames:
    """Every known method as a function of its options that returns its line of a configuration."""

    def __getattr__(self, name: str) -> Callable[..., Spec]:
        if name not in METHODS:
            raise AttributeError(f"no method {name!r}; there are {', '.join(sorted(METHODS))}")

        def spec(**options: object) -> Spec:
            _, faults = build_methods([{name: options}])
            refuse(faults, f"raysim.methods.{name}")
            return {name: options}

        spec.__doc__ = METHODS[name].__doc__
        spec.__name__ = spec.__qualname__ = (
            name  # without its options, `methods=[raysim.methods.fedprox]`, the name says all
        )
        spec.__module__ = ""
        return spec

    def __dir__(self) -> list[str]:
        return sorted(METHODS)


methods = MethodNames()
