"""Steps of the site's build in addition to rendering: pages made from code, pages that lie outside docs, and links between them.

The keys of a configuration (`configuration_keys.md`) come from the schema and are kept in the repository, so that a code
host shows them; a test compares. The first page is the README. Notebooks become Markdown here, equations MathML.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
KEYS = DOCS / "configuration_keys.md"

#: Pages of the site that lie outside docs: path in the repository -> page.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "cluster/README.md": "cluster.md",
}

#: What links to these files mean on the site.
ALIASES = {"docs": "index.md", "cluster": "cluster.md"}

log = logging.getLogger("mkdocs.hooks.raysim")  # a warning ends a strict build

#: Stands for the address of the repository in links to files that are not pages.
SOURCE = "source:"

#: Code, or the target of a link with its fragment.
CODE_OR_LINK = re.compile(r"(?P<code>^(`{3,}).*?^\2|`[^`\n]+`)|(?<=\]\()(?P<target>[^)\s#]+)", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The address of the repository, where pyproject.toml has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    return config


def on_pre_build(config: MkDocsConfig) -> None:
    """Bring the page of keys up to date."""
    text = keys_page()
    if not KEYS.is_file() or KEYS.read_text() != text:
        KEYS.write_text(text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside docs, and those of the notebooks."""
    from mkdocs.structure.files import File

    for place, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / place)))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = notebook.src_uri.removesuffix(".ipynb") + ".md"
        text = "\n\n".join(notebook_parts(json.loads(notebook.content_string)))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as a code host needs them -> links as the site needs them."""
    here = page.file.src_uri
    places = {uri: place for place, uri in OUTSIDE.items()}
    folder = posixpath.dirname(places.get(here, f"docs/{here}"))

    def target(match: re.Match[str]) -> str:
        link = match["target"]
        if match["code"] or "://" in link or link.startswith(("mailto:", "data:", "<")):
            return match[0]
        place = posixpath.normpath(posixpath.join(folder, link))
        if not (ROOT / place).exists():
            return link  # mkdocs says that it leads nowhere
        uri = OUTSIDE.get(place) or ALIASES.get(place)
        if uri is None and place.startswith("docs/") and (ROOT / place).suffix not in ("", ".py"):
            uri = re.sub(r"\.ipynb$", ".md", place.removeprefix("docs/"))
        if uri is not None:
            return posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{SOURCE}{place}"

    linked = CODE_OR_LINK.sub(target, markdown)
    # Files of the repository that are not pages: a link where the repository has an address, their names where not.
    if config.repo_url:
        return linked.replace(f"]({SOURCE}", f"]({config.repo_url.rstrip('/')}/blob/main/")
    return re.sub(rf"\[([^\]]*)\]\({SOURCE}[^)]*\)", r"\1", linked)


# --- the keys of a configuration --------------------------------------------------------------------------------------


def keys_page() -> str:
    """Every key of a configuration as tables, a section for each group, from the schema."""
    from raysim.cli.json_schema import ConfigFile

    schema = ConfigFile.model_json_schema()
    groups = {"": schema, **dict(_groups(schema, schema["$defs"]))}
    lines = [
        "# Keys of a configuration",
        "",
        "Look up every key of a configuration with its values, default and meaning. [Configuration](configuration.md) explains",
        "how files, bases and the command line are combined. `raysim run FILE --print-config` prints all keys of a run;",
        "`raysim methods NAME` lists the options of a method.",
        "",
        "`make docs` writes this page from `raysim/config/schema.py`.",
    ]
    for path, group in groups.items():
        keys = {name: key for name, key in group["properties"].items() if f"{path}.{name}".strip(".") not in groups}
        lines += ["", f"## {path or 'The run'}", ""]
        if path:
            lines += [f"{_sentence(group['meaning'])}", ""]
        lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
        lines += [_row(name, key, schema["$defs"]) for name, key in keys.items()]
    return "\n".join(lines) + "\n"


def _groups(schema: Mapping[str, Any], kinds: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, schema) of every group below one, in their order, with its `meaning`."""
    for name, key in schema["properties"].items():
        for choice in key.get("anyOf", [key]):
            if reference := choice.get("$ref"):
                group = kinds[reference.rpartition("/")[2]]
                yield f"{path}{name}", {**group, "meaning": key["description"]}
                yield from _groups(group, kinds, f"{path}{name}.")


def _row(name: str, key: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    default = "" if "default" not in key else f"`{json.dumps(key['default'])}`"
    cells = (f"`{name}`", _values(key, kinds), default, _sentence(key.get("description", "")))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _sentence(meaning: str) -> str:
    """The same with its first word as a sentence begins, unless that word is a value, and with links to pages."""
    linked = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", meaning)
    return linked if re.match(r"\w+:", linked) else linked[:1].upper() + linked[1:]


#: Types of JSON as users know them.
TYPES = {"null": "null", "boolean": "true, false", "integer": "integer", "number": "number", "string": "text"}


def _values(key: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    """Which values a key takes, with their bounds."""
    if reference := key.get("$ref"):
        return _values(kinds[reference.rpartition("/")[2]], kinds)
    if choices := key.get("anyOf"):
        return " or ".join(dict.fromkeys(_values(choice, kinds) for choice in choices))
    if "enum" in key or "const" in key:
        return ", ".join(f"`{value}`" for value in key.get("enum", [key.get("const")]))
    kind = key.get("type")
    if kind == "array":
        return f"list of {_values(key['items'], kinds)}" if key.get("items") else "list"
    if kind == "object":
        return "keys and values"
    if kind == "string" and "pattern" in key and ":" in key["pattern"]:
        return "`module:function`"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {key[bound]:g}" for bound, sign in signs.items() if bound in key]
    return " ".join([TYPES.get(kind, "any value"), ", ".join(bounds)]).strip()


# --- notebooks and equations ------------------------------------------------------------------------------------------


def notebook_parts(notebook: Mapping[str, Any]) -> Iterator[str]:
    """The cells of a notebook as Markdown, with their outputs; consecutive lines of text are one block."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            yield source
            continue
        yield f"```python\n{source}\n```"
        lines: list[str] = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            shown = _shown(data)
            if shown is None:
                lines += "".join(output.get("text") or data.get("text/plain") or "").rstrip().splitlines()
                continue
            yield from _text_block(lines)
            lines = []
            yield shown
        yield from _text_block(lines)


def _shown(data: Mapping[str, Any]) -> str | None:
    """A picture or a table of an output; empty for a display that was cleared, None for text."""
    if image := data.get("image/png"):
        return f"![output](data:image/png;base64,{''.join(image.split())})"
    if "text/html" in data:  # a table gets the site's style, not a frame of pandas
        return "".join(data["text/html"]).replace('<table border="1" class="dataframe">', "<table>")
    return None


def _text_block(lines: list[str]) -> Iterator[str]:
    """Lines of text as a block whose long lines wrap (site.css)."""
    if text := "\n".join(lines).strip("\n"):
        yield f"``` {{.text .output}}\n{text}\n```"


#: An equation as the extension arithmatex leaves it.
EQUATION = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<text>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """LaTeX -> MathML, which browsers draw by themselves."""
    from latex2mathml.converter import convert

    def drawn(match: re.Match[str]) -> str:
        drawing = convert(unescape(match["text"]), display="block" if match["tag"] == "div" else "inline")
        if unknown := re.search(r">\\\\?\w+<", drawing):
            log.warning("%s: an equation has an unknown command: %s", page.file.src_uri, unknown[0])
        return drawing

    return EQUATION.sub(drawn, html)
