from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.files.stock_llama import StockLlama


@pytest.fixture(scope="session")
def stock_llama() -> Iterator[StockLlama]:
    oracle = StockLlama()
    yield oracle
    oracle.close()
