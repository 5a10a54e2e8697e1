"""Options out of a file: ``--config FILE`` of ``tritonllm serve``, in YAML, with vLLM's form.

Keys are options without their dashes, values what stands behind these: a list for several, a mapping for JSON, ``true``
for a flag. ``model`` names the model. What the command line says counts more than the file.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OPTION = "--config"
REPEATED = {"api-key"}  # options that stand once for each value


def expanded(words: Sequence[str]) -> list[str]:
    """A command line with the options of its file in the place of ``--config``, before all others.

    Raises:
        ValueError: the file is no YAML, or no mapping of options.
        OSError: it cannot be read.
    """
    command, rest, files = words[0], [], []
    remaining = iter(words[1:])
    for word in remaining:
        name, equals, value = word.partition("=")
        if name != OPTION:
            rest.append(word)
        elif equals:
            files.append(value)
        else:
            files.append(next(remaining, ""))
    if len(files) > 1 or "" in files:
        raise ValueError(f"{OPTION} takes one file, got {', '.join(map(repr, files))}")
    return [command, *(word for file in files for word in options_of(Path(file))), *rest]


def options_of(path: Path) -> Iterator[str]:
    """The words of a command line that a file stands for.

    Raises:
        ValueError, OSError: as :func:`expanded`.
    """
    import yaml

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{OPTION} {path}: it cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise ValueError(f"{OPTION} {path}: it must be a mapping of options, as `port: 8080`")
    for key, value in options.items():
        name = key.lstrip("-").replace("_", "-")
        if f"--{name}" == OPTION:
            raise ValueError(f"{OPTION} {path}: a file cannot name another one")
        if value is None or (isinstance(value, list) and not value):
            raise ValueError(f"{OPTION} {path}: {key} has no value: leave it out")
        yield from _words(name, value)


def _words(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield from [f"--{name}"] if value else []
    elif isinstance(value, dict):
        yield f"--{name}={json.dumps(value)}"
    elif isinstance(value, list):
        texts = [one if isinstance(one, str) else json.dumps(one) for one in value]
        yield from (f"--{name}={text}" for text in texts) if name in REPEATED else [f"--{name}", *texts]
    else:
        yield f"--{name}={value}"
