"""`vllm.utils.dataclasses` does what the standard library's module does."""

import copy
import dataclasses as standard
import pickle
import subprocess
import sys
from typing import ClassVar

import pytest

from vllm.utils import dataclasses as ours


def classes(module):
    """The same classes, made by one of the two modules."""

    @module.dataclass(frozen=True)
    class Base:
        first: int
        second: str = "b"
        last: bool = module.field(default=False, kw_only=True)
        shared: ClassVar[int] = 7

    @module.dataclass(frozen=True)
    class Child(Base):
        second: str = "c"
        note: object = module.field(default=None, compare=False)
        many: list = module.field(default_factory=list, compare=False)

    @module.dataclass(kw_only=True)
    class Settings:
        size: int
        names: list = module.field(default_factory=list, metadata={"help": "text"})

        def __post_init__(self):
            self.size = abs(self.size)

    @module.dataclass(eq=False)
    class Identity:
        inner: object
        pairs: tuple = ()

        def __repr__(self):
            return "its own"

    @module.dataclass(frozen=True)
    class Empty:
        pass

    options = {"compiled": True} if module is ours else {}

    @module.dataclass(frozen=True, **options)
    class Quick:
        first: int
        second: tuple = ()
        third: object = module.field(default=None, compare=False)

        def __post_init__(self):
            assert self.first >= 0

    return {kind.__name__: kind for kind in (Base, Child, Settings, Identity, Empty, Quick)}


STANDARD, OURS = classes(standard), classes(ours)
VALUES = [
    ("Base", (1,), {}),
    ("Base", (1,), {"last": True}),
    ("Base", (1, "x"), {}),
    ("Base", (), {"second": "x", "first": 2}),
    ("Child", (1, "x", "a note"), {"last": True}),
    ("Child", (1, "x", "another"), {"last": True}),
    ("Child", (1, "b"), {}),
    ("Settings", (), {"size": -3}),
    ("Settings", (), {"size": 3, "names": ["a"]}),
    ("Identity", (1,), {}),
    ("Identity", (1,), {}),
    ("Empty", (), {}),
    ("Quick", (1,), {}),
    ("Quick", (1, (2,)), {"third": "other"}),
    ("Quick", (), {"first": 1, "third": "third"}),
]
WRONG = [
    ("Base", (), {}),
    ("Base", (1, "x", True), {}),
    ("Base", (1,), {"first": 1}),
    ("Base", (1,), {"unknown": 1}),
    ("Base", (1,), {"last": True, "second": "x", "shared": 1}),
    ("Child", (1, "x", None, [], 5), {}),
    ("Settings", (3,), {}),
    ("Settings", (), {"names": []}),
    ("Empty", (1,), {}),
    ("Quick", (), {}),
    ("Quick", (1,), {"first": 1}),
    ("Quick", (1,), {"unknown": 1}),
]


def made(kinds):
    return [kinds[name](*args, **keywords) for name, args, keywords in VALUES]


def test_values_are_equal_hashed_and_shown_alike():
    theirs, mine = made(STANDARD), made(OURS)
    assert list(map(repr, mine)) == list(map(repr, theirs))
    for i in range(len(VALUES)):
        assert [mine[i] == other for other in mine] == [theirs[i] == other for other in theirs]
        assert (type(mine[i]).__hash__ is None) == (type(theirs[i]).__hash__ is None)
    hashed = [value for value in mine if type(value).__hash__]
    assert (
        len(set(hashed)) == len({value for value in theirs if type(value).__hash__}) < len(hashed)
    )


@pytest.mark.parametrize("name, args, keywords", WRONG)
def test_wrong_arguments_are_refused_by_both(name, args, keywords):
    for kinds in (STANDARD, OURS):
        with pytest.raises(TypeError, match=name):
            kinds[name](*args, **keywords)


def test_a_message_names_every_wrong_argument():
    with pytest.raises(TypeError, match=r"of Base: given twice: second; unexpected: x$"):
        OURS["Base"](1, "b", second="c", x=1)
    with pytest.raises(TypeError, match=r"of Base: unexpected: x; missing: first$"):
        OURS["Base"](x=1)
    with pytest.raises(TypeError, match=r"of Base: too many positional: 3$"):
        OURS["Base"](1, "b", True)


def test_a_frozen_value_cannot_change():
    for kinds in (STANDARD, OURS):
        value = kinds["Base"](1)
        with pytest.raises(standard.FrozenInstanceError, match="first"):
            value.first = 2
        with pytest.raises(standard.FrozenInstanceError, match="first"):
            del value.first
    changed = OURS["Settings"](size=1)
    changed.size = -2
    assert changed.size == -2


def test_each_value_has_lists_of_its_own():
    one, other = OURS["Settings"](size=1), OURS["Settings"](size=1)
    one.names.append("a")
    assert other.names == []
    with pytest.raises(ValueError, match=r"Shared\.names: a mutable default; use default_factory"):

        @ours.dataclass(frozen=True)
        class Shared:
            names: list = []  # noqa: RUF012


def test_fields_replace_and_asdict_are_those_of_the_standard_library():
    for name, kind in OURS.items():
        mine, theirs = ours.fields(kind), standard.fields(STANDARD[name])
        shown = [(f.name, f.type, f.compare, f.kw_only, dict(f.metadata)) for f in theirs]
        assert [(f.name, f.type, f.compare, f.kw_only, dict(f.metadata)) for f in mine] == shown
        assert [f.default is ours.MISSING for f in mine] == [
            f.default is standard.MISSING for f in theirs
        ]
        assert kind.__match_args__ == STANDARD[name].__match_args__
        assert ours.is_dataclass(kind) and not ours.is_dataclass(STANDARD[name])
    for mine, theirs in zip(made(OURS), made(STANDARD)):
        assert ours.asdict(mine) == standard.asdict(theirs)
    nested = [
        kinds["Identity"](made(kinds)[0], ({"a": [made(kinds)[7]]},)) for kinds in (OURS, STANDARD)
    ]
    assert ours.asdict(nested[0]) == standard.asdict(nested[1])
    child = OURS["Child"](1, "x", "a note", last=True)
    assert ours.replace(child, first=2) == OURS["Child"](2, "x", last=True)
    assert ours.replace(child, first=2).note == "a note"
    with pytest.raises(TypeError, match="unexpected: unknown"):
        ours.replace(child, unknown=2)


def test_the_standard_library_knows_them_as_dataclasses():
    child = OURS["Child"](1, "x", last=True)
    assert standard.is_dataclass(child)
    assert standard.replace(child, first=2) == OURS["Child"](2, "x", last=True)
    assert standard.asdict(child) == ours.asdict(child)
    settings = standard.fields(OURS["Settings"])
    assert [(f.name, f.default_factory, dict(f.metadata)) for f in settings] == [
        ("size", standard.MISSING, {}),
        ("names", list, {"help": "text"}),
    ]
    assert copy.copy(child) == copy.deepcopy(child) == child


@ours.dataclass(frozen=True)
class Pickled:
    """At the top of a module, where pickle finds it."""

    size: int
    names: tuple[str, ...] = ()


def test_a_value_survives_pickling():
    value = Pickled(3, ("a",))
    assert pickle.loads(pickle.dumps(value)) == value


def test_explaining_a_model_does_not_load_the_standard_module():
    """It imports `inspect`, and compiles code for every class."""
    code = (
        "import sys\n"
        "from vllm.entrypoints.cli.main import main\n"
        "main(['kernels', 'explain', 'Qwen3.5-35B-A3B-FP8', '--device', 'b200', '--libs', 'all'])\n"
        "print(sorted({'dataclasses', 'inspect'} & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
