"""YAML as people write it."""

from pathlib import Path
from typing import Any

import yaml

from dseekjax.errors import UserError


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


# A date is what the user meant as text, as in run.dir=2026-01-05.
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path, option: str | None = None) -> dict[str, Any]:
    """The keys and values of a file; an empty file has none.

    Args:
        path: of the file.
        option: of the command line that named it, for messages; None if none did.

    Raises:
        UserError: it cannot be read, is not YAML or not a mapping.
    """
    named = f"{option}: " if option else ""
    try:
        values = yaml.load(path.read_text("utf-8"), StrictLoader)
    except OSError as error:
        raise UserError(f"{named}cannot read {path} ({error.strerror}); give the path of a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{named}{path} is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{named}{path} holds a {type(values).__name__}; it must be sections of keys and values")
    return values
