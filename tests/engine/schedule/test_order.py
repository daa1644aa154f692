"""What is expected next, after what was asked for before."""

from __future__ import annotations

import itertools

from streamer.engine.schedule.order import LayerUse, Order, Phase, farthest

PHASES = {phase.value: phase for phase in Phase}


def after(visits: str, *, units: int = 3) -> Order:
    """An order that has seen ``visits``, as ``"F0 F1 B1 B0"``."""
    order = Order(range(units))
    for visit in visits.split():
        order.advance(LayerUse(int(visit[1:]), PHASES[visit[0]]))
    return order


def upcoming(visits: str, *, units: int = 3) -> list[int]:
    return list(after(visits, units=units).upcoming())


def check_from_every_place(visits: str, cycle: list[int], *, before: str, units: int = 3) -> None:
    """After ``before``, and any part of ``visits``, the rest of ``cycle`` is expected, and then all of it."""
    seen = visits.split()
    for position in range(1, len(seen) + 1):
        found = upcoming(before + " ".join(seen[:position]), units=units)
        assert found == cycle[position:] + 2 * cycle


def test_default_cycle_from_every_place() -> None:
    check_from_every_place("F0 F1 F2 B2 B1 B0", [0, 1, 2, 2, 1, 0], before="")


def test_skipped_units_are_looked_past() -> None:
    assert upcoming("F0 F2") == [2, 1, 0] + 2 * [0, 1, 2, 2, 1, 0]
    assert upcoming("F0 F2 B2 B0") == 2 * [0, 1, 2, 2, 1, 0]


def test_skipped_unit_is_not_expected_until_it_comes_back() -> None:
    dropped = "F0 F2 B2 B0 "
    assert upcoming(dropped + "F0") == [2, 2, 0] + 2 * [0, 2, 2, 0]
    # a visit that nobody expected leaves the expectation where it was
    assert upcoming(dropped + "F0 F1") == [2, 2, 0] + 2 * [0, 2, 2, 0]
    assert upcoming(dropped + "F0 F1 F2 B2 B1 B0 F0") == [1, 2, 2, 1, 0] + 2 * [0, 1, 2, 2, 1, 0]


def test_inference_is_a_cycle_of_its_own() -> None:
    assert upcoming("I0") == [1, 2] + 2 * [0, 1, 2]
    assert upcoming("I0 I1 I2") == 2 * [0, 1, 2]
    assert upcoming("I0 I1 I2 I0") == [1, 2] + 2 * [0, 1, 2]
    # learned, and over again as soon as a unit repeats
    assert upcoming("I2 I0 I2") == [0] + 2 * [2, 0]


def test_inference_between_training_steps_changes_no_training() -> None:
    learned = "F2 F0 B0 B2 "
    cycle = [2, 0, 0, 2]
    assert upcoming(learned + "I0 I1 I2 F2") == cycle[1:] + 2 * cycle
    assert upcoming(learned + "F2 F0 B0 B2 I0 F2 F0") == cycle[2:] + 2 * cycle
    assert upcoming("I1 I0 " + learned + "I1") == [0] + 2 * [1, 0]


def test_forward_that_no_backward_followed_is_not_learned() -> None:
    # an exception in user code, then an evaluation, then the next step
    assert upcoming("F0 F1 F2 B2 B1 B0 F0 F1 I0 I1 I2 F0") == [1, 2, 2, 1, 0] + 2 * [0, 1, 2, 2, 1, 0]


def test_frozen_units_belong_to_the_step() -> None:
    """Wherever they are in it, and no backward comes to them."""
    for learned, cycle in (("Z0 F1 F2 B2 B1 ", [0, 1, 2, 2, 1]), ("F0 Z1 F2 B2 B0 ", [0, 1, 2, 2, 0])):
        check_from_every_place(learned, cycle, before=learned)
    # an evaluation changes nothing
    assert upcoming("Z0 F1 F2 B2 B1 I0 I1 I2 Z0") == [1, 2, 2, 1] + 2 * [0, 1, 2, 2, 1]


def test_frozen_units_alone_are_a_cycle() -> None:
    learned = "Z0 Z1 Z2 "
    assert upcoming(learned * 2 + "Z0") == [1, 2] + 2 * [0, 1, 2]
    assert upcoming(learned * 2) == 2 * [0, 1, 2]
    assert upcoming(learned * 2 + "I0 I1 I2 I0 I1 I2 Z0") == [1, 2] + 2 * [0, 1, 2]


def test_inference_between_forward_and_backward_belongs_to_the_step() -> None:
    """A reference model of the same layers, without adapters say."""
    learned = "F0 F1 I0 I1 B1 B0 "
    check_from_every_place(learned, [0, 1, 0, 1, 1, 0], before=learned, units=2)
    # an evaluation of many batches after an error in user code does not
    assert upcoming("F0 F1 I0 I1 I0", units=2) == [1] + 2 * [0, 1]


def test_any_visits_are_served() -> None:
    """No sequence of visits is refused, and what is expected is always among the units."""
    visits = [f"{phase}{unit}" for phase in "FZBI" for unit in range(2)]
    for sequence in itertools.product(visits, repeat=4):
        assert set(upcoming(" ".join(sequence), units=2)) <= {0, 1}


def test_farthest() -> None:
    equal = [8, 8, 8]
    assert farthest([], [0], equal) is None
    assert farthest([0, 1, 2], [2, 0, 1], equal) == 1
    assert farthest([0, 2], [2, 0, 1], equal) == 0
    # the first use counts, not the last
    assert farthest([0, 1], [0, 1, 0], equal) == 1
    # never wanted again is farther than anything
    assert farthest([0, 1, 2], [2, 0, 2, 0], equal) == 1
    # of equals, the first
    assert farthest([2, 1], [], equal) == 2


def test_a_large_unit_stays_rather_than_a_small_one() -> None:
    assert farthest([0, 1], [0, 2, 1], [1, 2, 1]) == 1
    assert farthest([0, 1], [0, 2, 1], [1, 4, 1]) == 0
    assert farthest([0, 1], [0, 2], [1, 4, 1]) == 1
    assert farthest([0, 1], [0, 1], [0, 0]) == 1
