from typing import Any

import pytest

from tests.models.lit.flow_kinds import KINDS, Make


@pytest.fixture(params=KINDS, ids=["cwm", "wap"])
def kind(request: pytest.FixtureRequest) -> tuple[Make, list[Any]]:
    make, samples = KINDS[request.param]
    return make, samples()
