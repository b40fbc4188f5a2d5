"""torch's compiler (torch._dynamo), imported when something compiles and not before.

Nothing here compiles, and without it the imports of a run take 6.1 instead of 6.8 s (medians of 5 on 2 CPU cores).
transformers wants one class out of it; tensordict, nested tensors, optimizers and process groups leave marks for it on
functions and tensors, which mean nothing until something is compiled. Inside :func:`late` the package is put in place
without being executed: a module that knows these marks. Whatever else is asked of it executes it first, and from then
on it is the package itself.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

PACKAGE = "torch._dynamo"
# Parts that need nothing of the rest: settings, and the class that transformers' masks want.
APART = ("config", "_trace_wrapped_higher_order_op")


class _Late:
    """What the package answers before it is executed, and its execution.

    Args:
        module: in the package's place.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._lock = threading.RLock()  # another thread waits; the one that executes asks again while it does
        self._allowed: list[Any] = []
        self.begun = self.done = False
        self._marks: dict[str, Any] = {
            "allow_in_graph": self._allow_in_graph,
            "assume_constant_result": _assume_constant_result,
            "disable": self._disable,
            "graph_break": self._once_done("graph_break"),
            "mark_dynamic": self._once_done("mark_dynamic"),
            "trace_rules": _TraceRules(self),
        }

    def answer(self, name: str) -> Any:
        """The attribute of this name."""
        if not self.begun and name in self._marks:
            return self._marks[name]
        if not self.begun and name in APART:
            __import__(f"{PACKAGE}.{name}")
            return sys.modules[f"{PACKAGE}.{name}"]
        return self.real(name)

    def real(self, name: str) -> Any:
        """The package's own attribute."""
        self.execute()
        if name not in vars(self._module):
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
        return vars(self._module)[name]

    def execute(self) -> None:
        """Execute the package; once, and by one thread."""
        with self._lock:
            if self.begun:
                return
            self.begun = True
            spec = self._module.__spec__
            assert spec is not None
            assert spec.loader is not None
            spec.loader.exec_module(self._module)
            for function in self._allowed:
                self.real("allow_in_graph")(function)
            self._module.__class__ = ModuleType
            self.done = True

    def _allow_in_graph(self, function: Any) -> Any:
        self._allowed.append(function)
        return function

    def _disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Runs the function as it is while nothing can be compiled, and as the package says afterwards."""
        if function is None:
            return functools.partial(self._disable, recursive=recursive, **options)
        if not isinstance(function, FunctionType):  # of a class or a module it changes more than the call
            return self.real("disable")(function, recursive, **options)
        real: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            if not self.done:
                return function(*args, **kwargs)
            if not real:
                real.append(self.real("disable")(function, recursive, **options))
            return real[0](*args, **kwargs)

        return disabled

    def _once_done(self, name: str) -> Callable[..., Any]:
        """Nothing, until the package is there."""

        def mark(*args: Any, **kwargs: Any) -> Any:
            return self.real(name)(*args, **kwargs) if self.done else None

        return mark


class _TraceRules:
    """init_process_group empties a cache of the compiler's rules, of which there are none yet."""

    def __init__(self, package: _Late) -> None:
        self._package = package

    def clear_lru_cache(self) -> None:
        """Nothing to clear, until the package is there."""
        if self._package.done:
            self._package.real("trace_rules").clear_lru_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package.real("trace_rules"), name)


def _assume_constant_result(function: Any) -> Any:
    """As the package does it (torch/_dynamo/decorators.py)."""
    function._dynamo_marked_constant = True
    return function


class _LateModule(ModuleType):
    """In the package's place until it is executed; then a module like any other."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._late = _Late(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # what tools look for in every module
            raise AttributeError(name)
        return self._late.answer(name)

    def __dir__(self) -> list[str]:
        self._late.execute()
        return sorted(vars(self))


class _Finder:
    """First in sys.meta_path: gives the late module, and executes it before a part of it that needs the rest."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        if name == PACKAGE:
            spec = PathFinder.find_spec(name, path)
            if spec is not None:
                spec.loader = _FirstTime(spec.loader)  # type: ignore[assignment]
            return spec
        package = sys.modules.get(PACKAGE)
        is_part = name.startswith(PACKAGE + ".") and name.rpartition(".")[2] not in APART
        if not is_part or not isinstance(package, _LateModule) or package._late.begun:
            return None
        package._late.execute()
        part = sys.modules.get(name)
        return None if part is None else ModuleSpec(name, _AlreadyThere(part))  # type: ignore[arg-type]


class _FirstTime:
    """Makes the late module, and leaves it the loader that executes it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See importlib.abc.Loader."""
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See importlib.abc.Loader."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader


class _AlreadyThere:
    """Gives a part that came with the package, as it is."""

    def __init__(self, part: ModuleType) -> None:
        self._part, self._spec = part, part.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See importlib.abc.Loader."""
        return self._part

    def exec_module(self, module: ModuleType) -> None:
        """See importlib.abc.Loader."""
        module.__spec__ = self._spec


_FINDER = _Finder()


@contextmanager
def late() -> Iterator[None]:
    """Imports inside the block get the late package, unless it is there already."""
    if PACKAGE in sys.modules or _FINDER in sys.meta_path:
        yield
        return
    sys.meta_path.insert(0, _FINDER)
    try:
        yield
    finally:
        if not isinstance(sys.modules.get(PACKAGE), _LateModule):  # else it must see who asks for parts of it
            sys.meta_path.remove(_FINDER)
