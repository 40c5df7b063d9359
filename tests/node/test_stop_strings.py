"""Stop strings, wherever token borders are."""

from hypothesis import given
from hypothesis import strategies as st

from disaggregated_inference.node.stop_strings import StopStrings


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    text = StopStrings(stops)
    shown = "".join(text.push(piece) for piece in pieces)
    return shown + text.flush(), text.found


def test_across_tokens() -> None:
    assert run(["one", " EN", "D two"], ["END"]) == ("one ", "END")
    assert run(["one E", "N", "X"], ["END"]) == ("one ENX", None)
    assert run(["ababc"], ["abc"]) == ("ab", "abc")
    assert run(["a", "b"], []) == ("ab", None)
    assert run(["xaby"], ["ab", "a"]) == ("x", "ab")


def test_nothing_is_held_back_without_need() -> None:
    text = StopStrings(["\n\n"])
    assert [text.push(piece) for piece in ("a", "\n", "b", "\n", "\n", "c")] == ["a", "", "\nb", "", "", ""]
    assert text.flush() == ""


def test_a_stop_string_counts_where_it_ends() -> None:
    text = StopStrings(["1\n"])
    assert [text.push("1\n1", counts=False), text.push("\n2"), text.found] == ["1\n", "", "1\n"]
    text = StopStrings(["ab", "xaby"])
    shown = [text.push("xab", counts=False), text.push("z"), text.push("ab")]
    assert (shown, text.found) == (["", "xabz", ""], "ab")
    text = StopStrings(["xab"])
    assert text.push("xa", counts=False) + text.push("c") + text.flush() == "xac"


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_the_output_does_not_depend_on_token_borders(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    shown, found = run(pieces, stops)
    # Token by token a stop string is found when its end is there, so what counts is the stop that ends first.
    ends = {stop: whole.find(stop) + len(stop) for stop in stops if stop in whole}
    assert (found is None) == (not ends)
    if found is None:
        assert shown == whole
    else:
        assert not any(stop in shown for stop in stops)
        assert whole.startswith(shown + found)
