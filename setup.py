"""What pyproject.toml cannot say: the folders of the wheel, and the README as a package index shows it.

The top-level `configs` and `cluster` become folders of the package (pyproject.toml, package-dir), since other packages may
have folders of these names beside theirs.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

#: Code, or a picture or link to a file of the repository.
CODE_OR_LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]+`)|(?P<mark>!?)\[(?P<words>[^\]]*)\]\((?P<file>(?!\w+:)[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


def readme(text: str, repository: str | None) -> str:
    """The README for a place without the repository's files.

    Args:
      repository: its address. Links to files lead there; without an address their words stay, and pictures go.
    """

    def there(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        if repository is None:
            return "" if match["mark"] else match["words"]
        kind = "raw" if match["mark"] else "blob"
        return f"{match['mark']}[{match['words']}]({repository.rstrip('/')}/{kind}/main/{match['file']})"

    return CODE_OR_LINK.sub(there, text)


if __name__ == "__main__":
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    setup(
        packages=[*find_packages(include=["raysim*", "methods*"]), "raysim.configs", "raysim.cluster"],
        long_description=readme((HERE / "README.md").read_text(), project.get("urls", {}).get("Repository")),
        long_description_content_type="text/markdown",
    )
