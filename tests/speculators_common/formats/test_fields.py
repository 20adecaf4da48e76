"""Typed reading of configs: the error of a wrong value names file, dotted path, value found and values allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.fields import Fields, agreed


def fields(**raw) -> Fields:
    return Fields(raw, "dir/config.json")


def message(read) -> str:
    with pytest.raises(CheckpointError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_typed_values_are_returned_as_python_values():
    f = fields(i=3, x=2, y=0.5, b=False, s="a", ints=[1, -2], strings=["a", "b"])
    assert (f.integer("i"), f.number("x"), f.number("y"), f.boolean("b"), f.string("s")) == (3, 2.0, 0.5, False, "a")
    assert isinstance(f.number("x"), float)
    assert f.int_list("ints") == (1, -2)
    assert f.string_list("strings") == ("a", "b")


@pytest.mark.parametrize("value", [True, 1.0, "1", [1], {}])
def test_only_a_json_integer_is_an_integer(value):
    assert message(lambda: fields(n=value).integer("n")) == f"dir/config.json: n: found {value!r}, allowed an integer"


@pytest.mark.parametrize("value", [True, "1", float("nan"), float("inf"), -float("inf"), 10**400, -(10**400)])
def test_only_a_finite_json_number_is_a_number(value):
    assert (
        message(lambda: fields(x=value).number("x")) == f"dir/config.json: x: found {value!r}, allowed a finite number"
    )


@pytest.mark.parametrize("value", [0, 1, "true"])
def test_only_true_and_false_are_booleans(value):
    assert (
        message(lambda: fields(b=value).boolean("b")) == f"dir/config.json: b: found {value!r}, allowed true or false"
    )


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda f: f.integer("n", minimum=5), "n: found 4, allowed an integer >= 5"),
        (lambda f: f.integer("n", minimum=1, maximum=3), "n: found 4, allowed an integer >= 1 and <= 3"),
        (lambda f: f.number("n", above=4), "n: found 4, allowed a finite number > 4"),
        (lambda f: f.number("n", minimum=5), "n: found 4, allowed a finite number >= 5"),
        (lambda f: f.number("n", above=0, maximum=1), "n: found 4, allowed a finite number > 0 and <= 1"),
        (lambda f: f.string("s", allowed=("x", "y")), "s: found 'z', allowed x, y"),
        (lambda f: f.string_list("strings", allowed=("x",)), "strings: found ['x', 'z'], allowed a list of x"),
        (lambda f: f.int_list("mixed"), "mixed: found [1, True], allowed a list of integers"),
        (lambda f: f.int_list("n"), "n: found 4, allowed a list of integers"),
        (lambda f: f.section("n"), "n: found 4, allowed a JSON object"),
        (lambda f: f.sections("mixed"), "mixed: found [1, True], allowed a list of JSON objects"),
    ],
)
def test_bounds_and_choices_are_part_of_the_message(read, expected):
    assert (
        message(lambda: read(fields(n=4, s="z", strings=["x", "z"], mixed=[1, True]))) == f"dir/config.json: {expected}"
    )


@pytest.mark.parametrize("value", [2**31, -(2**31), 10**30])
def test_integers_beyond_int32_are_refused(value):
    assert (
        message(lambda: fields(n=value).integer("n"))
        == f"dir/config.json: n: found {value}, allowed an integer, within int32"
    )
    assert message(lambda: fields(ints=[0, value]).int_list("ints")).endswith(
        "allowed a list of integers, within int32"
    )
    assert fields(n=2**31 - 1).integer("n") == 2**31 - 1


@pytest.mark.parametrize("value", [1e300, -1e300, 1e-300, 10**39])
def test_numbers_beyond_float32_are_refused(value):
    assert message(lambda: fields(x=value).number("x")).endswith("allowed a finite number, within the range of float32")
    assert fields(x=0).number("x") == 0.0


def test_values_that_cannot_be_shown_are_refused_all_the_same():
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    said = message(lambda: fields(n=deep).integer("n"))  # how deep a list can be shown depends on the Python version
    assert said.startswith("dir/config.json: n: found ")
    assert said.endswith(", allowed an integer")
    assert len(said) < 600
    assert "found int, too deep or too long to show" in message(lambda: fields(n=10**5000).integer("n"))
    assert len(message(lambda: fields(n="x" * 10**6).integer("n"))) < 600


@pytest.mark.parametrize(("bound", "value"), [("minimum", 4), ("maximum", 4)])
def test_bounds_include_their_ends(bound, value):
    assert fields(n=value).integer("n", **{bound: 4}) == value


def test_a_field_that_is_absent_or_null_takes_the_default_or_is_missing():
    f = fields(null=None)
    assert f.integer("null", default=None) is None
    assert f.boolean("absent", default=True) is True
    assert f.int_list("absent", default=()) == ()
    assert f.sections("absent") == ()
    assert not f.has("null")
    assert (
        message(lambda: f.integer("absent", minimum=1)) == "dir/config.json: absent: missing, allowed an integer >= 1"
    )
    assert message(lambda: f.integer("null", minimum=1)) == "dir/config.json: null: found None, allowed an integer >= 1"


def test_a_default_does_not_excuse_a_wrong_value():
    assert "found 'x', allowed an integer" in message(lambda: fields(n="x").integer("n", default=3))


def test_nested_fields_have_dotted_paths():
    f = fields(outer={"inner": {"n": "x"}, "list": [{"n": 1}, {"n": "y"}]})
    assert message(lambda: f.section("outer").section("inner").integer("n")).startswith(
        "dir/config.json: outer.inner.n: found 'x'"
    )
    assert message(lambda: f.section("outer").section("absent").integer("n")).startswith(
        "dir/config.json: outer.absent.n: missing"
    )
    first, second = f.section("outer").sections("list")
    assert first.integer("n") == 1
    assert message(lambda: second.integer("n")).startswith("dir/config.json: outer.list[1].n: found 'y'")


def test_joined_places_give_the_value_of_whichever_states_it():
    f = fields(a=1, both=3, nested={"b": 2, "both": 3, "a": None})
    joined = f.joined(f.section("nested"))
    assert [joined.integer(name) for name in ("a", "b", "both")] == [1, 2, 3]
    assert joined.dotted_path("b") == "nested.b"


def test_joined_places_that_differ_are_refused_with_both_paths_and_values():
    f = fields(n=1, deep={"n": 2}, nested={"deep": {"n": 3}})
    text = message(lambda: f.joined(f.section("deep")).integer("n"))
    assert text == "dir/config.json: n: found 1, but deep.n is 2, allowed the same value at both places"
    sections = f.joined(f.section("nested")).section("deep")
    assert (
        message(lambda: sections.integer("n"))
        == "dir/config.json: deep.n: found 2, but nested.deep.n is 3, allowed the same value at both places"
    )


def test_a_wrong_type_at_the_second_place_is_found_too():
    f = fields(n=1, nested={"n": True})
    assert (
        message(lambda: f.joined(f.section("nested")).integer("n"))
        == "dir/config.json: nested.n: found True, allowed an integer"
    )


def test_a_field_missing_at_all_places_names_them_all():
    f = fields(nested={"other": 1})
    assert (
        message(lambda: f.joined(f.section("nested")).integer("n"))
        == "dir/config.json: n or nested.n: missing, allowed an integer"
    )


def test_values_under_different_names_can_be_compared():
    assert agreed("f", [("dtype", "bfloat16"), ("torch_dtype", "bfloat16")]) == "bfloat16"
    text = message(lambda: agreed("f", [("dtype", "float32"), ("torch_dtype", "bfloat16")]))
    assert text == "f: dtype: found 'float32', but torch_dtype is 'bfloat16', allowed the same value at both places"


def test_fields_that_nobody_read_are_listed_with_their_paths():
    f = fields(
        read=1,
        new=2,
        null=None,
        harmless=3,
        passed=4,
        entered={"read": 1, "new": 2},
        left={"x": 1},
        items=[{"read": 1, "new": 2}],
    )
    f.integer("read")
    f.ignore("passed")
    f.section("entered").integer("read")
    for item in f.sections("items"):
        item.integer("read")
    assert tuple(path for path, _ in f.unread_items({"harmless"})) == ("new", "entered.new", "left", "items[0].new")


def test_a_look_without_reading_leaves_a_field_unread():
    f = fields(n=1)
    assert f.has("n")
    assert list(f.unread_items()) == [("n", f.raw["n"])]


@given(
    st.one_of(
        st.integers(),
        st.floats(allow_nan=True, allow_infinity=True),
        st.booleans(),
        st.text(),
        st.none(),
        st.lists(st.integers()),
    )
)
def test_every_value_is_read_or_refused_with_its_path(value):
    for read in (Fields.integer, Fields.number, Fields.boolean, Fields.string, Fields.int_list):
        refused = ""
        try:
            result = read(fields(n=value), "n")
        except CheckpointError as error:
            refused = str(error)
        if refused:
            assert refused.startswith("dir/config.json: n: found ")
        else:
            wanted = float(value) if read is Fields.number else value  # a number is a float, rounded where it must be
            assert result == (tuple(wanted) if isinstance(wanted, list) else wanted)
