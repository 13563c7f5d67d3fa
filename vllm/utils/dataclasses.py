"""Dataclasses as the standard library's, for modules that `vllm kernels explain` loads.

The standard library compiles source code for every class, 0.4 ms each, and imports `inspect` for
it; here all classes share their methods. Instances have no `__slots__` and classes no ordering.
Elsewhere these classes are dataclasses too: `dataclasses.replace`, `fields` and others take them.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar, dataclass_transform, get_origin

T = TypeVar("T")
MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "MISSING"})()


class Field(NamedTuple):
    """As `dataclasses.Field`; MISSING for no default."""

    name: str
    type: Any
    default: Any
    default_factory: Any
    compare: bool
    kw_only: bool
    metadata: Mapping[str, Any]


def field(
    *,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    compare: bool = True,
    kw_only: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    return Field("", None, default, default_factory, compare, kw_only, metadata or {})


@dataclass_transform(field_specifiers=(field,))
def dataclass(
    *, frozen: bool = False, eq: bool = True, kw_only: bool = False, compiled: bool = False
) -> Callable[[type[T]], type[T]]:
    """Without `eq` instances are compared by identity. compiled: generates the code of `__init__`,
    which takes 0.1 ms and halves the time of each call, for values that are made by the thousand.
    """

    def made(cls: type[T]) -> type[T]:
        inherited: list[Field] = [*getattr(cls, "_own_fields", ())]
        fields = {f.name: f for f in inherited} | _declared(cls, kw_only)
        make_init = _compile_init if compiled else _make_init
        init = make_init(tuple(fields.values()), hasattr(cls, "__post_init__"))
        init.__qualname__ = f"{cls.__qualname__}.__init__"  # which errors show
        methods: dict[str, Any] = {
            "__init__": init,
            "_own_fields": tuple(fields.values()),
            "__match_args__": tuple(f.name for f in fields.values() if not f.kw_only),
            "__dataclass_fields__": _StandardFields(),
        }
        if frozen:
            methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
        optional: dict[str, Any] = {"__repr__": _repr}
        if eq:
            key = _make_key([f.name for f in fields.values() if f.compare])
            optional |= _comparison(key, frozen)
        for name, value in methods.items():
            setattr(cls, name, value)
        for name, value in optional.items():
            if name not in cls.__dict__:
                setattr(cls, name, value)
        return cls

    return made


def _declared(cls: type, kw_only: bool) -> dict[str, Field]:
    """The fields that the class itself annotates. Its attributes become their defaults."""
    found = {}
    for name, kind in cls.__dict__.get("__annotations__", {}).items():  # noqa: RUF063
        if kind is ClassVar or get_origin(kind) is ClassVar:
            continue
        given = cls.__dict__.get(name, MISSING)
        if not isinstance(given, Field):
            given = field(default=given)
        if given.default is not MISSING:
            if given.default.__class__.__hash__ is None:
                raise ValueError(f"{cls.__name__}.{name}: a mutable default; use default_factory")
            setattr(cls, name, given.default)
        elif name in cls.__dict__:
            delattr(cls, name)
        found[name] = given._replace(name=name, type=kind, kw_only=kw_only or given.kw_only)
    return found


def _make_init(fields: tuple[Field, ...], has_post_init: bool) -> Callable[..., None]:
    names = frozenset(f.name for f in fields)
    positional = tuple(f.name for f in fields if not f.kw_only)
    defaults = {f.name: f.default for f in fields if f.default is not MISSING}
    factories = [(f.name, f.default_factory) for f in fields if f.default_factory is not MISSING]
    most, number = len(positional), len(names)

    def __init__(self: Any, /, *args: Any, **keywords: Any) -> None:
        values = self.__dict__
        values.update(defaults)
        values.update(zip(positional, args))
        is_wrong = len(args) > most
        if keywords:
            is_twice = not keywords.keys().isdisjoint(positional[: len(args)])
            is_wrong = is_wrong or is_twice or not names.issuperset(keywords)
            values.update(keywords)
        for name, make in factories:
            if name not in values:
                values[name] = make()
        if is_wrong or len(values) != number:
            _wrong_arguments(self, len(args), keywords)
        if has_post_init:
            self.__post_init__()

    return __init__


def _compile_init(fields: tuple[Field, ...], has_post_init: bool) -> Callable[..., None]:
    """Of fields that are positional, without factories."""
    defaults = {f"default_{f.name}": f.default for f in fields if f.default is not MISSING}
    parameters = [f.name + (f" = default_{f.name}" * (f.default is not MISSING)) for f in fields]
    lines = [f"values[{f.name!r}] = {f.name}" for f in fields]
    lines += ["self.__post_init__()"] if has_post_init else []
    code = [f"def __init__(self, {', '.join(parameters)}):", "values = self.__dict__", *lines]
    exec("\n ".join(code), defaults)
    made: Callable[..., None] = defaults["__init__"]
    return made


def _wrong_arguments(value: Any, num_positional: int, keywords: Mapping[str, Any]) -> NoReturn:
    own = fields(value)
    positional = [f.name for f in own if not f.kw_only]
    given = [*positional[:num_positional], *keywords]
    required = {f.name for f in own if f.default is f.default_factory is MISSING}
    wrong = {
        "too many positional": [str(num_positional)] if num_positional > len(positional) else [],
        "given twice": sorted({name for name in given if given.count(name) > 1}),
        "unexpected": [name for name in keywords if name not in {f.name for f in own}],
        "missing": [f.name for f in own if f.name in required.difference(given)],
    }
    text = "; ".join(f"{what}: {', '.join(names)}" for what, names in wrong.items() if names)
    raise TypeError(f"arguments of {type(value).__name__}: {text}")


def _make_key(names: list[str]) -> Callable[[Any], Any]:
    """What values are compared and hashed by."""
    return attrgetter(*names) if names else lambda value: ()


def _comparison(key: Callable[[Any], Any], frozen: bool) -> dict[str, Any]:
    def __eq__(self: Any, other: Any) -> Any:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(key(self))

    return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}


def _repr(self: Any) -> str:
    values = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
    return f"{self.__class__.__qualname__}({', '.join(values)})"


def _refuse(self: Any, name: str, value: Any = None) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot change field {name!r}")


class _StandardFields:
    """`__dataclass_fields__`, by which the standard library knows a dataclass; made when read."""

    def __get__(self, instance: Any, owner: type) -> dict[str, Any]:
        import dataclasses

        def standard(f: Field) -> Any:
            options = f._asdict()
            for name in ("name", "type"):
                del options[name]
            for name in ("default", "default_factory"):
                if options[name] is MISSING:
                    del options[name]
            return dataclasses.field(**options)

        own = [(f.name, f.type, standard(f)) for f in fields(owner)]
        found = {f.name: f for f in dataclasses.fields(dataclasses.make_dataclass("_", own))}
        owner.__dataclass_fields__ = found  # type: ignore[attr-defined]
        return found


# ---------------------------------------------------------------- as of the standard library


def fields(kind: Any) -> tuple[Field, ...]:
    """Of a class or a value."""
    found: tuple[Field, ...] = kind._own_fields
    return found


def is_dataclass(kind: Any) -> bool:
    """Whether it is one of this module, or a value of one."""
    return hasattr(kind, "_own_fields")


def replace(value: T, /, **changes: Any) -> T:
    own = {f.name: getattr(value, f.name) for f in fields(value)}
    return type(value)(**own | changes)


def asdict(value: Any) -> dict[str, Any]:
    """Dataclasses in lists, tuples and dicts of fields become dicts too."""
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return asdict(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
