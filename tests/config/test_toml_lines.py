"""On which line a key stands, in every form that TOML has for it."""

from __future__ import annotations

import tomllib
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import ConfigError
from dynamoth.settings.load import ConfigText, load_config
from dynamoth.settings.toml_lines import lines_of

DOCUMENT = '''# [agent] in a comment
title = "[balancer]"

[cluster]
note = """
[[cluster.servers]]
id = 'not this one'
"""
literal = \'\'\'
[agent]
http_port = 1
\'\'\'
inline = { a = 1, "b.c" = [1, 2] }
many = [
  "x", # ]
  { id = "y", deep = { er = [
    1] }, url = """
}""" },
  [1,
   2],
]

[[cluster.servers]]
id = "s1"
url = "redis://a"
[[cluster.servers]]   # the second
id = "s2"
  "url" = 'redis://b'
[cluster.servers.more]
deep = 1
[a."b.c".d]
e.f.g = 2
when = 1979-05-27T07:32:00Z
'''


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    """Return all paths of a document."""
    inside = (paths_of(item, (*path, name)) for name, item in items_of(value))
    return {path}.union(*inside) - {()}


def items_of(value: Any) -> list[tuple[str | int, Any]]:
    """Return the parts of a table or an array, with what they are called."""
    if isinstance(value, dict):
        return [*cast(dict[str | int, Any], value).items()]
    return [*enumerate(value)] if isinstance(value, list) else []  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]  # mypy knows it


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("title",), 2),
        (("cluster",), 4),
        (("cluster", "note"), 5),
        (("cluster", "literal"), 9),
        (("cluster", "inline", "b.c"), 13),
        (("cluster", "many"), 14),
        (("cluster", "many", 0), 15),
        (("cluster", "many", 1, "url"), 16),
        (("cluster", "many", 1, "deep", "er", 0), 16),
        (("cluster", "many", 2, 1), 19),
        (("cluster", "servers"), 23),
        (("cluster", "servers", 0, "url"), 25),
        (("cluster", "servers", 1), 26),
        (("cluster", "servers", 1, "id"), 27),
        (("cluster", "servers", 1, "url"), 28),
        (("cluster", "servers", 1, "more", "deep"), 30),
        (("a", "b.c", "d", "e", "f", "g"), 32),
        (("a", "b.c", "d", "when"), 33),
    ],
)
def test_every_form_of_a_key_has_its_line(path: tuple[str | int, ...], line: int) -> None:
    assert lines_of(DOCUMENT)[path] == line


def test_no_key_is_left_out() -> None:
    without_a_line_of_their_own = {("a",), ("a", "b.c")}
    assert paths_of(tomllib.loads(DOCUMENT)) - without_a_line_of_their_own == set(lines_of(DOCUMENT))


names = st.text("ab_-1", min_size=1, max_size=3)
texts = st.text("a\"'\\[]{}=#,\n ", max_size=8)


def written(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + "".join(f"{written(item)}, # ]\n" for _, item in items_of(value)) + "]"
    if isinstance(value, dict):
        parts = [f'"{name}" = {written(item)}' for name, item in cast(dict[str, Any], value).items()]
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"""{escaped}"""' if "\n" in value else f'"{escaped}"'
    return str(value)  # a number


values = st.recursive(
    st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(names, st.dictionaries(names, values, max_size=3), max_size=3))
def test_each_key_stands_on_its_line_whatever_the_values_are(document: dict[str, dict[str, Any]]) -> None:
    text, expected = "", dict[tuple[str, ...], int]()
    for section, table in document.items():
        expected[(section,)] = text.count("\n") + 1
        text += f"[{section}]\n"
        for name, value in table.items():
            expected[section, name] = text.count("\n") + 1
            text += f"{name} = {written(value)}\n"
    assert set(tomllib.loads(text)) == set(document)
    found = lines_of(text)
    assert {path: found[path] for path in expected} == expected


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[[cluster.servers]]\nid = "s1"\nurl = "redis://a"\n\n[[cluster.servers]]\nid = "s2"\nurl = 5\n', "line 7"),
        ('[[cluster.servers]]\nid = "s1"\nurl = "redis://a"\n\n[[cluster.servers]]\nid = "s2"\n', "line 5"),
        ('[cluster]\nservers = [\n {id = "s1", url = "redis://a"},\n {id = "s2", url = 3},\n]\n', "line 4"),
        ('[link]\nusername = """\n[agent]\nhttp_port = 1\n"""\n[agent]\nhttp_port = -1\n', "line 7"),
        ('["agent"]\nhttp_port = -1\n', "line 2"),
        ("[log]\n[agent]\n'http_port' = -1\n", "line 3"),
        ('[[cluster.servers]]\nid = "s1"\nurl = "redis://a"\n[[cluster.servers]]\nurll = 1\n', "line 5"),
    ],
)
def test_errors_name_the_right_line(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file=ConfigText("x.toml", text))
    assert f"x.toml {place}" in str(caught.value), caught.value
    assert str(caught.value).count(" line ") == 1
