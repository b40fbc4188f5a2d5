"""torch's compiler, put off until something asks for it. Each case in a fork of one process that has not got it."""

import json
import subprocess
import sys
import textwrap

import pytest
import warm

SERVER = """
import json, os, sys, traceback
from quickstart.late_compiler import late

def there():
    return "torch._dynamo.convert_frame" in sys.modules

with late():
    import torch
    import torch._dynamo
assert not there()
torch.set_num_threads(1)
failures = {}
for name, body in json.load(sys.stdin).items():
    reading, writing = os.pipe()
    if os.fork() == 0:
        text = ""
        try:
            exec(body, globals())
        except BaseException:
            text = traceback.format_exc()
        os.write(writing, text.encode()[-4000:])
        os._exit(0)
    os.close(writing)
    failures[name] = os.fdopen(reading).read()
print(json.dumps(failures))
"""

ASKED = {
    "compile": "torch.compile(lambda x: x, backend='eager')",
    "reset": "torch._dynamo.reset()",
    "rules": "torch._dynamo.trace_rules.lookup_callable",
    "all of it": "exec('from torch._dynamo import *', taken := {}); assert 'optimize' in taken",
    "its names": "assert 'optimize' in dir(torch._dynamo)",
    "part": "import torch._dynamo.utils",
    "part of it": "from torch._dynamo import eval_frame",
    "module": "torch._dynamo.disable(torch.nn.Linear(1, 1))",
}
WHOLE = """
assert there()
assert type(torch._dynamo) is type(sys)
missing = [name for name in torch._dynamo.__all__ if not hasattr(torch._dynamo, name)]
assert not missing, missing
for name, part in list(sys.modules.items()):
    own = getattr(torch._dynamo, name.rpartition(".")[2], None)
    if name.startswith("torch._dynamo.") and name.count(".") == 2 and isinstance(own, type(sys)):
        assert own is part, name
from torch._dynamo import decorators
assert torch._dynamo.disable is decorators.disable
"""
RUN = """
from quickstart.imports import light
from quickstart.trainers.environment import process_group
with light():
    import transformers.masking_utils
    import tensordict
with process_group():
    a, b = torch.ones(3, requires_grad=True), torch.ones(2)
    torch.nested.as_nested_tensor([a.detach(), b], layout=torch.jagged)
    optimizer = torch.optim.AdamW([a], lr=0.1)
    torch.utils.checkpoint.checkpoint(torch.exp, a, use_reentrant=False).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.manual_seed(0)
assert not there()
"""
MARKS = """
@torch.compiler.disable(recursive=False)
def kept_out(x):
    return x + 1

@torch._dynamo.assume_constant_result
def constant():
    return 3

@torch._dynamo.allow_in_graph
def allowed(x):
    return x * 2

def whole(x):
    torch._dynamo.graph_break()
    return allowed(kept_out(x)) * constant()

assert whole(torch.tensor(1.0)) == 12 and not there()
graphs = []

def backend(module, inputs):
    graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
    return module.forward

assert torch.compile(whole, backend=backend)(torch.tensor(1.0)) == 12
called = [target for graph in graphs for target in graph]
assert allowed in called, called
assert "add" not in str(called), called
"""
UNKNOWN = """
assert not hasattr(torch._dynamo, "__wrapped__") and not there()
assert not hasattr(torch._dynamo, "no_such_name") and there()
"""
THREADS = """
import threading
found = []
threads = [
    threading.Thread(target=lambda name=name: found.append(getattr(torch._dynamo, name)))
    for name in ("optimize", "explain", "reset", "OptimizedModule")
]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 4, found
"""


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """What went wrong in each case."""
    asked = {name: ask + WHOLE for name, ask in ASKED.items()}
    cases = asked | {"run": RUN, "marks": MARKS, "unknown": UNKNOWN, "threads": THREADS}
    command = [sys.executable, "-c", SERVER]
    done = subprocess.run(
        command, cwd=warm.REPOSITORY, input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_not_there_after_what_a_run_does(failures):
    """Masks, jagged tensors, an optimizer, a process group, activation checkpoints."""
    assert not failures["run"], failures["run"]


@pytest.mark.parametrize("name", ASKED)
def test_it_comes_when_it_is_asked_for(failures, name):
    """And is then what a plain import gives: every public name, each part once."""
    assert not failures[name], failures[name]


def test_marks_of_before_hold_when_something_is_compiled(failures):
    """A disabled function is not traced, an allowed one stands in the graph, a constant one is called beforehand."""
    assert not failures["marks"], failures["marks"]


def test_an_unknown_name_is_an_attribute_error_as_always(failures):
    assert not failures["unknown"], failures["unknown"]


def test_threads_get_the_whole_package(failures):
    assert not failures["threads"], failures["threads"]


def test_a_compiler_that_is_there_stays():
    """A notebook that has compiled something already."""
    script = """
        import sys, torch._dynamo
        from quickstart.late_compiler import late
        before = list(sys.meta_path)
        with late():
            import torch._dynamo.utils
        assert sys.meta_path == before and torch._dynamo.optimize
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=warm.REPOSITORY, check=False)
    assert done.returncode == 0
