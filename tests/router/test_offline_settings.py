"""Settings of `plait.LLM`: the names of `plait serve`, and refusals that say what is meant."""

import pytest
from plait.errors import SettingsError
from plait.offline.prompts import Prompt, params_of, prompts_of
from plait.offline.sampling_params import SamplingParams
from plait.offline.settings import read_keywords


def test_flags_and_their_aliases_are_taken_with_underscores() -> None:
    settings = read_keywords({"tensor_parallel_size": 2, "max_num_seqs": 32, "enforce_eager": True, "page_size": 16})
    assert (settings.process.tp, settings.scheduler.max_seqs, settings.pages.page_size) == (2, 32, 16)
    assert not settings.device.cuda_graphs


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_seq": 1}, "unknown setting `max_seq`; did you mean `max_seqs`?"),
        ({"swap_space": 4}, "unknown setting `swap_space`; docs/settings.md lists them"),
        ({"port": 8000}, "`port` is for servers; leave it out, or start one with `plait serve`"),
        ({"max_num_seqs": "many"}, "`max_num_seqs` is 'many'; allowed: a whole number from 1 to 4096"),
        ({"enforce_eager": 3}, "`enforce_eager` is 3; allowed: True or False"),
        ({"page_size": 24}, "--page-size is 24; allowed: a power of two"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(given: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_keywords(given)
    assert refused.value.message.startswith(said)


def test_prompts_come_in_each_of_vllms_forms() -> None:
    assert prompts_of("a") == ["a"]
    assert prompts_of([1, 2]) == [[1, 2]]
    mixed: list[Prompt] = ["a", [1], {"prompt": "b"}, {"prompt_token_ids": [2]}]
    assert prompts_of(mixed) == ["a", [1], "b", [2]]
    assert prompts_of([]) == []
    with pytest.raises(ValueError, match="give a text or a list of token ids"):
        prompts_of([1.5])  # type: ignore[arg-type]


def test_each_prompt_has_its_params_or_all_have_the_same() -> None:
    one, other = SamplingParams(seed=1), SamplingParams(seed=2)
    assert params_of(one, 2) == [one, one]
    assert params_of([one, other], 2) == [one, other]
    with pytest.raises(ValueError, match="1 SamplingParams for 2 prompts; give one, or one for each prompt"):
        params_of([one], 2)


def test_only_fields_that_are_given_reach_the_engine() -> None:
    assert SamplingParams().fields() == {}
    given = {"temperature": 0.0, "stop": ["x"], "logit_bias": {3: 1.5}, "structured_outputs": {"choice": ["a"]}}
    assert SamplingParams(**given).fields() == given  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
