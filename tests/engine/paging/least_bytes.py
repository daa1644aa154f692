"""The least bytes of weights that a cycle of visits can move to the device, and those that are moved.

A cycle of visits comes again and again. A slot holds one unit, and what is in no slot when it is visited is
copied there, whole. A unit that was updated since it was last visited has lost the part that is trained, and
that part alone is copied if the unit is still in a slot. What is least is the mean over endless repetitions,
which may differ from cycle to cycle. There are two such means:

- *unconstrained*: a copy may take the slot of the unit that was visited just before. Nothing else is asked,
  so nothing that visits units in this order through so many slots can move less.
- *overlapped*: while a unit runs, the next one is in another slot or on its way there, so that its copy can
  hide under compute. This needs two slots. What an update between the two visits leaves is what that copy
  brings, in one go.

The search is exact. Giving up a unit before its slot is needed, or copying it before it must be there, saves
no byte; so a state is which units are in slots, and a visit has one successor for every unit that may give
way. From empty slots on, the least costs after one cycle, two, three, ... grow evenly from some cycle on,
up to a repeating pattern [Cuninghame-Green, Minimax Algebra, 1979]; that growth is the mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

State = frozenset[int]
Costs = dict[State, int]


@dataclass(frozen=True)
class Cycle:
    """Visits of units, and after which of them (by number) which units are updated.

    ``whole`` and ``trained`` are each unit's bytes: all of them, and those that an update changes.
    """

    visits: Sequence[int]
    updates: Mapping[int, Collection[int]]
    whole: Sequence[int]
    trained: Sequence[int]

    def refresh(self) -> list[int]:
        """For each visit, the bytes that it takes where its unit has stayed in a slot since its last one."""
        outdated: set[int] = set()
        found: list[int] = []
        for _ in range(2):
            found = []
            for number, unit in enumerate(self.visits):
                found.append(self.trained[unit] if unit in outdated else 0)
                outdated.discard(unit)
                outdated.update(self.updates.get(number, ()))
        return found


def training(layers: int, *, update: str = "step", backwards: int = 1) -> Cycle:
    """Steps of a stack of equal layers of one byte: ``backwards`` times forward and backward, then updates,
    or with ``update="backward"`` each layer's after its backward."""
    once = [*range(layers), *reversed(range(layers))]
    visits = once * backwards
    updates: dict[int, Collection[int]] = {len(visits) - 1: range(layers)}
    if update == "backward":
        updates = {number: (unit,) for number, unit in enumerate(visits) if number % len(once) >= layers}
    return Cycle(visits, updates, [1] * layers, [1] * layers)


def inference(layers: int) -> Cycle:
    """Forwards of a stack of equal layers of one byte."""
    return Cycle(range(layers), {}, [1] * layers, [0] * layers)


def least_bytes(cycle: Cycle, slots: int, *, overlapped: bool = False) -> Fraction:
    """The least mean bytes of a cycle, for ``slots`` slots; see the module's docstring.

    Raises ValueError for an overlap with one slot.
    """
    if overlapped and slots < 2 and len(set(cycle.visits)) > 1:
        raise ValueError("a copy cannot overlap with compute in one slot: give two or more")
    count = len(cycle.visits)
    refresh = cycle.refresh()
    # while visit n runs, units[n] must be in slots, the last of them is asked for by visit asking[n]
    following = [(number + 1) % count if overlapped else number for number in range(count)]
    costs: Costs = {frozenset(): 0}
    seen: dict[tuple[tuple[State, int], ...], tuple[int, int]] = {}
    total = 0
    for cycles in range(10_000):
        for number, asked in enumerate(following):
            needed = frozenset((cycle.visits[number], cycle.visits[asked]))
            unit = cycle.visits[asked]
            costs = _visit(costs, needed, unit, cycle.whole[unit], refresh[asked], slots)
        least = min(costs.values())
        total += least
        costs = {state: cost - least for state, cost in costs.items()}
        shape = tuple(sorted(costs.items(), key=lambda item: sorted(item[0])))
        if shape in seen:
            cycles_before, total_before = seen[shape]
            return Fraction(total - total_before, cycles - cycles_before)
        seen[shape] = cycles, total
    raise AssertionError("the least costs of a cycle grow evenly sooner or later")


def _visit(costs: Costs, needed: State, unit: int, whole: int, refresh: int, slots: int) -> Costs:
    """The least cost of each state after ``unit`` was asked for and all ``needed`` are there."""
    after: Costs = {}
    for state, cost in costs.items():
        if unit in state:
            choices, cost = [state], cost + refresh
        else:
            cost += whole
            full = state | needed
            gives_way = full - needed if len(full) > slots else ()
            choices = [full - {other} for other in gives_way] or [full]
        for choice in choices:
            after[choice] = min(cost, after.get(choice, cost))
    return after
