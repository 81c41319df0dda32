import io

from hypothesis import given
from hypothesis import strategies as st

from ragtag.cli.folding import Folding, names


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def folding():
    clock, out = Clock(), io.BytesIO()
    return Folding("rank", lambda stream, content: stream.write(content), clock), clock, out


def test_what_several_say_alike_is_one_line_in_the_place_of_the_first():
    fold, clock, out = folding()
    fold.say(1, b"slow disk\n", out)
    fold.say(2, b"my own\n", out)
    for rank in (3, 2, 5):
        fold.say(rank, b"slow disk\n", out)
    fold.show()
    assert out.getvalue() == b"", "others may still say the same"
    clock.now_s = 1.0
    fold.show()
    assert out.getvalue() == b"[ranks 1-3, 5] slow disk\n[rank 2] my own\n"


def test_who_repeats_a_line_is_heard_again():
    fold, _, out = folding()
    for _ in range(2):
        for rank in (1, 2):
            fold.say(rank, b"retrying\n", out)
    fold.show(everything=True)
    assert out.getvalue() == b"[ranks 1-2] retrying\n" * 2


def test_streams_are_kept_apart():
    fold, _, out = folding()
    errors = io.BytesIO()
    fold.say(1, b"same\n", out)
    fold.say(2, b"same\n", errors)
    fold.show(everything=True)
    assert (out.getvalue(), errors.getvalue()) == (b"[rank 1] same\n", b"[rank 2] same\n")


def test_a_flood_of_lines_does_not_pile_up():
    fold, _, out = folding()
    for number in range(2000):
        fold.say(1, b"%d\n" % number, out)
    assert out.getvalue().count(b"\n") >= 1500
    fold.show(everything=True)
    assert out.getvalue() == b"".join(b"[rank 1] %d\n" % number for number in range(2000))


@given(st.sets(st.integers(0, 40), min_size=1))
def test_names_say_exactly_the_numbers(numbers):
    said = names("rank", numbers)
    kind, _, rest = said.partition(" ")
    assert kind == ("rank" if len(numbers) == 1 else "ranks")
    found = set()
    for part in rest.split(", "):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers
