"""The chat template that an operator gives in the place of the tokenizer's."""

import re
from pathlib import Path


def read_template(name: str) -> str:
    """The text of a chat template.

    Raises:
        ValueError: it is no template.
        OSError: the file cannot be read.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import SandboxedEnvironment

    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise OSError(f"--chat-template: cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat-template: {name} is not text in UTF-8") from error
    # A tag of transformers, which marks what the assistant says; Jinja does not know it.
    plain = re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", text)
    try:
        SandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError as error:
        raise ValueError(f"--chat-template: {name}, line {error.lineno}: {error.message}") from error
    return text
