"""Fields about windows and causality for the random configs of drafts."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.support.config_strategies import SLIDING, Draw, Raw, some


def masked(draw: Draw, raw: Raw) -> Raw:
    """`raw`, a draft's config, with further fields about windows and causality, none of which contradicts another."""
    places = [raw, *(place for place in raw.values() if isinstance(place, dict))]
    stated = {name: value for place in places for name, value in place.items() if value is not None}
    causal = next((stated[name] for name in ("causal", "is_causal") if name in stated), draw(st.booleans()))
    names = draw(st.sampled_from([(), (), ("causal",), ("is_causal",), ("causal", "is_causal")]))
    fields: Raw = dict.fromkeys(names, causal)
    if "sliding_window_non_causal" not in stated:
        fields |= some(draw, {"sliding_window_non_causal": draw(st.booleans())})
    if SLIDING in stated.get("layer_types", ()):
        window = stated["sliding_window"]
        return {**raw, **fields, **some(draw, {"use_swa": draw(st.booleans()), "swa_window_size": window})}
    fields |= some(draw, {"use_swa": draw(st.booleans())})
    if "use_swa" in fields:
        fields |= some(draw, {"swa_window_size": draw(st.integers(1, 9))})
    if fields.get("use_swa") and "swa_window_size" not in fields and not stated.get("sliding_window"):
        fields["swa_window_size"] = draw(st.integers(1, 9))
    return {**raw, **fields}
