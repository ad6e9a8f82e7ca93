"""The command line that is generated from the settings."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import msgspec
import pytest
from plait import cli
from plait.batch_sizes import check_chunk, with_batch_sizes
from plait.check_settings import check_model_is_named
from plait.errors import SettingsError
from plait.flags import Parser, add_flags, flags, read_settings
from plait.flags_of_others import STAND_INS
from plait.kernels import KernelsSettings
from plait.launch.worker_config import worker_config
from plait.nvidia import has_nvidia_gpu
from plait.settings import (
    CoordinatorKeys,
    EngineSettings,
    GroupMembership,
    MemberKeys,
    SchedulerSettings,
    ServeSettings,
    engine_settings,
)
from plait.simulate.settings import SimulateSettings
from plait_proto import ExitCode


def parser() -> Parser:
    made = Parser(prog="plait serve", allow_abbrev=False)
    add_flags(made, ServeSettings)
    return made


def parse(*words: str) -> ServeSettings:
    return read_settings(parser().parse_args(words), ServeSettings)


def all_flags() -> list[str]:
    return [flag.name for component in msgspec.structs.fields(ServeSettings) for flag in flags(component.type)]


SETTINGS = """
    host port api-key-file served-model-name enable-prompt-tokens-details trust-user-field
    metrics-without-key
    ssl-certfile ssl-keyfile ssl-ca-certs uds root-path allowed-origins
    dtype quantization load-format pooling chat-template chat-template-kwargs
    tool-parser reasoning-parser enable-auto-tool-choice
    device attention-backend cuda-graphs cuda-graph-max-bs custom-all-reduce
    max-model-len max-batch-tokens max-seqs long-prefill-token-threshold mixed max-queue overlap
    itl-target-ms policy prefill-starvation-steps max-queue-tokens max-queue-seconds max-skip-ahead
    priority-preemption-threshold priority-aging-seconds
    page-size num-pages memory-fraction prefix-cache watermark
    mla-context-chunk-size kv-cache-dtype k-scale v-scale num-snapshots snapshot-interval
    kv-events-endpoint kv-events-replay-endpoint kv-events-topic kv-events-public kv-hash-key-file
    group-engines group-engine group-endpoint group-secret-key-file group-public-keys-file
    rank-hosts rank-endpoint rank-secret-key-file rank-public-keys-file restart restart-budget restart-file
    tp dp dp-attention threads text-threads seed load-timeout-seconds capture-timeout-seconds shutdown-delay-seconds
    log-level step-trace enable-log-requests log-json metric-names otlp-traces-endpoint revision download-dir ui
    admin-port admin-host admin-key-file profile-dir stream-comment-seconds
    request-timeout-seconds first-token-timeout-seconds idle-timeout-seconds
    generation-config override-generation-config
"""


def test_exactly_these_settings_exist() -> None:
    assert sorted(all_flags()) == sorted("--" + name for name in SETTINGS.split())


def test_without_flags_everything_has_its_default() -> None:
    assert parse() == ServeSettings()


def without_spaces(text: str) -> str:
    """argparse wraps at blanks and hyphens."""
    return "".join(text.split())


def test_help_prints_each_default() -> None:
    text = without_spaces(parser().format_help())
    for component in msgspec.structs.fields(ServeSettings):
        for flag in flags(component.type):
            assert flag.name in text
            assert without_spaces(flag.help.replace("%%", "%")) in text
    assert without_spaces("(default: 64 on a CPU; on a GPU 64 to 1024, by the tokens that its memory holds)") in text
    assert without_spaces("(default: the model's context)") in text


def test_flags_reach_their_component() -> None:
    settings = parse("--port", "0", "--dtype=float32", "--max-seqs", "3", "--page-size", "16", "--threads", "2")
    assert settings.http.port == 0
    assert settings.model.dtype == "float32"
    assert settings.scheduler.max_seqs == 3
    assert settings.pages.page_size == 16
    assert settings.process.threads == 2


# Every other name of a setting, as glossary and interface state them: ours that are shorter, vLLM's, SGLang's.
ALIASES = {
    "--max-model-len": ("--context-length",),
    "--chat-template-kwargs": ("--default-chat-template-kwargs",),
    "--tool-parser": ("--tool-call-parser",),
    "--cuda-graph-max-bs": ("--max-graph-batch", "--max-cudagraph-capture-size"),
    "--max-batch-tokens": ("--max-num-batched-tokens", "--chunked-prefill-size"),
    "--max-seqs": ("--max-num-seqs", "--max-running-requests"),
    "--long-prefill-token-threshold": ("--long-prefill",),
    "--mixed": ("--enable-mixed-chunk",),
    "--overlap": ("--async-scheduling",),
    "--policy": ("--scheduling-policy", "--schedule-policy"),
    "--prefill-starvation-steps": ("--starvation-steps",),
    "--max-queue": ("--max-queued-requests",),
    "--priority-preemption-threshold": ("--priority-scheduling-preemption-threshold",),
    "--page-size": ("--block-size",),
    "--num-pages": ("--num-gpu-blocks-override",),
    "--prefix-cache": ("--enable-prefix-caching",),
    "--memory-fraction": ("--gpu-memory-utilization", "--mem-fraction-static"),
    "--mla-context-chunk-size": ("--context-chunk",),
    "--kv-cache-dtype": ("--kv-dtype",),
    "--tp": ("--tensor-parallel-size", "--tp-size"),
    "--dp": ("--data-parallel-size", "--dp-size"),
    "--dp-attention": ("--enable-dp-attention",),
    "--text-threads": ("--tokenizer-worker-num",),
    "--seed": ("--random-seed",),
    "--step-trace": ("--step-records",),
}
NO_ALIASES = {
    "--no-cuda-graphs": ("--enforce-eager", "--disable-cuda-graph"),
    "--no-custom-all-reduce": ("--disable-custom-all-reduce",),
    "--no-overlap": ("--disable-overlap-schedule",),
    "--no-prefix-cache": ("--disable-radix-cache",),
}


@pytest.mark.parametrize("settings", [ServeSettings, SimulateSettings, KernelsSettings])
def test_a_setting_has_the_same_aliases_in_every_command(settings: type[msgspec.Struct]) -> None:
    of_command = [flag for component in msgspec.structs.fields(settings) for flag in flags(component.type)]
    # `simulate --seed` seeds arrivals, not sampling.
    of_command = [flag for flag in of_command if (settings, flag.field) != (SimulateSettings, "seed")]
    for flag in of_command:
        assert set(flag.setting.aliases) == set(ALIASES.get(flag.name, ())), flag.name
        assert set(flag.setting.off) == set(NO_ALIASES.get(f"--no-{flag.name[2:]}", ())), flag.name


def test_the_table_of_aliases_names_settings_of_serve_only() -> None:
    assert set(ALIASES) | {name.replace("--no-", "--") for name in NO_ALIASES} <= set(all_flags())


@pytest.mark.parametrize(("main", "alias"), [(main, alias) for main, names in ALIASES.items() for alias in names])
def test_an_alias_means_its_main_name(main: str, alias: str) -> None:
    values = {"--policy": "fair", "--kv-cache-dtype": "fp8", "--step-trace": "new.jsonl", "--max-batch-tokens": "3"}
    if main in ("--mixed", "--overlap", "--prefix-cache"):
        assert parse(f"--no-{alias[2:]}") == parse(f"--no-{main[2:]}") != parse(alias) == parse(main)
    elif main == "--dp-attention":
        assert parse(alias) == parse(main) != parse()
    else:
        value = values.get(main, "1" if main == "--memory-fraction" else "2")
        assert parse(alias, value) == parse(main, value) != parse()


@pytest.mark.parametrize(("main", "alias"), [(main, alias) for main, names in NO_ALIASES.items() for alias in names])
def test_an_alias_that_switches_off_means_the_no_form(main: str, alias: str) -> None:
    assert parse(alias) == parse(main) != parse()


@pytest.mark.parametrize("alias", ["--long-prefill", "--starvation-steps", "--context-chunk"])
def test_an_error_names_the_main_flag_where_an_alias_was_typed(alias: str) -> None:
    (main,) = (main for main, names in ALIASES.items() if alias in names)
    with pytest.raises(SettingsError, match=f"^{main} is '0'"):
        parse(alias, "0")


def test_the_worker_gets_its_settings_under_the_same_names() -> None:
    words = ("--device", "cpu", "--attention-backend", "torch", "--kv-cache-dtype", "fp8", "--k-scale", "0.5")
    settings, _ = with_batch_sizes(parse(*words, "--page-size", "16", "--no-cuda-graphs"), Path("/m"))
    config = worker_config(settings, Path("/m"), Path("/r"), 99)
    assert (config.device.device, config.device.cuda_graphs, config.pages.page_size) == ("cpu", False, 16)
    assert (config.attention.attention_backend, config.kv_cache.kv_cache_dtype) == ("torch", "fp8")
    assert (config.kv_cache.k_scale, config.max_model_len, config.max_batch_tokens) == (0.5, 99, 160)


def test_the_number_of_ranks_reaches_the_engine() -> None:
    assert engine_settings(parse("--tp", "2"), "/model", None, "/run").num_ranks == 2


def test_switches_have_a_no() -> None:
    assert parse().scheduler.mixed
    assert parse().scheduler.overlap
    assert not parse("--no-mixed").scheduler.mixed
    assert not parse("--no-overlap").scheduler.overlap
    assert parse("--no-mixed", "--mixed").scheduler.mixed


def test_long_prefill_is_left_to_the_scheduler_unless_given() -> None:
    assert engine_settings(parse(), "/m", None, "/r").scheduler.long_prefill_token_threshold is None
    engine = engine_settings(parse("--long-prefill-token-threshold", "64"), "/m", None, "/r")
    assert engine.scheduler.long_prefill_token_threshold == 64


def test_the_prefix_cache_is_on_unless_it_is_switched_off() -> None:
    for words, on in (([], True), (["--no-prefix-cache"], False), (["--enable-prefix-caching"], True)):
        assert engine_settings(parse(*words), "/m", None, "/r").pages.prefix_cache is on


def test_who_goes_first_and_what_may_wait_are_settings() -> None:
    words = ["--policy", "fair", "--prefill-starvation-steps", "3", "--watermark", "7", "--max-queue-tokens", "1000"]
    engine = engine_settings(parse(*words), "/m", None, "/r")
    scheduler = engine.scheduler
    assert (scheduler.policy, scheduler.prefill_starvation_steps, scheduler.max_queue_tokens) == ("fair", 3, 1000)
    assert engine.pages.watermark == 7
    assert engine_settings(parse(), "/m", None, "/r").pages.watermark is None


def test_the_engine_gets_every_field() -> None:
    engine = engine_settings(parse("--seed", "5", "--served-model-name", "mine"), "/m", "other", "/r")
    read = msgspec.json.decode(msgspec.json.encode(engine), type=EngineSettings)
    assert read == engine
    assert (engine.seed, engine.served_model_name, engine.num_ranks) == (5, "mine", 1)


def test_a_model_has_as_many_names_as_are_given() -> None:
    settings = parse("--served-model-name", "mine", "yours", "--seed", "5")
    assert settings.http.served_model_name == ("mine", "yours")
    assert engine_settings(settings, "/m", "other", "/r").served_model_name == "mine"


@pytest.mark.parametrize("swallowed", ["org/model", "."])
def test_a_model_among_its_names_is_an_error(swallowed: str) -> None:
    with pytest.raises(SettingsError, match="write MODEL before it"):
        check_model_is_named(None, ("mine", swallowed))
    check_model_is_named("model", ("mine", swallowed))
    check_model_is_named(None, (swallowed,))


@pytest.mark.parametrize(
    "keys",
    [
        None,
        CoordinatorKeys(secret="s" * 40, allowed=("a" * 40, "b" * 40)),
        MemberKeys(server="f" * 40, public="p" * 40, secret="s" * 40),
    ],
)
def test_the_engine_gets_its_place_in_a_group(keys: CoordinatorKeys | MemberKeys | None) -> None:
    place = GroupMembership(engine=1, num_engines=3, endpoint="ipc:///run/x/votes", keys=keys)
    engine = engine_settings(parse(), "/m", None, "/r", place)
    assert engine.group == place
    assert msgspec.json.decode(msgspec.json.encode(engine), type=EngineSettings) == engine
    assert engine_settings(parse(), "/m", None, "/r").group is None


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "70000"],
        ["--port", "-1"],
        ["--port", "x"],
        ["--max-seqs", "0"],
        ["--policy", "lifo"],
        ["--prefill-starvation-steps", "0"],
        ["--watermark", "-1"],
        ["--max-queue-tokens", "0"],
        ["--max-batch-tokens", "1.5"],
        ["--max-batch-tokens", "65537"],
        ["--memory-fraction", "0"],
        ["--memory-fraction", "1.1"],
        ["--dtype", "int8"],
        ["--log-level", "loud"],
        ["--seed", "-1"],
        ["--threads", ""],
        ["--page-size", "48"],
        ["--served-model-name", ""],
        ["--k-scale", "1e-300"],
    ],
)
def test_a_bad_value_is_refused_with_what_was_given_and_what_is_allowed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", *words]) == ExitCode.SETTINGS
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{words[0]} is " in last
    assert words[1] in last
    assert "allowed: " in last


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--max-num-seqs", "0"], "--max-seqs (--max-num-seqs) is '0'"),
        (["--block-size=48"], "--page-size (--block-size) is 48"),
        (["--page-size", "48"], "--page-size is 48"),
        (["--itl-target-ms", "5", "--no-mixed", "--max-num-seqs", "1"], "--itl-target-ms needs"),
    ],
)
def test_an_error_names_the_alias_that_was_typed(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", *words]) == ExitCode.SETTINGS
    assert named in capsys.readouterr().err


def test_a_chunk_that_no_step_holds_is_refused() -> None:
    scheduler = SchedulerSettings(max_batch_tokens=160, long_prefill_token_threshold=161)
    with pytest.raises(SettingsError, match=r"^--long-prefill-token-threshold is 161; 1 to 160 .*: lower it"):
        check_chunk(scheduler)
    check_chunk(msgspec.structs.replace(scheduler, long_prefill_token_threshold=160))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--max-seq", "3"], "did you mean --max-seqs?"),
        (["--max-batch-token", "3"], "did you mean --max-batch-tokens?"),
        (["--ports=1"], "did you mean --port?"),
        (["--no-mix"], "did you mean --no-mixed?"),
        (["--frobnicate"], "see `plait serve --help`"),
        (["--pp", "2"], "unknown setting '--pp'; there is no pipeline parallelism; --tp"),
        (["--model", "folder"], "unknown setting '--model'; name the model by itself: plait serve MODEL"),
        (["--swap_space=4"], "unknown setting '--swap_space'; preempted requests are computed anew"),
        (["--data-parallel-size-local", "2"], "--dp starts replicas on this host; `plait launch` divides them"),
        (["--data-parallel-address", "10.0.0.1"], "`plait launch` has --nnodes, --node-rank and --head"),
        (["--nnodes", "2"], "`plait launch` has --nnodes, --node-rank and --head"),
        (["--moe-a2a-backend", "deepep"], "--dp-attention exchanges rows over the GPUs' memory"),
        (["a", "b"], "unknown argument 'b'"),
    ],
)
def test_unknown_flags_are_refused_with_the_nearest_name(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", *words]) == ExitCode.SETTINGS
    assert hint in capsys.readouterr().err


def test_a_flag_of_another_server_is_none_of_ours() -> None:
    known = {name for parser in cli.build_arg_parsers()[1].values() for name in parser._option_string_actions}
    of_serve = set(cli.build_arg_parsers()[1]["serve"]._option_string_actions)
    assert of_serve.isdisjoint(STAND_INS)
    for flag, stand_in in STAND_INS.items():
        assert set(re.findall(r"--[a-z][a-z-]*", stand_in)) <= known, flag


@pytest.mark.parametrize("words", [[], ["bake"], ["serve", "--port"]])
def test_a_command_line_that_says_too_little_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == ExitCode.SETTINGS
    assert "exit code 2" in capsys.readouterr().err


def test_a_port_in_use_is_found_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    from plait.launch.listen import listen

    with listen("127.0.0.1", 0, has_keys=False) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port} on 127.0.0.1 is in use; choose another with --port"):
            listen("127.0.0.1", port, has_keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_bind_without_keys_is_refused(host: str) -> None:
    from plait.launch.listen import listen

    with pytest.raises(SettingsError, match="--api-key-file"):
        listen(host, 0, has_keys=False)
    listen("0.0.0.0", 0, has_keys=True).close()


@pytest.mark.parametrize(
    ("host", "urls"),
    [
        ("127.0.0.1", ("http://127.0.0.1:",)),
        ("127.0.0.2", ("http://127.0.0.2:",)),
        ("localhost", ("http://127.0.0.1:", "http://[::1]:")),
    ],
)
def test_loopback_needs_no_key(host: str, urls: tuple[str, ...]) -> None:
    from plait.launch.listen import listen, url

    with listen(host, 0, has_keys=False) as listener:
        assert url(listener).startswith(urls)


def test_a_host_that_does_not_exist_is_refused() -> None:
    from plait.launch.listen import listen

    with pytest.raises(SettingsError, match="not an address of this machine"):
        listen("no.such.host.invalid", 0, has_keys=False)


def test_namespace_words_that_are_not_settings_are_left_alone() -> None:
    typed = argparse.Namespace(command="serve", model=None, port="1")
    assert read_settings(typed, ServeSettings).http.port == 1


WSL = ["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"]


@pytest.mark.parametrize(
    ("files", "is_there"),
    [
        (["dev/nvidiactl"], True),
        (["dev/nvidia0"], True),
        (WSL, True),
        (WSL[:1], False),
        (WSL[1:], False),
        (["dev/dri/card0", "proc/driver/nvidia/version", "usr/bin/nvidia-smi"], False),
    ],
)
def test_a_gpu_of_nvidias_shows_by_its_device(files: list[str], is_there: bool, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert has_nvidia_gpu(tmp_path) == is_there
