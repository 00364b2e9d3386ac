"""Hook of mkdocs: README as the first page, and the references generated from the commands and the schemas.

Nothing that is generated here is committed.
"""

from __future__ import annotations

import html
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README, the references, and the files outside docs/ that pages link to."""
    generated = {
        "index.md": home((ROOT / "README.md").read_text(encoding="utf-8")),
        "reference/cli.md": cli_reference(),
        "reference/config.md": config_reference(),
        "reference/cluster.md": cluster_reference(),
    }
    for name, content in generated.items():
        files.append(File.generated(config, name, content=content))
    for source in sorted(linked_sources()):
        files.append(File.generated(config, f"source/{source}.txt", content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to the copies of these files on the site."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        target = found[2]
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = (here / target).resolve()
        if path.is_file() and ROOT in path.parents and ROOT / "docs" not in path.parents:
            relative = path.relative_to(ROOT)
            up = "../" * page.file.src_uri.count("/")
            return f"{found[1]}{up}{'index.md' if str(relative) == 'README.md' else f'source/{relative}.txt'}{found[3]}"
        return found[0]

    return LINK.sub(replaced, markdown)


def home(readme: str) -> str:
    """Return README with its links as seen from docs/."""
    text = LINK.sub(lambda found: f"{found[1]}{found[2].removeprefix('docs/')}{found[3]}" if _in_docs(found[2]) else found[0], readme)
    text = text.replace('src="docs/', 'src="')
    return LINK.sub(lambda found: f"{found[1]}source/{found[2]}.txt{found[3]}" if _is_source(found[2]) else found[0], text)


def _in_docs(target: str) -> bool:
    return target.startswith("docs/")


def _is_source(target: str) -> bool:
    return not target.startswith("docs/") and (ROOT / target).is_file()


def linked_sources() -> set[str]:
    """Return the files outside docs/ that README and the pages link to."""
    found = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for link in LINK.finditer(page.read_text(encoding="utf-8")):
            path = (page.parent / link[2]).resolve()
            if path.is_file() and ROOT in path.parents and ROOT / "docs" not in path.parents and path.name != "README.md":
                found.add(str(path.relative_to(ROOT)))
    return found


# Commands.


def cli_reference() -> str:
    """Return a section for every command: usage, description, options."""
    from ridgeline.cli.main import ridge

    lines = ["# Commands", "", "Generated from the commands themselves; `ridge COMMAND --help` prints the same.", ""]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| [`{path}`](#{path.replace(' ', '-')}) | {_cell(command.get_short_help_str(200))} |" for path, command in walk(ridge)]
    for path, command in walk(ridge):
        context = click.Context(command, info_name=path)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += ["", f"## {path}", "", f"```text\n{path} {usage}\n```", "", _prose(command.help or command.get_short_help_str(200)), ""]
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option) and not parameter.hidden]
        if options:
            lines += ["| option | meaning |", "|---|---|"]
            lines += [_option_row(option, context) for option in options]
    return "\n".join(lines) + "\n"


def walk(group: click.Group, prefix: str = "ridge") -> Iterator[tuple[str, click.Command]]:
    """Yield every command below a group with its full name."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from walk(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _option_row(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    names, meaning = record if record is not None else (", ".join(option.opts), option.help or "")
    return f"| <code>{html.escape(' '.join(names.split())).replace('|', '&#124;')}</code> | {_cell(_escape(meaning))} |"


def _prose(text: str) -> str:
    return _escape(inspect.cleandoc(text).replace("\b\n", ""))


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("$", "&#36;")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# Settings.


def config_reference() -> str:
    """Return every key of a config: type, default, meaning and the line of the schema."""
    from ridgeline.configs.schema import Config

    return _reference(
        "Config keys", "`ridge train CONFIG section.key=value`; `ridge config show CONFIG` prints all values of a config.", Config
    )


def cluster_reference() -> str:
    """Return every key of a cluster file."""
    from ridgeline.configs.cluster import ClusterConfig

    return _reference("Cluster keys", "A cluster file describes the machines; `ridge ... --cluster NAME|FILE` uses it.", ClusterConfig)


def _reference(title: str, use: str, root: Any) -> str:
    lines = [f"# {title}", "", f"Generated from the schema. {use}", ""]
    for key, section in sections(root):
        source, numbers = source_lines(section)
        doc = _escape(inspect.cleandoc(section.__doc__ or ""))
        lines += ["", f"## {key or 'top level'}", "", doc, "", "| key | type | default | meaning | source |", "|---|---|---|---|---|"]
        for name, info in section.model_fields.items():
            default = "required" if info.is_required() else default_text(info.get_default(call_default_factory=True))
            where = f"`{source}:{numbers.get(name, 0)}`"
            lines.append(f"| `{name}` | {_cell(type_text(info))} | {_cell(default)} | {_cell(_escape(info.description or ''))} | {where} |")
    return "\n".join(lines) + "\n"


def sections(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield a section and those inside it, with their keys; list elements read `[]`."""
    from ridgeline.configs.fields import Slot

    def inside(key: str, slot: Slot) -> Iterator[tuple[str, Any]]:
        if slot.section is not None:
            yield key, slot.section
            for name in slot.section.model_fields:
                following = slot.step(name)
                assert following is not None
                yield from inside(f"{key}.{name}" if key else name, following)
        elif slot.is_list and (element := slot.step(0)) is not None:
            yield from inside(f"{key}[]", element)

    yield from inside("", Slot(root))


def source_lines(section: Any) -> tuple[str, dict[str, int]]:
    """Return the file of a section and the line of each of its keys."""
    path = Path(inspect.getsourcefile(section) or "").resolve()
    lines, first = inspect.getsourcelines(section)
    numbers = {found[1]: first + offset for offset, line in enumerate(lines) if (found := re.match(r"    (\w+): ", line))}
    return str(path.relative_to(ROOT)), numbers


def type_text(info: Any) -> str:
    """Return a field's type as a user would write its values: names, ranges."""
    from ridgeline.configs.schema import Section

    text = _annotation(info.annotation, Section)
    limits = [
        f"{sign} {value}" for sign, attribute in (("≥", "ge"), (">", "gt"), ("<", "lt"), ("≤", "le")) for value in _limits(info, attribute)
    ]
    return text + (f" ({', '.join(limits)})" if limits else "")


def _limits(info: Any, attribute: str) -> list[Any]:
    found = [getattr(item, attribute) for item in info.metadata if getattr(item, attribute, None) is not None]
    return [value for value in found if abs(value) < 1e9]


def _annotation(annotation: Any, section: type) -> str:
    import types
    from typing import Annotated, Literal, Union, get_args

    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotation(arguments[0], section)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if item is type(None) else _annotation(item, section) for item in arguments)
    if origin is list:
        return f"list of {_annotation(arguments[0], section)}"
    if origin is dict:
        return f"mapping of names to {_annotation(arguments[1], section)}"
    if isinstance(annotation, type) and issubclass(annotation, section):
        return "section"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Path": "path"}
    return names.get(annotation.__name__, annotation.__name__)


def default_text(value: Any) -> str:
    """Return a default as YAML; that of a section is the section's own."""
    from ridgeline.configs.dump import value_text
    from ridgeline.configs.schema import Section

    if isinstance(value, Section):
        return "see below"
    return f"`{value_text(value)}`"
