"""Formats of strings: right values are allowed, and wrong ones are not."""

import json

import pytest
from support.random_texts import allows, compiled
from support.random_texts import compiler as new_compiler

from tritonllm.engine.grammar.string_formats import FORMATS

VALUES = {
    "date": (
        "2024-02-29 2023-02-28 2000-02-29 1999-12-31",
        "2023-02-29 1900-02-29 2024-06-31 2024-13-01 0000-01-01 24-1-1",
    ),
    "time": ("00:00:00Z 23:59:59+14:00 12:30:01.25-00:30", "24:00:00Z 12:60:00Z 12:30:60Z 12:30:01 12:30Z"),
    "date-time": ("2024-02-29T12:00:00Z", "2024-06-31T12:00:00Z 2024-06-30 2024-06-30T25:00:00Z"),
    "duration": ("P3W P1Y2M3DT4H5M6S PT5M P2D", "P P1YT P1W2D PT 1D"),
    "email": ("a.b+c@example.org a@b", "a@ @b a@b@c a@-b .a@b"),
    "hostname": ("example.org a-b.c localhost", "-a a- a..b .a a_b"),
    "ipv4": ("0.0.0.44 255.255.255.255 1.20.199.249", "0.0.0.044 256.1.1.1 1.2.3 1.2.3.4.5 01.2.3.4"),
    "ipv6": (
        ":: ::1 1:2:3:4:5:6:7:8 1::8 ::1.2.3.4 1:2:3:4:5:6:1.2.3.4 1:2:3:4:5:6:7::",
        "1 1:2:3:4:5:6:7 1::2::3 1:2:3:4:5:6:7:8:9 ::g",
    ),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000 x"),
    "uri": ("https://a.b/c?d=e#f mailto:a@b urn:x:y http://a", "//a/b a/b http://a%zz :a http://a|b"),
    "uri-reference": ("../a?b ./a:b //a/b http://a #f", "a%zz a|b 1:a"),
    "uri-template": ("http://a/{id}{?q*,r:3} {+x}", "{ } {} {a,}"),
    "json-pointer": ("/a/0 /a~1b~0 /", "a /~2 /~"),
    "relative-json-pointer": ("0 1/a 2#", "01 /a #"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_values(name):
    grammar = compiled(new_compiler(), json={"type": "string", "format": name})
    right, wrong = VALUES[name]
    assert [one for one in right.split() if not allows(grammar, json.dumps(one))] == []
    assert [one for one in wrong.split() if allows(grammar, json.dumps(one))] == []
