from __future__ import annotations

import pytest

from torchdeq.registry import Registry


def test_an_unknown_name_gets_a_suggestion_and_the_list() -> None:
    names: Registry[int] = Registry("solver")
    names.register("anderson", 1)
    names.register("broyden", 2)
    with pytest.raises(KeyError) as error:
        names["andersen"]
    assert str(error.value) == (
        "unknown solver 'andersen'; did you mean 'anderson'? known: anderson, broyden"
    )
    with pytest.raises(KeyError, match="unknown solver 'xyz'; known: anderson, broyden"):
        names["xyz"]


def test_built_in_names_stay_and_a_users_own_name_is_replaced_with_a_warning() -> None:
    names: Registry[int] = Registry("norm")
    names.register("weight", 1)
    names.seal()
    with pytest.raises(ValueError, match="'weight' is built in"):
        names.register("weight", 2)
    names.register("mine", 3)
    with pytest.warns(UserWarning, match="'mine' was registered before"):
        names.register("mine", 4)
    assert dict(names) == {"weight": 1, "mine": 4}


def test_registers_as_a_decorator() -> None:
    names: Registry[type] = Registry("core")

    @names.register("thing")
    class Thing: ...

    assert names["thing"] is Thing
    assert len(names) == 1


@pytest.mark.parametrize("name", ["", 3, None])
def test_a_name_is_a_non_empty_string(name: object) -> None:
    with pytest.raises(TypeError, match="non-empty string"):
        Registry("solver").register(name, 1)  # type: ignore[call-overload]
