"""Structured output: what a request's answer must look like, as masks of the tokens that may come next.

A grammar is parsed when its request is added, so that a wrong one is refused there: 0.3 ms for a small schema, 0.4 s
for one of 60 long patterns, and 0.35 s once to import xgrammar (two cores of an EPYC). A thread does it, and the loop
of a server takes the request once that is done (:meth:`Grammars.parse`), so that steps do not wait. It is compiled for
the model's vocabulary by threads, which can take seconds, while steps run; the request waits outside of the scheduler
so long. Each text is compiled once, and not at all if its requests are gone before its turn (Dong et al., "XGrammar:
flexible and efficient structured generation engine for large language models", 2024; the package ``xgrammar``).
"""

import logging
import os
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np

from tritonllm.config.sampling_params import StructuredOutputsParams
from tritonllm.engine.data.control import MOST_FORCED, mask_of, only_token
from tritonllm.engine.grammar import guidance
from tritonllm.engine.grammar.characters import quoted
from tritonllm.engine.grammar.ebnf import XGRAMMAR
from tritonllm.engine.grammar.expressions import ignored, is_endless, too_large, without_dots
from tritonllm.engine.grammar.grammar_rules import Rules
from tritonllm.engine.grammar.json_schema import read_schema, unsupported
from tritonllm.engine.grammar.patterns import TooLarge, Unreadable, whole
from tritonllm.engine.grammar.refusals import NOT_KEPT, of_ebnf, of_regex, of_value
from tritonllm.engine.grammar.schema_grammar import any_json, grammar_of
from tritonllm.system.extras import install

logger = logging.getLogger(__name__)
_ANY = r"[\u0000-\ud7ff\ue000-\U0010ffff]"
MOST_KEPT = 256  # compiled grammars; one of a small schema takes some hundred kilobytes


def _xgrammar() -> Any:
    """The library.

    Raises:
        ValueError: it is not installed, or not right.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise ValueError(
            f"structured_outputs need xgrammar, which is not installed: {install('structured')}"
        ) from error
    _check_release(xgrammar)
    return xgrammar


@cache
def _check_release(xgrammar: Any) -> None:
    """Check that no text ends where its grammar goes on, as those of 0.2.9 do.

    Raises:
        ValueError: one does.
    """
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(["a", "b", "<end>"], stop_token_ids=[2]), max_threads=1)
    grammar = f'root ::= "b" {_ANY} r\nr ::= "" | {_ANY} r\n'
    matcher = xgrammar.GrammarMatcher(compiler.compile_grammar(xgrammar.Grammar.from_ebnf(grammar)))
    if not matcher.accept_token(1) or matcher.accept_token(2):
        raise ValueError(
            "structured_outputs: this release of xgrammar ends texts where their grammar goes on: install another one "
            "(pip install 'xgrammar!=0.2.9'), or use structured_outputs_backend='guidance'"
        )


def parse(wish: StructuredOutputsParams) -> Any:
    """Parse what an output must look like, as an ``xgrammar.Grammar``.

    Raises:
        ValueError: a schema, expression or grammar that is wrong, or cannot be kept; or xgrammar is not installed.
    """
    grammar = _xgrammar().Grammar
    name, value = wish.wish
    if name in ("regex", "grammar"):
        large = too_large(name, value)
        if large is not None:
            raise ValueError(f"structured_outputs: {name} has {large}: make it smaller")
    if name != "grammar":
        try:
            return grammar.from_ebnf(written(wish))
        except TooLarge:
            return _repeating(grammar, value)
        except RuntimeError as error:
            raise of_value(name, value, str(error)) from error
    try:
        parsed = grammar.from_ebnf(value)
    except (RuntimeError, UnicodeError) as error:
        raise of_ebnf(value, XGRAMMAR, error) from error
    if is_endless(str(parsed)):
        raise ValueError("structured_outputs: grammar cannot be used: no text of its rule 'root' ever ends")
    return parsed


def written(wish: StructuredOutputsParams) -> str:
    """A wish that is no grammar yet as one, in EBNF.

    Raises:
        ValueError: it is wrong, or cannot be kept.
        TooLarge: an expression whose automaton would be too large.
    """
    if wish.json is not None:
        return _schema(wish)
    if wish.regex is not None:
        return _expression(wish.regex)
    if wish.choice is not None:
        try:
            return f"root ::= {' | '.join(map(quoted, wish.choice))}"
        except ValueError as error:
            raise ValueError(f"structured_outputs: choice has {error}: drop it") from error
    return any_json(not wish.disable_any_whitespace)


def _expression(regex: str) -> str:
    left_out = ignored(regex)
    if left_out is not None:
        raise ValueError(f"structured_outputs: regex has {left_out}, {NOT_KEPT}")
    rules = Rules()
    try:
        rules.define("root", whole(regex, rules))
    except TooLarge:
        raise
    except Unreadable as error:
        raise ValueError(f"structured_outputs: regex cannot be used: it has {error}") from error
    return str(rules)


def _repeating(grammar: Any, regex: str) -> Any:
    """A large expression as xgrammar itself writes it: with repetitions, in which a mask takes some milliseconds."""
    try:
        return grammar.from_regex(without_dots(regex))
    except RuntimeError as error:
        raise of_regex(regex, str(error)) from error


def _schema(wish: StructuredOutputsParams) -> str:
    assert wish.json is not None
    document = read_schema(wish.json)
    found = unsupported(document)
    try:
        text = "" if found is not None else grammar_of(document, not wish.disable_any_whitespace)
    except (ValueError, RecursionError) as error:
        found = "values nested too deep" if isinstance(error, RecursionError) else str(error)
    if found is not None:
        raise ValueError(f"structured_outputs: json has {found}, {NOT_KEPT}")
    return text


class Grammars:
    """Compiles grammars for one model, in threads of its own.

    Args:
        tokenizer: a tokenizer of transformers.
        vocab: size of the model's vocabulary.
        ends: tokens that may end an output, once its grammar lets it end.
        backend: what makes masks, one of :data:`~tritonllm.config.engine.STRUCTURED_OUTPUTS_BACKENDS`.

    Raises:
        ValueError: the backend is not installed, and is not the one that is used where nothing else is asked for.
    """

    def __init__(self, tokenizer: Any, vocab: int, ends: frozenset[int], backend: str = "auto") -> None:
        self._tokenizer, self._vocab, self._ends = tokenizer, vocab, sorted(ends)
        self._guided = backend == "guidance"
        if self._guided:
            guidance.check_installed()
        self._kept: OrderedDict[Any, Future[Any]] = OrderedDict()  # compiled
        self._wanted: WeakValueDictionary[Any, Future[Any]] = WeakValueDictionary()  # to be compiled, for who holds it
        self._compiled: deque[tuple[Any, Future[Any]]] = deque()  # by the threads, and not kept yet
        self._parsed: OrderedDict[Any, Future[Any]] = OrderedDict()  # in a thread, and not compiled; or wrong

    @cached_property
    def _parser(self) -> ThreadPoolExecutor:
        """Apart from the threads that compile, behind which a small grammar would wait for a large one."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-parser")

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")

    @cached_property
    def _compiler(self) -> Future[Any]:
        """Made in a thread, too: it reads the whole vocabulary."""
        return self._threads.submit(self._make_compiler)

    def _make_compiler(self) -> Any:
        if self._guided:
            return guidance.GuidanceCompiler(self._tokenizer, self._vocab, self._ends)
        xgrammar = _xgrammar()
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._vocab, stop_token_ids=self._ends
        )
        return xgrammar.GrammarCompiler(vocabulary, max_threads=min(8, os.cpu_count() or 1), cache_enabled=False)

    def _parse_wish(self, wish: StructuredOutputsParams) -> Any:
        return guidance.parse(wish) if self._guided else parse(wish)

    def parse(self, wish: StructuredOutputsParams) -> "Future[Any] | None":
        """Parse a grammar in a thread, for :meth:`compile`, which then waits for nothing and says what is wrong.

        Returns:
            What is done once it is parsed; ``None`` if there is nothing to wait for.
        """
        try:
            key = wish.key
        except RecursionError:
            return None
        if _usable(self._find(key)):
            return None
        found = self._parsed.get(key)
        if found is None:
            found = self._parsed[key] = self._parser.submit(self._parse_wish, wish)
        self._parsed.move_to_end(key)
        done = [one for one, future in self._parsed.items() if future.done()]
        for other in done[: max(0, len(self._parsed) - MOST_KEPT)]:
            del self._parsed[other]
        return found

    def compile(self, wish: StructuredOutputsParams) -> "Future[Any]":
        """A compiled grammar, perhaps later. If nobody holds the future when its turn comes, it is not compiled.

        Raises:
            ValueError: see :func:`parse`.
        """
        try:
            key = wish.key
        except RecursionError as error:
            raise ValueError("structured_outputs: json is not a JSON schema: it is nested too deep") from error
        found = self._find(key)
        if found is None or not _usable(found):
            parsed = self._parsed.get(key)
            grammar, compiler = self._parse_wish(wish) if parsed is None else _result(parsed), self._compiler
            self._parsed.pop(key, None)  # what is wrong stays, for others that ask for it
            found = self._wanted[key] = Future()
            wanted = ref(found)
            task = self._threads.submit(_compile_for, wanted, compiler, grammar)
            task.add_done_callback(lambda task: self._pass_on(key, wanted, task))
        return found

    def _find(self, key: Any) -> "Future[Any] | None":
        """The future of a grammar that is compiled, or will be; ``None`` if there is none."""
        while self._compiled:
            done, future = self._compiled.popleft()
            self._kept[done] = future
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return found or self._wanted.get(key)

    def _pass_on(self, key: Any, wanted: "ref[Future[Any]]", task: "Future[Any]") -> None:
        """Hand a compiled grammar, or its error, to those who wait; runs in the thread that has compiled it."""
        error = task.exception()
        if error is not None:
            future = wanted()
            if future is not None:
                future.set_exception(error)
        elif task.result() is not None:
            future, compiled = task.result()
            self._compiled.append((key, future))
            future.set_result(compiled)


def _compile_for(wanted: "ref[Future[Any]]", compiler: "Future[Any]", grammar: Any) -> "tuple[Future[Any], Any] | None":
    """What somebody holds, and its result; ``None`` if all requests that asked for it are gone."""
    future = wanted()
    return None if future is None else (future, compiler.result().compile_grammar(grammar))


def _usable(found: "Future[Any] | None") -> bool:
    return found is not None and not (found.done() and found.exception() is not None)


def _result(parsed: "Future[Any]") -> Any:
    """Raises an exception of its own each time."""
    error = parsed.exception()
    if isinstance(error, ValueError):
        raise ValueError(str(error)) from error
    return parsed.result()


class GrammarControl:
    """Lets one output follow its grammar (a :class:`~tritonllm.engine.data.control.Control`).

    Args:
        compiled: the compiled grammar; it must be done before the first call of a method.
        vocab: size of the model's vocabulary.
        bans: names of the request's parameters that may ban tokens that the grammar allows.
    """

    waits = False

    def __init__(self, compiled: "Future[Any]", vocab: int, bans: Sequence[str] = ()) -> None:
        self._compiled, self.words, self._bans = compiled, -(-vocab // 32), bans
        self._ahead: deque[int] = deque()  # tokens that must come next, which the matcher has taken already
        self._next: np.ndarray | None = None  # the mask behind those, if it was filled
        self._failure: str | None = None  # of the package

    @cached_property
    def matcher(self) -> Any:
        compiled = self._compiled.result(timeout=0)
        return compiled.new_matcher() if self.guided else _xgrammar().GrammarMatcher(compiled)

    @cached_property
    def guided(self) -> bool:
        """Whether llguidance makes the masks."""
        return isinstance(self._compiled.result(timeout=0), guidance.GuidanceGrammar)

    def restricts(self, pending: int) -> bool:
        return True

    def take(self, tokens: Sequence[int]) -> str | None:
        if self._failure is not None:
            return self._failure
        for token in tokens:
            if self._ahead and token == self._ahead[0]:
                self._ahead.popleft()
            elif self._ahead or not self._accept(token):
                why = f"{' or '.join(self._bans)} banned them" if self._bans else "the vocabulary has none for its text"
                return f"structured_outputs: no token was left that the grammar allows (token {token} was drawn): {why}"
        return None

    def mask(self) -> np.ndarray | None:
        return masks_of([self])[0]

    def forced(self) -> Sequence[int]:
        """The tokens that must come next: at most :data:`MOST_FORCED`, the one that ends the output perhaps among
        them."""
        if self._failure is not None:
            return ()
        while len(self._ahead) < MOST_FORCED and not self.matcher.is_terminated():
            if self._next is None:
                self._next = np.empty(self.words, dtype=np.int32)
                self.fill(self._next)
            token = only_token(self._next)
            if token is None or not self._accept(token):
                break
            self._ahead.append(token)
        return tuple(self._ahead)

    def _accept(self, token: int) -> bool:
        self._next = None
        return bool(self.matcher.accept_token(token))

    def fill(self, mask: np.ndarray) -> None:
        """Write the next token's mask. If xgrammar fails, nothing may come, and the request ends with that."""
        try:
            self.matcher.fill_next_token_bitmask(mask[None])
        except Exception:  # in words for its developers
            logger.exception("a mask could not be filled")
            self._failure = "structured_outputs: the next token could not be restricted (the log says why)"
            mask.fill(0)

    def write(self, mask: np.ndarray) -> bool:
        """Write the next token's mask, if that is known."""
        if not self._ahead and self._next is None:
            return False
        mask[:] = mask_of(self._ahead[0], self.words) if self._ahead else self._next
        return True

    def note(self, mask: np.ndarray) -> None:
        """The next token's mask, which was filled by others."""
        self._next = mask


def masks_of(controls: Sequence[GrammarControl]) -> np.ndarray:
    """``[N, ceil(V / 32)]`` int32, the masks of N outputs that may end or go on; xgrammar's in one call.

    64 masks of 151,936 tokens took 0.71 ms one by one, 0.39 so, and 0.67 to 0.94 by xgrammar's threads or Python's (an
    EPYC; `bench/synthetic_vocabulary.py`).
    """
    words = np.empty((len(controls), controls[0].words), dtype=np.int32)
    masks = [*words]
    rows = [row for row, control in enumerate(controls) if not control.write(masks[row])]
    for row in rows:
        if controls[row].guided:
            controls[row].fill(masks[row])
            controls[row].note(masks[row])
    rows = [row for row in rows if not controls[row].guided]
    try:
        if rows:
            _batch().batch_fill_next_token_bitmask([controls[row].matcher for row in rows], words, rows)
    except Exception:  # of one of them: the others go on
        for row in rows:
            controls[row].fill(masks[row])
    for row in rows:
        controls[row].note(masks[row])
    return words


@cache
def _batch() -> Any:
    return _xgrammar().BatchGrammarMatcher(max_threads=1)
