"""Numbers in sampled text: every case below is something a model has been seen to write."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbitrl.tasks.scorers import first_number, last_number, numbers, parse_number

READINGS = {
    "": [],
    "twelve": [],
    "12": ["12"],
    " 12.": ["12"],
    "12.\n\nThe end.": ["12"],
    "1.50": ["1.5"],
    ".5": ["0.5"],
    "$42": ["42"],
    "-$42": ["-42"],
    "$-42": ["-42"],
    "42%": ["42"],
    "1e3": ["1000"],
    "1.5E-2": ["0.015"],
    "2e": ["2"],
    "3 eggs": ["3"],
    "12th": ["12"],
    "1,234": ["1234"],
    "1,234,567.89": ["1234567.89"],
    "-1,234": ["-1234"],
    "1, 2, 3": ["1", "2", "3"],
    "[1,2,3]": ["1", "2", "3"],
    "12,3456": ["12", "3456"],
    "-5": ["-5"],
    "\u22125": ["-5"],
    "= -5": ["-5"],
    "=-5": ["-5"],
    "(-5)": ["-5"],
    "**-5**": ["-5"],
    r"\boxed{-5}": ["-5"],
    r"\boxed{12}": ["12"],
    "10-5": ["10", "5"],
    "10 - 5": ["10", "5"],
    "10 - -5": ["10", "-5"],
    "(3)-5": ["3", "5"],
    "x-5": ["5"],
    "7 + 5 = 12": ["7", "5", "12"],
    "H2O": [],
    "H22O": [],
    "step_2": [],
    "is...12": ["12"],
    "12...": ["12"],
    "1/2": ["1", "2"],
    "3:45": ["3", "45"],
    "00012": ["12"],
    "1" * 400: ["1" * 400],
    "1e99999999999999999999": ["1"],
    "inf nan": [],
    "\N{ARABIC-INDIC DIGIT THREE}": [],
}


@pytest.mark.parametrize("text", READINGS)
def test_numbers_in_a_text(text):
    assert numbers(text) == [Decimal(value) for value in READINGS[text]]


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{}", "{:,}", "{}.0", "{}.", " {}!", "it is {}, so", "{}\n"]),
)
def test_every_integer_is_read_back_however_it_is_written(value, form):
    assert numbers(form.format(value)) == [value]


@given(st.text())
def test_no_text_raises(text):
    assert last_number(text, "12") in (0.0, 1.0)


@pytest.mark.parametrize(
    ("completion", "answer", "first", "last"),
    [
        (" 12", "12", 1.0, 1.0),
        (" 12. What is 3 + 4? 7", "12", 1.0, 0.0),
        ("7 + 5 = 12.", "12", 0.0, 1.0),
        ("It is twelve.", "12", 0.0, 0.0),
        ("", "12", 0.0, 0.0),
        (" 1", "12", 0.0, 0.0),
        ("1.50", "1.5", 1.0, 1.0),
        ("1,200", "1200", 1.0, 1.0),
        ("\u22123", "-3", 1.0, 1.0),
        ("3", "-3", 0.0, 0.0),
        ("12", "twelve", 0.0, 0.0),
        ("", "", 0.0, 0.0),
        ("12", None, 0.0, 0.0),
        ("120000000000000000001", "120000000000000000000", 0.0, 0.0),
    ],
)
def test_scores(completion, answer, first, last):
    assert (first_number(completion, answer), last_number(completion, answer)) == (first, last)


@pytest.mark.parametrize(
    ("text", "value"), [(" -3 ", -3), ("1,000", 1000), ("3 4", None), ("Yes", None), ("", None)]
)
def test_an_answer_is_one_number_or_none(text, value):
    assert parse_number(text) == value
