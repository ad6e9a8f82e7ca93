"""The source never loads code from data, reads the environment, or names the machine it was written on."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from plait_testing import budgets

ROOMS = ("router/python/plait", "worker/plait_worker", "kernels/plait_kernels", "proto/plait_proto")
PRODUCT = [path for path in budgets.tracked(".py") if str(path.relative_to(budgets.ROOT)).startswith(ROOMS)]
ENTRIES = [budgets.ROOT / "router/python/plait" / name for name in ("cli.py", "offline/llm.py")]
"""What users start: the command line, and `plait.LLM`."""

CODE_FROM_DATA_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "runpy",
    "multiprocessing",  # its queues and pipes pickle
}
CODE_FROM_DATA_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "torch.multiprocessing.spawn",
    "torch.save",
    "numpy.load",
    "np.load",
    "numpy.fromfile",
    "pandas.read_pickle",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "builtins.eval",
    "builtins.exec",
    "os.system",
}
PICKLING_COLLECTIVES = re.compile(r"(broadcast|scatter|send|recv)_object_list|(all_)?gather_object")
"""torch.distributed's, which unpickle what a peer sends."""
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
WORKPLACE = re.compile(r"/(?:work|root|tmp/brief|tmp/target|opt/wheels)/|crates-mirror|\bissues show\b")


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute; empty for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{dotted(value)}.{attribute}"
    return ""


def imported(node: ast.AST) -> set[str]:
    """The packages that a statement imports, and the names that it takes from them."""
    match node:
        case ast.Import(names=names):
            return {alias.name.split(".")[0] for alias in names}
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return {module.split(".")[0], *(f"{module}.{alias.name}" for alias in names)}
    return set()


def forbidden(tree: ast.AST) -> Iterator[str]:
    """Each place of a file that could run code from data or through a shell."""
    for node in ast.walk(tree):
        for name in imported(node) & (CODE_FROM_DATA_MODULES | CODE_FROM_DATA_CALLS):
            yield name
        if isinstance(node, ast.Call):
            if (name := dotted(node.func)) in CODE_FROM_DATA_CALLS:
                yield name
            if PICKLING_COLLECTIVES.fullmatch(name.rpartition(".")[2]):
                yield name
            for keyword in node.keywords:
                if (
                    keyword.arg in {"shell", "trust_remote_code", "allow_pickle"}
                    and getattr(keyword.value, "value", True) is not False
                ):
                    yield f"{keyword.arg}=True"


def environment_reads(tree: ast.AST) -> set[str]:
    """The ways in which a file reads environment variables."""
    return {name for node in ast.walk(tree) for name in {dotted(node), *imported(node)} & ENVIRONMENT}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "x = torch.load(path)",
        "eval('1')",
        "subprocess.run('ls', shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "numpy.lib.format.read_array(file, allow_pickle=True)",
        "dist.all_gather_object(found, mine)",
        "from multiprocessing import Queue",
    ],
)
def test_code_from_data_is_found(code: str) -> None:
    assert list(forbidden(ast.parse(code)))


@pytest.mark.parametrize("code", ["model.eval()", "import msgspec", "run(command, shell=False)", "tokens.load(path)"])
def test_innocent_code_passes(code: str) -> None:
    assert not list(forbidden(ast.parse(code)))


@pytest.mark.parametrize("code", ["os.environ['A']", "from os import environ", "os.getenv('A')"])
def test_a_read_of_the_environment_is_found(code: str) -> None:
    assert environment_reads(ast.parse(code))


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(budgets.ROOT)))
def test_no_data_becomes_code(path: Path) -> None:
    assert list(forbidden(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(budgets.ROOT)))
def test_only_what_users_start_reads_the_environment(path: Path) -> None:
    if path not in ENTRIES:
        assert environment_reads(ast.parse(path.read_text())) == set()


def test_no_crate_reads_the_environment() -> None:
    """Build scripts may: cargo speaks to them through it."""
    crates = [path for path in budgets.tracked(".rs") if "src" in path.parts]
    assert [path for path in crates if re.search(r"\benv::vars?\b|\boption_env!", path.read_text())] == []


READS_WALL_CLOCK = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(now|today)\(|\bSystemTime::now|\b(Utc|Local)::now")
WALL_CLOCK = {
    "router/engine/src/kv_events/publisher.rs": "the stamp of an event",
    "router/engine/src/logging.rs": "the time of a log line",
    "router/python/plait/http/answers.py": "the beginning of a span",
    "router/python/plait/http/app.py": "`created` of a model",
    "router/python/plait/http/messages.py": "`created` of an answer",
    "router/python/plait/http/request_facts.py": "the times of a span's events",
    "router/python/plait/http/responses.py": "`created` of an answer",
    "router/python/plait/http/validate.py": "`created` of an answer",
    "router/python/plait/launch/profiles.py": "the name of a trace",
    "router/python/plait/launch/recovery.py": "losses, which a file keeps beyond a boot",
    "router/python/plait/launch/serve.py": "losses, which a file keeps beyond a boot",
    "router/python/plait/log.py": "the time of a log line",
    "router/python/plait/nodes/head.py": "losses, and the comparison of the nodes' clocks",
    "router/python/plait/nodes/launch.py": "losses, which a file keeps beyond a boot",
    "router/python/plait/nodes/member.py": "the comparison of the nodes' clocks",
    "router/text/src/template.rs": "`strftime_now` of a template",
}


def test_a_clock_that_jumps_moves_no_deadline() -> None:
    """Deadlines count on clocks that never jump; who reads the wall clock says what for."""
    rust = [path for path in budgets.tracked(".rs") if "src" in path.parts and "fuzz" not in path.parts]
    readers = {
        str(path.relative_to(budgets.ROOT)) for path in PRODUCT + rust if READS_WALL_CLOCK.search(path.read_text())
    }
    assert readers == set(WALL_CLOCK)


@pytest.mark.parametrize("room", ["worker", "kernels", "proto", "tests"])
def test_a_room_is_not_itself_a_package(room: str) -> None:
    """`kernels` and `proto` are names of other projects' packages."""
    assert not (budgets.ROOT / room / "__init__.py").exists()


def test_no_test_folder_is_a_package() -> None:
    """Test files may have the same name; only what they share is a package."""
    tests = budgets.ROOT / "tests"
    assert list(tests.rglob("__init__.py")) == [tests / "plait_testing" / "__init__.py"]


def test_no_file_names_the_place_it_was_written_in() -> None:
    """A clone on any machine must find everything that a file names."""
    texts = budgets.tracked(".py", ".rs", ".toml", ".md", ".pyi", ".sh", "Makefile", ".ci/run", ".json", ".yaml")
    named = [path for path in texts if path != Path(__file__) and WORKPLACE.search(path.read_text())]
    assert named == []
