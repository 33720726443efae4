"""Go's text/template as far as chat templates use it; tests/engine asks a real Ollama for the same."""

from __future__ import annotations

import pytest

from specproxy.adapters.go_syntax import GoTemplateError
from specproxy.adapters.go_template import GoTemplate

HI = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


def made(source: str, messages: list[dict[str, str]] = TALK) -> str:
    return GoTemplate(source).render(messages)


MADE: list[tuple[str, str | None]] = [
        ("{{ range .Messages }}<{{ .Role }}>{{ .Content }}\n{{ end }}<assistant>",
         "<system>S\n<user>a\n<assistant>b\n<user>c\n<assistant>"),
        ("{{- range .Messages }} {{- .Content -}} | {{- end }}", "S|a|b|c|"),
        ("{{ .System }}:{{ range $i, $m := .Messages }}{{ $i }}{{ $m.Content }}{{ end }}", "S:0S1a2b3c"),
        ("{{ range $i, $_ := .Messages }}{{ if eq (len (slice $.Messages $i)) 1 }}last {{ .Content }}{{ end }}"
         "{{ end }}", "last c"),
        ("{{ $last := \"\" }}{{ range .Messages }}{{ $last = .Content }}{{ end }}{{ $last }}", "c"),
        ("{{ range .Messages }}{{ if eq .Role \"user\" }}U{{ else if eq .Role \"system\" }}S{{ else }}A"
         "{{ end }}{{ end }}", "SUAU"),
        ("{{ range .Messages }}{{ if ne .Role `user` }}{{ continue }}{{ end }}{{ .Content }}{{ break }}"
         "{{ end }}", "a"),
        ("{{ with .System }}[{{ . }}]{{ end }}{{ with .Nothing }}x{{ else }}none{{ end }}{{ range .Messages }}"
         "{{ end }}", "[S]none"),
        ("{{ range .Messages }}{{ if or (eq .Role \"system\") (and .Content (gt 1 2)) }}y{{ end }}"
         "{{ end }}", "y"),
        ("{{ range .Messages }}{{ .Content | printf \"%s-%d;\" 1 }}{{ end }}", None),
        ("{{ range .Messages }}{{ .Role | printf \"%s%%;\" }}{{ end }}", "system%;user%;assistant%;user%;"),
        ("{{ (index .Messages 1).Content }}{{ .Messages | len }}{{/* a comment, {{ too */}}", "a4"),
        ("{{ (index .Messages 1).Content }}", None),
        ("{{ range .Messages }}{{ .Content }}{{ else }}empty{{ end }}{{ len .Messages }}{{ not .System }}",
         "Sabc4false"),
        ("{{ .Missing }}{{ range .Messages }}{{ end }}", "<no value>"),
]  # fmt: skip
"""Templates, and what they make of `TALK` in Ollama too; None: it fails there, or writes its own misgivings."""


@pytest.mark.parametrize(("source", "text"), MADE)
def test_what_templates_do(source: str, text: str | None) -> None:
    """Text, trimming, variables, branches, loops, pipelines and functions; None stands for a refusal."""
    if text is None:
        with pytest.raises(GoTemplateError):
            made(source)
    else:
        assert made(source) == text


def test_templates_of_one_turn_are_written_once_for_each() -> None:
    """The last time up to where the answer begins; without such a place it is behind all."""
    source = (
        "{{ if .System }}[{{ .System }}]{{ end }}{{ if .Prompt }}U:{{ .Prompt }} {{ end }}A:{{ .Response }};\n"
    )
    assert made(source) == "[S]U:a A:b;\nU:c A:"
    assert made("{{ .System }}{{ .Prompt }}") == "Sabc"
    assert made("{{ .Prompt }}", [*HI, {"role": "assistant", "content": "so"}]) == "hiso"


def test_messages_of_one_role_in_a_row_are_one() -> None:
    """Apart from results of tools; system messages are gathered wherever they stand."""
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert made("{{ range .Messages }}<{{ .Content }}>{{ end }}", twice) == "<a\n\nb>"
    tools = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    assert made("{{ range .Messages }}<{{ .Content }}>{{ end }}", tools) == "<a><b>"
    late = [*HI, {"role": "system", "content": "x"}, *HI, {"role": "system", "content": "y"}]
    assert made("{{ .System }}{{ range .Messages }}{{ end }}", late) == "x\n\ny"


@pytest.mark.parametrize(
    "source",
    [
        "{{ .System", "{{ if .System }}x", "{{ end }}", "{{ else }}", "{{ if }}x{{ end }}", "{{ }}",
        "{{ define \"x\" }}{{ end }}", "{{ template \"x\" }}", "{{ .System | }}", "{{ (.System }}",
        "{{ if .System }}a{{ else }}b{{ else }}c{{ end }}",
        "{{ range .Messages }}{{ else if .System }}{{ end }}",
        "{{ json .Tools }}", "{{ currentDate }}", "{{ .System ; }}", "{{ \"\\q\" }}",
    ],
)  # fmt: skip
def test_what_is_wrong_or_unknown_is_refused_at_once(source: str) -> None:
    """Functions that are not known too, wherever they stand: they would fail in mid-conversation."""
    with pytest.raises(GoTemplateError):
        GoTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ range .Messages }}{{ .Name }}{{ end }}", "{{ .Messages }}",
        "{{ $x }}{{ range .Messages }}{{ end }}",
        "{{ $x = 1 }}{{ range .Messages }}{{ end }}", "{{ eq .System 1 }}{{ range .Messages }}{{ end }}",
        "{{ lt .System 1 }}{{ range .Messages }}{{ end }}", "{{ index .Messages 9 }}",
        "{{ slice .Messages 9 }}",
        "{{ slice .System 0 }}{{ range .Messages }}{{ end }}", "{{ range .System }}{{ end }}{{ .Messages }}",
        "{{ .System.Name }}{{ range .Messages }}{{ end }}", "{{ len 1 }}{{ range .Messages }}{{ end }}",
        "{{ .System .Prompt }}{{ range .Messages }}{{ end }}", "{{ not }}{{ range .Messages }}{{ end }}",
        "{{ if .System }}{{ .Response }}{{ else }}x{{ end }}",
        "{{ printf \"%x\" 1 }}{{ range .Messages }}{{ end }}",
        "{{ printf \"%d\" \"a\" }}{{ range .Messages }}{{ end }}",
        "{{ printf \"a\" 1 }}{{ range .Messages }}{{ end }}",
    ],
)  # fmt: skip
def test_what_would_be_guessed_is_refused(source: str) -> None:
    """A prompt is right or there is none."""
    with pytest.raises(GoTemplateError):
        made(source)


def test_names_tell_what_a_template_looks_at() -> None:
    template = GoTemplate("{{ range $i, $m := .Messages }}{{ if $m.ToolCalls }}{{ $.Tools }}{{ end }}{{ end }}")
    assert {"messages", "toolcalls", "tools"} <= template.names


@pytest.mark.parametrize(
    "source",
    ["{{ break }}", "{{ with .System }}{{ continue }}{{ end }}", "{{ range .Messages }}{{ end }}{{ break }}",
     "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ if 1 }}" * 3000 + "{{ end }}" * 3000,
     '{{ len "\\ud800" }}', "{{ " + "9" * 5000 + " }}"],
    ids=["break", "continue in with", "break behind", "brackets", "branches", "half a character", "digits"],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(source: str) -> None:
    """A jump out of nothing, what is nested too deeply, and literals that are none."""
    with pytest.raises(GoTemplateError):
        made(source)
