"""Every valid config of every family parses, whatever its spelling, and describes a module whose parameters are exactly those of the weight table."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.config_checks import assert_buildable, entry_of, parsed
from tests.config_strategies import DRAFTS
from tests.target_strategies import TARGETS

FAMILIES: dict[str, Any] = {**DRAFTS, **TARGETS}
# Each example of these runs several parses or builds: fewer are enough.
few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("family", FAMILIES)
@few
@given(st.data())
def test_all_spellings_of_a_config_parse_to_one_record_and_stay_as_they_are(family: str, data: st.DataObject) -> None:
    sample = data.draw(FAMILIES[family])
    configs = []
    for raw in sample.spellings:
        before = copy.deepcopy(raw)
        configs += [parsed(raw), parsed(raw)]
        assert raw == before
        assert configs[-1].unknown_fields == configs[-2].unknown_fields == ()
    assert all(config == configs[0] for config in configs)
    assert len({repr(config.rope) for config in configs}) == 1


@pytest.mark.parametrize("family", FAMILIES)
@few
@given(st.data())
def test_a_config_can_be_built_and_its_weight_table_is_about_the_module_s_parameters(family: str, data: st.DataObject) -> None:
    sample = data.draw(FAMILIES[family])
    assert_buildable(entry_of(sample.raw), parsed(sample.raw), sample.names)
