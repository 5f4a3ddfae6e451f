"""What the engine's tests share and is dear to make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny_references import TinyModels


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    from tiny_references import TinyModels

    return TinyModels(tmp_path_factory.mktemp("tiny"))
