#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Generates src/cbd/api.py from docs/openapi.yaml: a class for each schema, a method for each operation.

    python3 python/generate.py            # writes it (needs PyYAML: Debian's python3-yaml)
    python3 python/generate.py --check    # exits with 1 if the file is another one
"""

from __future__ import annotations

import keyword
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import yaml

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "docs" / "openapi.yaml"
TARGET = HERE / "src" / "cbd" / "api.py"

HEAD = '''\
# SPDX-License-Identifier: MIT OR Apache-2.0
# Generated from docs/openapi.yaml by python/generate.py; do not edit.
"""The types and the operations of the daemon's control interface."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Dict, List, Literal, Mapping, Optional, Sequence, Union

from . import _codec
from ._codec import Decoder, Object
from ._connection import Connection, part
from ._operation import Lines, Operation

'''

SCALARS = {
    "string": ("str", "_codec.text", '""'),
    "integer": ("int", "_codec.integer", "0"),
    "number": ("float", "_codec.number", "0.0"),
    "boolean": ("bool", "_codec.boolean", "False"),
}


class Page:
    """The page, by its schemas."""

    def __init__(self, page: Dict[str, Any]) -> None:
        self.page = page
        self.schemas: Dict[str, Any] = page["components"]["schemas"]

    def is_object(self, name: str) -> bool:
        schema = self.schemas[name]
        return "allOf" in schema or schema.get("type") == "object"

    def type_of(self, schema: Dict[str, Any], in_request: bool) -> Tuple[str, str, str]:
        """The type in Python, its decoder, and its value where it is absent."""
        if "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[1]
            target = self.schemas[name]
            if self.is_object(name):
                return name, f"_codec.object_of(lambda: {name})", ""
            if "oneOf" in target:
                return name, "_codec.either", "0"
            # A newer daemon may have more values than this page: only requests are limited to those that are known.
            if "enum" in target and in_request:
                return name, "_codec.text", '""'
            return SCALARS[target["type"]]
        kind = schema["type"]
        if kind == "array":
            item, decoder, _ = self.type_of(schema["items"], in_request)
            container = "Sequence" if in_request else "List"
            return f"{container}[{item}]", f"_codec.list_of({decoder})", "list"
        if kind == "object" and schema["additionalProperties"] is True:
            return "Dict[str, Any]", "_codec.map_of(_codec.anything)", "dict"
        if kind == "object":
            item, decoder, _ = self.type_of(schema["additionalProperties"], in_request)
            return f"Dict[str, {item}]", f"_codec.map_of({decoder})", "dict"
        if "enum" in schema and in_request:
            return literal(schema["enum"]), "_codec.text", '""'
        return SCALARS[kind]


def literal(values: List[str]) -> str:
    return "Literal[" + ", ".join(f'"{value}"' for value in values) + "]"


def python_name(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) else name


def sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith(".") else text + "."


def comment(text: str, indent: str) -> str:
    return "".join(f"{indent}#: {line}\n" for line in textwrap.wrap(sentence(text), 114 - len(indent)))


def doc(text: str, indent: str) -> str:
    lines = textwrap.wrap(sentence(text), 112 - len(indent))
    if len(lines) == 1:
        return f'{indent}"""{lines[0]}"""\n'
    return f'{indent}"""' + f"\n{indent}".join(lines) + f'\n{indent}"""\n'


def wrapped(head: str, items: List[str], tail: str, indent: str) -> str:
    line = f"{indent}{head}{', '.join(items)}{tail}\n"
    if len(line) <= 121:
        return line
    inner = "".join(f"{indent}    {item},\n" for item in items)
    return f"{indent}{head}\n{inner}{indent}{tail}\n"


def class_of(page: Page, name: str, requests: set[str]) -> str:
    schema = page.schemas[name]
    parts = schema.get("allOf", [schema])
    bases = [item["$ref"].rsplit("/", 1)[1] for item in parts if "$ref" in item]
    own = next(item for item in parts if "properties" in item)
    required = own.get("required", [])
    text = f"@dataclasses.dataclass\nclass {name}({', '.join(bases) or 'Object'}):\n"
    about = schema.get("description") or " ".join(re.findall("[A-Z][a-z]*", name)).capitalize()
    text += doc(about, "    ") + "\n"
    decoders = []
    for field, value in own["properties"].items():
        kind, decoder, absent = page.type_of(value, name in requests)
        if "description" in value:
            text += comment(value["description"], "    ")
        if absent == "list" or absent == "dict":
            # An absent list is an empty one.
            kind = kind.replace("Sequence[", "List[")
            default = f"dataclasses.field(default_factory={absent})"
        elif field in required and absent:
            default = absent
            if kind.startswith("Literal") or (kind in page.schemas and "enum" in page.schemas[kind]):
                kind = "str"
        else:
            kind, default = f"Optional[{kind}]", "None"
        text += f"    {python_name(field)}: {kind} = {default}\n"
        decoders.append(f'"{field}": {decoder}')
    inherited = [f"**{base}._decoders" for base in bases]
    text += "\n" + wrapped("_decoders: ClassVar[Mapping[str, Decoder]] = {", inherited + decoders, "}", "    ")
    return text + "\n\n"


def alias_of(page: Page, name: str) -> str:
    schema = page.schemas[name]
    text = comment(schema["description"], "") if "description" in schema else ""
    if "enum" in schema:
        return f"{text}{name} = {literal(schema['enum'])}\n"
    if "oneOf" in schema:
        return f"{text}{name} = Union[int, str]\n"
    return f"{text}{name} = {SCALARS[schema['type']][0]}\n"


def resolved(page: Page, parameter: Dict[str, Any]) -> Dict[str, Any]:
    if "$ref" in parameter:
        found: Dict[str, Any] = page.page["components"]["parameters"][parameter["$ref"].rsplit("/", 1)[1]]
        return found
    return parameter


def answer_of(page: Page, operation: Dict[str, Any]) -> Tuple[str, str, Optional[str]]:
    """The kind of an answer (json, lines, text, none), its type, and its decoder."""
    content = operation["responses"]["200"].get("content", {})
    if "application/x-ndjson" in content:
        name = content["application/x-ndjson"]["schema"]["$ref"].rsplit("/", 1)[1]
        if name != "ProgressLine":
            return "items", f"Lines[{name}]", name
        return "lines", "Operation[Progress, Done]", None
    if "text/plain" in content:
        return "text", "str", None
    if not content:
        return "none", "None", None
    kind, decoder, _ = page.type_of(content["application/json"]["schema"], False)
    return "json", kind, decoder


def method_of(page: Page, path: str, method: str, operation: Dict[str, Any]) -> str:
    if "operationId" not in operation:
        raise SystemExit(f"{method} {path} has no operationId in {SOURCE.name}")
    parameters = [resolved(page, each) for each in operation.get("parameters", [])]
    positional, named, query, body = [], [], [], []
    for each in parameters:
        name, kind = each["name"], page.type_of(each["schema"], True)[0]
        if each["in"] == "query":
            default = "False" if kind == "bool" else "None"
            named.append(f"{name}: {kind if kind == 'bool' else f'Optional[{kind}]'} = {default}")
            query.append(f'"{name}": {name}')
        elif name == "transport" and not path.endswith("{transport}"):
            named.append("transport: int = 0")
        else:
            positional.append(f"{name}: {kind}")
    about = []
    has_body = "requestBody" in operation
    if has_body:
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        schema = page.schemas[name]
        required = schema.get("required", [])
        for field, value in schema["properties"].items():
            kind = page.type_of(value, True)[0]
            shown = python_name(field)
            body.append(f'"{field}": {shown}')
            if field in required:
                positional.append(f"{shown}: {kind}")
            else:
                named.append(f"{shown}: Optional[{kind}] = None")
            if "description" in value:
                about.append((shown, value["description"]))
    answer, kind, decoder = answer_of(page, operation)
    arguments = ["self", *positional, *(["*"] if named else []), *named]
    text = wrapped(f"def {operation['operationId']}(", arguments, f") -> {kind}:", "    ")
    text += method_doc(operation["summary"], about)
    place = re.sub(r"\{(\w+)\}", r"{part(\1)}", path)
    place = f'f"{place}"' if "{" in place else f'"{place}"'
    fields = f"_codec.body_of({{{', '.join(body)}}})" if body else ("{}" if has_body else "None")
    call = f'"{method}", {place}, {{{", ".join(query)}}}'
    if body:
        text += wrapped("body = _codec.body_of({", body, "})", "        ")
        fields = "body"
    if answer == "lines":
        text += f"        stream = self.open_call({call}, {fields})\n"
        text += "        return Operation(stream, Progress.from_json, Done.from_json)\n"
    elif answer == "items":
        text += wrapped("query = {", query, "}", "        ")
        text += f'        stream = self.open_call("{method}", {place}, query, {fields})\n'
        text += f"        return {kind.split('[')[0]}(stream, {decoder}.from_json{', follow' if 'follow: bool = False' in named else ''})\n"
    elif answer == "text":
        text += f"        return self.call_text({call}, {fields}).decode()\n"
    elif answer == "none":
        text += f"        self.call({call}, {fields})\n"
    else:
        text += f"        answer = self.call({call}, {fields})\n"
        if kind.startswith("List["):
            item = kind[5:-1]
            text += f"        decoded: {kind} = {decoder}(answer)\n        return decoded\n"
            assert item
        else:
            text += f"        return {kind}.from_json(answer)\n"
    return text + "\n"


def method_doc(summary: str, about: List[Tuple[str, str]]) -> str:
    if not about:
        return doc(summary, "        ")
    lines = textwrap.wrap(sentence(summary), 104)
    text = '        """' + "\n        ".join(lines) + "\n\n"
    for name, description in about:
        items = textwrap.wrap(f":param {name}: {sentence(description)}", 106, subsequent_indent="    ")
        text += "".join(f"        {line}\n" for line in items)
    return text + '        """\n'


def generated() -> str:
    page = Page(yaml.safe_load(SOURCE.read_text()))
    requests = set()
    for methods in page.page["paths"].values():
        for operation in methods.values():
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                requests.add(schema["$ref"].rsplit("/", 1)[1])
    requests |= {"NewPin", "PinName"}
    text = HEAD
    for name in page.schemas:
        if not page.is_object(name):
            text += alias_of(page, name)
    text += "\n\n"
    # A base is defined before the classes that extend it.
    rest = [name for name in page.schemas if page.is_object(name)]
    done: set[str] = set()
    while rest:
        for name in rest:
            parts = page.schemas[name].get("allOf", [])
            bases = {item["$ref"].rsplit("/", 1)[1] for item in parts if "$ref" in item}
            if bases <= done:
                text += class_of(page, name, requests)
                done.add(name)
                rest.remove(name)
                break
        else:
            raise SystemExit(f"schemas that extend each other: {rest}")
    text += "class Client(Connection):\n"
    text += doc("A client of one daemon: a method for each operation. It may be used by several threads", "    ") + "\n"
    for path, methods in page.page["paths"].items():
        for method, operation in methods.items():
            text += method_of(page, path, method, operation)
    return text.rstrip("\n") + "\n"


def main() -> int:
    text = generated()
    if sys.argv[1:] == ["--check"]:
        if TARGET.exists() and TARGET.read_text() == text:
            return 0
        print(f"{TARGET} is not what {SOURCE} describes: run python3 python/generate.py", file=sys.stderr)
        return 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
