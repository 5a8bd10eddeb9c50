"""Edits of a chat template, and templates made of what an attacker would try."""

from __future__ import annotations

import re
from random import Random

from fuzzing import extremes

EXPRESSIONS = [
    "messages", "messages[0]", "messages[0]['content']", "messages[0].content.__class__.__mro__", "''.__class__", "bos_token",
    "range(10**9)", "range(10**9)|list", "'x' * 10**10", "10**10**8", "9**9**9", "'%s' % messages", "'{0.__class__}'.format(1)",
    "lipsum()", "cycler('a').next.__globals__", "joiner.__init__.__globals__", "namespace(a=1)", "dict(a=1)", "self", "self.__init__",
    "messages|tojson", "messages|length", "messages|sort", "messages|map('upper')|list", "x|default('y')", "raise_exception('no')",
    "strftime_now('%Y')", "strftime_now('%' * 100000)", "messages.append(1)", "messages[99]", "none.x", "undefined_name", "1/0",
    "[1]*10**9", "'a'|center(10**9)", "'a'|indent(10**9)", "messages|batch(2)|list", "'x'|wordwrap(1)", "''|join", "({}).update",
    "'a'.encode('rot13')", "messages|slice(10**9)|list", "'\\ud800'", "loop", "caller()", "varargs", "messages|groupby('role')",
    "'x'.replace('', 'y' * 100000)", "'x' * 100000 | upper", "(1, 2)[5]", "true", "-messages", "messages == messages", "'%d' % 10**5000",
]  # fmt: skip
BLOCKS = [
    ("{% for m in messages %}", "{% endfor %}"), ("{% for i in range(100000) %}", "{% endfor %}"),
    ("{% if messages %}", "{% endif %}"), ("{% macro f(x) %}", "{% endmacro %}{{ f(1) }}"), ("{% macro f() %}{{ f() }}", "{% endmacro %}{{ f() }}"),
    ("{% set x %}", "{% endset %}{{ x }}"), ("{% filter upper %}", "{% endfilter %}"), ("{% generation %}", "{% endgeneration %}"),
    ("{% raw %}", "{% endraw %}"), ("{% call f() %}", "{% endcall %}"), ("{% for m in messages recursive %}", "{{ loop(messages) }}{% endfor %}"),
    ("{% include '/etc/passwd' %}", ""), ("{% import 'os' as os %}", ""), ("{% extends 'x' %}", ""), ("{% set ns = namespace(n=0) %}", "{% set ns.n = 1 %}"),
    ("{% for i in range(1000) %}{% for j in range(1000) %}", "{% endfor %}{% endfor %}"), ("{% block b %}", "{% endblock %}"), ("{% autoescape true %}", "{% endautoescape %}"),
    ("{% break %}", ""), ("{% continue %}", ""), ("{# ", " #}"), ("{%- set x = 'x' * 65536 -%}", "{{ x * 65536 }}"),
]  # fmt: skip

BASES = [
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}{%- endif %}{{ bos_token }}{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{%- endif %}{{ '[INST] ' + m.content | trim + ' [/INST]' if m.role == 'user' else m.content + eos_token }}{%- endfor %}",
    "{%- macro render(tools) %}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{% endmacro %}{{ render(tools or []) }}{%- set ns = namespace(last=-1) %}{%- for m in messages[::-1] %}{%- set ns.last = loop.index0 %}{%- endfor %}{{ ns.last }}{{ strftime_now('%d %b %Y') }}",
]


def piece(rng: Random, depth: int = 3) -> str:
    kind = rng.randrange(4)
    if kind == 0 or not depth:
        return "{{ " + rng.choice(EXPRESSIONS) + rng.choice(["", "|string", "|length", "[0]", ".x", " ~ 'y'"]) + " }}"
    if kind == 1:
        return rng.choice(extremes.TEXTS)
    begin, end = rng.choice(BLOCKS)
    return begin + piece(rng, depth - 1) + end


def edited(base: str, rng: Random) -> str:
    """Returns a template: the base with a change, or one of pieces alone."""
    if rng.random() < 0.4:
        return "".join(piece(rng) for _ in range(rng.randint(1, 4)))
    for _ in range(rng.choice([1, 1, 2])):  # whole pieces between the parts of the base
        parts = re.split(r"(?<=[%}]})(?={[{%])", base)
        parts.insert(rng.randint(0, len(parts)), piece(rng, rng.choice([0, 1, 2])))
        base = "".join(parts)
    for _ in range(rng.choice([0, 0, 1, 2])):
        at = rng.randint(0, len(base))
        to = min(len(base), at + rng.choice([0, 0, 1, 5, 40]))
        base = base[:at] + rng.choice(["", piece(rng), piece(rng, 0), base[at : at + 80], "%}", "{{", "{%"]) + base[to:]
    return base
