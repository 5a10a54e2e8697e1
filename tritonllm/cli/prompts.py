"""Where prompts come from: options, a file, or stdin; all of it UTF-8."""

import argparse
import sys


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts that the arguments name.

    Raises:
        ValueError: none, or bytes that are no UTF-8.
        OSError: the prompt file cannot be read.
    """
    check_options(args)
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is not None:
        source = f"--prompt-file {args.prompt_file}"
        texts = [line for line in decode(source, args.prompt_file.read_bytes()).split("\n") if line.strip()]
    else:
        source = "stdin"
        text = read_stdin().removesuffix("\n")
        texts = [text] if text else []
    if not texts:
        raise ValueError(f"no prompt: {source} is empty")
    return texts


def read_stdin() -> str:
    if sys.stdin is None:  # `<&-`
        raise ValueError("no prompt: stdin is closed; give --prompt or --prompt-file")
    if sys.stdin.isatty():
        print("reading the prompt from the terminal; Ctrl-D ends it", file=sys.stderr)
    if not hasattr(sys.stdin, "buffer"):  # replaced by text
        return sys.stdin.read()
    return decode("stdin", sys.stdin.buffer.read())


def decode(source: str, data: bytes) -> str:
    """Text of a file: without a byte order mark, and with \\n where a line ends.

    Raises:
        ValueError: not UTF-8; names ``source``, the byte and its position.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(source, data[error.start], error.start)) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def check_options(args: argparse.Namespace) -> None:
    """Whether texts among the arguments are UTF-8: Python makes half a surrogate pair of a byte that is not."""
    named = [("--prompt", args.prompt or []), ("--system", [args.system or ""]), ("--stop", getattr(args, "stop", []))]
    for name, texts in named:
        for number, text in enumerate(texts, 1):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                source = f"{name} (number {number})" if len(texts) > 1 else name
                at = len(text[: error.start].encode())
                raise ValueError(not_utf8(source, ord(text[error.start]) & 0xFF, at)) from error


def not_utf8(source: str, byte: int, at: int) -> str:
    return f"{source} is not UTF-8: byte 0x{byte:02x} at position {at}"
