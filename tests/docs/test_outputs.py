"""The outputs of README.md, docs/ and the notebooks are what is printed: `make outputs` writes them anew."""

import pytest

import outputs
from scripts import ROOT


@pytest.mark.parametrize("page", [*outputs.pages(), *outputs.NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_what_is_printed(page):
    shown, printed = page.read_text(encoding="utf-8"), outputs.replayed(page)
    assert outputs.words_of(shown) == outputs.words_of(printed), "make outputs"
    for was, now in zip(outputs.numbers_of(shown), outputs.numbers_of(printed), strict=True):
        assert outputs.near(was, now), f"shown {was:g}, printed {now:g}"


def test_words_may_not_differ_and_numbers_only_a_little():
    shown = "accuracy  0.842 of label-flip by 15\n1.0 s, runs/digits-0123456789ab"
    same = "accuracy 0.83 of label-flip\nby 14 12.5 s, runs/digits-ffff56789ab0"
    assert outputs.words_of(shown) == outputs.words_of(same)
    assert outputs.numbers_of(shown) == [0.842, 15.0]
    assert outputs.words_of(shown) != outputs.words_of(same.replace("label", "table"))
    assert outputs.near(0.842, 0.83)
    assert not outputs.near(0.842, 0.156)
