"""Names of teams and keys."""

import pytest

from tenants import teams
from tenants.errors import Invalid
from tenants.names import check_name
from tests.support.tenants.stores import NOW_US, Store

pytestmark = pytest.mark.anyio


@pytest.mark.case("B15", "D15")
@pytest.mark.parametrize(
    "name",
    [
        "",
        "ML",
        " ml ",
        "ml ",
        "Reneé",
        "renée",
        "rеnee",
        "a" * 64,
        "-a",
        ".a",
        "_a",
        "a b",
        "a/b",
        "a\n",
        "=cmd|'/C calc'!A0",
        "+1",
        "@x",
        "<script>alert(1)</script>",
        'a,"b"\nc',
        "a\x00",
        "٣",
        "a;drop table teams",
    ],
)
async def test_names_that_mislead_people_spreadsheets_or_pages_are_refused(store: Store, name: str) -> None:
    with pytest.raises(Invalid, match="not allowed: use 1 to 63 of a-z"):
        await store.team(name)
    await store.team("fine")
    with pytest.raises(Invalid):
        async with store.database.begin_immediate() as connection:
            await teams.update_team(connection, "fine", new_name=name, at_us=NOW_US, actor="test")


@pytest.mark.parametrize("name", ["a", "0", "vision-lab", "a.b_c-d", "a" * 63])
def test_plain_names_are_taken(name: str) -> None:
    assert check_name("Team", name) == name
