"""How long a round waits: the stated cap is a theorem, and one silent worker costs few deadlines."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noisegate.federation.patience import LARGEST_K, RECOVERY, Attendance, Patience

ROUNDING = 1e-6  # seconds, of sums of many floats


def play(patience, workers, answers):
    """Play rounds. answers(round, worker): seconds after which it answers. Gives how long each round waited."""
    waits = []
    for round in range(10**9):
        times = answers(round)
        if times is None:
            return waits
        awaited = [i for i, worker in enumerate(workers) if worker.awaited(round)]
        longest = patience.longest()
        waited = min(longest, max((times[i] for i in awaited), default=0.0))
        patience.charge(waited)
        for i, worker in enumerate(workers):
            if times[i] <= waited:
                worker.answered()
            elif i in awaited:
                worker.missed(round)
        waits.append(waited)
    raise AssertionError


@settings(max_examples=200, deadline=None)
@given(
    deadline=st.floats(1.0, 100.0),
    share=st.floats(0.01, 1.0),
    stall=st.floats(0.0, 500.0),
    schedule=st.lists(st.lists(st.floats(0.0, 1000.0), min_size=4, max_size=4), max_size=80),
)
def test_whatever_workers_do_the_waits_add_up_to_at_most_the_stated_cap(deadline, share, stall, schedule):
    patience = Patience(deadline, deadline * share, stall)
    waits = play(patience, [Attendance() for _ in range(4)], lambda t: schedule[t] if t < len(schedule) else None)
    assert sum(waits) <= stall + len(waits) * patience.least + ROUNDING
    assert max(waits, default=0.0) <= deadline + ROUNDING
    assert patience.spent <= stall + ROUNDING


@pytest.mark.parametrize("lag", [0.0, 1e-9, 0.01])
def test_the_worst_adversary_reaches_the_cap_and_no_more(lag):
    """Someone answers at the last moment in every round: in time, so that nobody's k ever grows."""
    patience = Patience(30.0, 3.0, 600.0)
    rounds, waits = 200, []
    for _ in range(rounds):
        waits.append(patience.longest())
        patience.charge(waits[-1] + lag)  # a clock that is read a little later
    assert sum(waits) <= 600.0 + rounds * 3.0 + ROUNDING
    assert lag or sum(waits) == pytest.approx(600.0 + rounds * 3.0)
    assert patience.left <= ROUNDING


def test_workers_that_take_turns_are_held_by_the_cap():
    """Each of 50 is silent once it is awaited again: together they would stall every round."""
    patience, rounds = Patience(30.0, 3.0, 600.0), 400
    workers = [Attendance() for _ in range(50)]
    waits = play(patience, workers, lambda t: [math.inf] * 50 if t < rounds else None)
    assert sum(waits) <= 600.0 + rounds * 3.0 + ROUNDING


def test_one_silent_worker_costs_about_the_logarithm_of_the_rounds_in_deadlines():
    patience, rounds = Patience(1.0, 0.01, 1e6), 600
    waits = play(patience, [Attendance() for _ in range(5)], lambda t: [math.inf, *[0.0] * 4] if t < rounds else None)
    assert sum(wait > 0 for wait in waits) <= math.log2(rounds) + 1
    assert sum(wait > 0 for wait in waits) >= 8


def test_the_kth_missed_deadline_means_two_to_the_k_rounds_without_waiting():
    worker = Attendance()
    for k, round in ((1, 10), (2, 20), (3, 40)):
        worker.missed(round)
        assert worker.k == k
        assert [worker.awaited(t) for t in (round + 2**k, round + 2**k + 1)] == [False, True]


def test_k_recovers_by_one_after_enough_rounds_in_time_and_a_miss_starts_the_count_anew():
    worker = Attendance(k=2)
    for _ in range(RECOVERY - 1):
        worker.answered()
    assert worker.k == 2
    worker.missed(0)
    assert worker.k == 3
    for _ in range(3 * RECOVERY):
        worker.answered()
    assert worker.k == 0
    worker.answered()
    assert worker.k == 0


def test_k_is_bounded_and_who_left_is_not_awaited():
    worker = Attendance()
    for round in range(LARGEST_K + 5):
        worker.missed(round)
    assert worker.k == LARGEST_K
    assert not Attendance(left="budget spent").awaited(5)
