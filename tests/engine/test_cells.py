import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamaherd.engine.cells import CellLedger

N = 64


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against sequences of plain objects, one object a cell."""

    def __init__(self):
        super().__init__()
        self.ledger = CellLedger(N, unified=True)
        self.model = {}
        self.next = 0

    def used(self):
        return {id(c) for cells in self.model.values() for c in cells}

    def some(self, data):
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule()
    def open(self):
        self.ledger.open(self.next)
        self.model[self.next] = []
        self.next += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data(), n=st.integers(1, 20))
    def append(self, data, n):
        sequence = self.some(data)
        if n <= self.ledger.free:
            self.ledger.append(sequence, n)
            self.model[sequence] += [object() for _ in range(n)]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data):
        source = self.some(data)
        n = data.draw(st.integers(0, len(self.model[source])))
        self.ledger.fork(source, self.next, n)
        self.model[self.next] = self.model[source][:n]
        self.next += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def trim(self, data):
        sequence = self.some(data)
        n = data.draw(st.integers(0, len(self.model[sequence])))
        self.ledger.trim(sequence, n)
        del self.model[sequence][n:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cut(self, data):
        sequence = self.some(data)
        start = data.draw(st.integers(0, len(self.model[sequence])))
        end = data.draw(st.integers(start, len(self.model[sequence])))
        self.ledger.cut(sequence, start, end)
        del self.model[sequence][start:end]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def close(self, data):
        sequence = self.some(data)
        self.ledger.close(sequence)
        del self.model[sequence]

    @invariant()
    def counts_agree(self):
        assert self.ledger.free == N - len(self.used())
        for sequence, cells in self.model.items():
            others = {id(c) for s, o in self.model.items() if s != sequence for c in o}
            assert self.ledger.length(sequence) == len(cells)
            assert self.ledger.own(sequence) == sum(id(c) not in others for c in cells)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_split_cache_copies():
    ledger = CellLedger(100, unified=False)
    ledger.open(0)
    ledger.append(0, 30)
    ledger.fork(0, 1, 20)
    assert ledger.free == 50
    assert not ledger.shared(1)


def test_unsharing_takes_cells_of_its_own():
    ledger = CellLedger(100, unified=True)
    ledger.open(0)
    ledger.append(0, 30)
    ledger.fork(0, 1, 30)
    assert ledger.shared(1)
    ledger.unshare(1)
    assert not ledger.shared(1)
    assert ledger.free == 40
    assert np.all(ledger._users[: ledger.n_cells] <= 1)
