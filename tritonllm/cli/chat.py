"""``tritonllm chat`` and ``tritonllm complete``: a conversation, or texts to continue, in a terminal."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tritonllm import env
from tritonllm.cli.options import ENGINE, SAMPLING, add_options, given
from tritonllm.cli.talk import LocalTalker, RemoteTalker, Talker
from tritonllm.config.engine import EngineConfig
from tritonllm.config.sampling_params import SamplingParams

HELP = """\
/reset      forget the conversation
/save FILE  write it as JSON, as `messages` of a request
/help       this
/quit       end, as Ctrl-D does; Ctrl-C ends an answer"""
NOT_HERE = ("n", "truncate-prompt-tokens", "logprobs")  # nothing that a terminal could show
NAMES = tuple(name for name in SAMPLING if name not in NOT_HERE)
OPTIONS = {name: SAMPLING[name] for name in NAMES} | {
    "max-tokens": {"type": int, "metavar": "N", "help": "most tokens of an answer (default: as many as fit)"},
    "temperature": {"type": float, "metavar": "X", "help": "0: the most likely token (default: the model's own)"},
}
USES = {
    "chat": ("talk to a model", "Talk to a model in the terminal. /help lists the commands."),
    "complete": ("continue texts in the terminal", "Continue each line that you type."),
}


def add_parsers(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the parsers of ``tritonllm chat`` and ``tritonllm complete``; both take a model."""
    return [_add_parser(commands, name) for name in USES]


def _add_parser(commands: Any, name: str) -> argparse.ArgumentParser:
    short, long = USES[name]
    parser = commands.add_parser(
        name,
        help=short,
        description=f"{long} The model runs in this process; with --url, a server answers.",
        usage=f"tritonllm {name} [MODEL] [options]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error, use=name)
    group = parser.add_argument_group("conversation")
    group.add_argument("-q", "--quick", metavar="TEXT", help="answer this and end")
    if name == "chat":
        group.add_argument("--system-prompt", metavar="TEXT", help="system message")
    group = parser.add_argument_group("server")
    group.add_argument("--url", metavar="URL", help="of a server, as http://127.0.0.1:8000")
    group.add_argument("--model-name", metavar="NAME", help="a name that it serves (default: its first)")
    group.add_argument("--api-key", metavar="KEY", help="default: TRITONLLM_API_KEY")
    add_options(parser.add_argument_group("sampling"), OPTIONS)
    add_options(parser.add_argument_group("engine (without --url)"), ENGINE)
    return parser


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    try:
        talker = make_talker(args, make_llm)
    except ValueError as error:
        args.wrong_usage(str(error))
    conversation = Conversation(talker, getattr(args, "system_prompt", None), chat=args.use == "chat")
    if args.quick is not None:
        conversation.say(args.quick)
        return 0
    if sys.stdin is None:
        args.wrong_usage("stdin is closed, and what you say comes from there; or give --quick")
    _talk(conversation)
    return 0


def make_talker(args: argparse.Namespace, make_llm: Callable[..., Any]) -> Talker:
    """The talker that the options ask for: a model in this process, or a server.

    Raises:
        ValueError: a bad value, or engine options for a server.
        RuntimeError: the server does not answer.
    """
    sampling, engine = given(args, OPTIONS), given(args, ENGINE)
    SamplingParams(**sampling)
    if args.url is None:
        if args.model_name is not None or args.api_key is not None:
            raise ValueError("--model-name and --api-key are of a server: give --url")
        EngineConfig.from_kwargs(model=args.model, **engine)
        llm = make_llm(args.model, **engine)
        params = llm.get_default_sampling_params()
        values = {"max_tokens": None} | sampling
        for name, value in values.items():
            setattr(params, name, value)
        return LocalTalker(llm, params)
    if engine or args.model is not None:
        raise ValueError("--url: the server has its model and its options already; --model-name is one of its names")
    return RemoteTalker(args.url, args.model_name, args.api_key or env.API_KEY, sampling)


class Conversation:
    """A conversation with a model.

    Args:
        talker: the talker that answers.
        system: the first message, if any.
        chat: whether messages are remembered; if not, each text is continued by itself.
    """

    def __init__(self, talker: Talker, system: str | None, *, chat: bool) -> None:
        self._talker, self._system, self._chat = talker, system, chat
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> None:
        """Print the answer as it comes, and remember it, also if Ctrl-C ends it.

        Raises:
            ValueError, RuntimeError: there is none; the text is not remembered.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        parts = self._talker.chat(asked) if self._chat else self._talker.complete(text)
        answer = print_parts(parts)
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def save(self, path: str) -> None:
        """Write the messages to a file, as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps(self.messages, ensure_ascii=False, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")


def print_parts(parts: Iterator[str]) -> str:
    """Print and return them; Ctrl-C ends them."""
    said = ""
    try:
        for part in parts:
            said += part
            print(part, end="", flush=True)
    except KeyboardInterrupt:
        parts.close()  # type: ignore[attr-defined] # a generator
    print(flush=True)
    return said


def _lines() -> Iterator[str]:
    """What is typed; on a terminal with a prompt, a history and the arrow keys."""
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() uses it from here on
        print("/help lists the commands, Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return


def _talk(conversation: Conversation) -> None:
    for line in _lines():
        command, _, rest = line.strip().partition(" ")
        try:
            if command in ("/quit", "/exit"):
                return
            if command == "/reset":
                conversation.reset()
            elif command == "/save" and rest.strip():
                conversation.save(rest.strip())
            elif command.startswith("/"):
                print(HELP, file=sys.stderr)
            elif line.strip():
                conversation.say(line)
        except (ValueError, RuntimeError, OSError) as error:  # the conversation goes on
            if isinstance(error, BrokenPipeError):
                raise
            print(f"error: {error}", file=sys.stderr)
