from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.profile import DeviceProfile, Timing
from ragtag.profile.cache import MAX_AGE_S, Cache, Entry, age_in_words, cache_directory, key_of

NOW_S = 1.8e9


def entry(measured_at=NOW_S):
    device = DeviceProfile(name="box", timings=(Timing(samples=1, seconds=0.1),), measured_at=measured_at)
    return Entry(device=device)


def test_what_was_stored_is_found_until_it_is_old(tmp_path):
    assert Cache(tmp_path / "new", NOW_S).store("key", entry()) == ""
    assert Cache(tmp_path / "new", NOW_S + MAX_AGE_S - 1).find("key") == entry()
    assert Cache(tmp_path / "new", NOW_S + MAX_AGE_S + 1).find("key") is None
    assert Cache(tmp_path / "new", NOW_S - 1).find("key") is None
    assert Cache(tmp_path / "new", NOW_S).find("other") is None
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["profile-key.json"]


def test_a_damaged_entry_is_measured_again_and_a_directory_that_refuses_is_said(tmp_path):
    cache = Cache(tmp_path, NOW_S)
    cache.store("key", entry())
    file = tmp_path / "profile-key.json"
    for content in (file.read_bytes()[:40], b"", b"\xff\xfe", b"[1]", b'{"device": 3}'):
        file.write_bytes(content)
        assert cache.find("key") is None
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert str(blocked) in Cache(blocked, NOW_S).store("key", entry())


@given(st.dictionaries(st.text(), st.integers(-1000, 1000) | st.text(), min_size=1))
def test_a_key_depends_on_every_fact_and_on_no_order(facts):
    assert key_of(facts) == key_of(dict(reversed(facts.items())))
    for name in facts:
        assert key_of({**facts, name: [facts[name]]}) != key_of(facts)


def test_directory_and_age():
    assert str(cache_directory({"XDG_CACHE_HOME": "/c"})) == "/c/ragtag"
    assert str(cache_directory({"HOME": "/home/me"})) == "/home/me/.cache/ragtag"
    assert [age_in_words(s) for s in (5, 61, 7300, 3 * 86400)] == [
        "less than a minute",
        "1 minute",
        "2 hours",
        "3 days",
    ]
