"""A chat template, compiled so that each render also says which message every piece of text belongs to.

The template's syntax tree gets calls that print nothing: one before each loop, one at the start of the
loop's body with the loop's variable, one behind the loop. What the template prints passes through one
list, so the call knows how much was printed before it, and the variable's identity names the message:

    {% for m in messages %}[at(m)]<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}[back()]

Since nothing is added to the output and nothing is visible to the template's logic, the text is what
the plain template renders: no second render, and no mark that a conversation could contain.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinMethodType
from typing import Any, NamedTuple, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from packing.errors import OptionError, TemplateError

# What a template's own code may raise on a row that it was not written for, beside jinja2's own errors:
# it indexes, calls methods, adds and compares whatever the row holds.
RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

_PART = 8  # letters

RESERVED_ARGUMENTS = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens"),
        *("strftime_now", "raise_exception", "self"),
    }
)
"""Names that `apply_chat_template` or the render itself gives a meaning; no `--template-arg` takes them."""


class Piece(NamedTuple):
    """Text from `start` to `end` of a render, printed while message `message` was at hand (-1: none)."""

    start: int
    end: int
    message: int


@dataclass(frozen=True, slots=True)
class Render:
    """One rendered conversation.

    Attributes:
        text: What the template prints.
        pieces: The whole text in order, cut where the message at hand changes; none is empty.
        marked: The spans of `{% generation %}` blocks, with the message at hand at their start.
    """

    text: str
    pieces: tuple[Piece, ...]
    marked: tuple[Piece, ...]

    def places(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, int] | None]:
        """From where to where each message is printed, None for one of which nothing but white space is.

        Raises:
            ScatteredError: one stands in several places, or behind a later one. System texts may be moved
                to the front.
        """
        places: list[tuple[int, int] | None] = [None] * len(messages)
        reached, printed = -1, 0
        for start, end, message in self.pieces:
            if not self.text[start:end].strip():
                continue
            if message >= 0:
                before = places[message]
                moves = messages[message]["role"] == "system"
                if (message < reached and not moves) or (before is not None and before[1] < printed):
                    raise ScatteredError(message)
                places[message] = (start if before is None else before[0], end)
                reached = reached if moves else message
            printed = end
        return places


class ScatteredError(ValueError):
    """A message that is printed in several places, or not in the messages' order."""

    def __init__(self, message: int) -> None:
        super().__init__(f"message {message} stands in several places, or not in the messages' order")
        self.message = message


class _Recorder:
    """The state of one render: what was printed so far, and the message at hand."""

    def __init__(self) -> None:
        self.begin(())

    def begin(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.blocks: list[str] = []
        self.index = {id(message): number for number, message in enumerate(messages)}
        self.current = -1
        self.by_loop = False
        self.stack: list[tuple[int, bool]] = []
        self.changes: list[tuple[int, int]] = [(0, -1)]
        self.generation: list[tuple[int, int]] = []

    def _set(self, message: int) -> None:
        if message != self.current:
            self.current = message
            self.changes.append((len(self.blocks), message))

    @jinja2.pass_context  # takes the context only so that jinja2 does not fold the call at compile time
    def enter_loop(self, _context: object, value: Any) -> Any:
        self.stack.append((self.current, self.by_loop))
        return value

    @jinja2.pass_context
    def leave_loop(self, _context: object, value: Any) -> Any:
        message, self.by_loop = self.stack.pop()
        self._set(message)
        return value

    @jinja2.pass_context
    def at_loop_item(self, _context: object, value: Any) -> Any:
        if (message := self.index.get(id(value))) is not None:
            self.by_loop = True
            self._set(message)
        return value

    @jinja2.pass_context
    def at_assignment(self, _context: object, value: Any) -> Any:
        # `{% set m = messages[i] %}` names the message at hand only where no loop variable already does.
        if not self.by_loop and (message := self.index.get(id(value))) is not None:
            self._set(message)
        return value

    @jinja2.pass_context
    def generation_edge(self, _context: object, value: Any) -> Any:
        self.generation.append((len(self.blocks), self.current))
        return value


_CALLS = ("enter_loop", "leave_loop", "at_loop_item", "at_assignment", "generation_edge")


def _call(method: str, argument: nodes.Expr | None = None) -> nodes.ExprStmt:
    """A statement that calls the recorder and prints nothing. A filter, since that skips the sandbox."""
    return nodes.ExprStmt(
        nodes.Filter(argument or nodes.Const(None), f"padfree_{method}", [], [], None, None)
    )


def _is_generation(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.CallBlock)
        and isinstance(node.call.node, nodes.ExtensionAttribute)
        and node.call.node.name == "_generation_support"
    )


class _Tracer(NodeTransformer):
    """Adds the recorder's calls. Captured output (macros, set and filter blocks) is left alone: text in
    there has no place in the render yet, and belongs to the message at hand where it is printed.
    """

    def __init__(self) -> None:
        self.loops = 0

    def visit_For(self, node: nodes.For) -> nodes.Node | list[nodes.Node]:
        if node.recursive or node.find(nodes.Output) is None:
            return (
                node  # of a loop that prints nothing, such as a look for the last question, no place is asked
            )
        self.loops += 1
        self.generic_visit(node)
        self.loops -= 1
        if isinstance(node.target, nodes.Name):
            node.body.insert(0, _call("at_loop_item", nodes.Name(node.target.name, "load")))
        return [_call("enter_loop"), node, _call("leave_loop")]

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node | list[nodes.Node]:
        if self.loops and isinstance(node.target, nodes.Name) and isinstance(node.node, nodes.Getitem):
            return [node, _call("at_assignment", nodes.Name(node.target.name, "load"))]
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node | list[nodes.Node]:
        if _is_generation(node):
            # The call gives back what its body prints; printed at once, in a scope as a call's body has one,
            # that costs half as much.
            return [_call("generation_edge"), nodes.Scope(node.body), _call("generation_edge")]
        return node

    def _captured(self, node: nodes.Node) -> nodes.Node:
        return node

    visit_Macro = visit_FilterBlock = visit_AssignBlock = _captured


class ChatTemplate:
    """One template text with its arguments. Not safe to share between threads while rendering.

    Args:
        source: The template's text.
        name: How errors call it.
        special_tokens: What `apply_chat_template` passes beside the arguments (`bos_token` and so on).
        arguments: The user's `--template-arg`.
        date: What `strftime_now` tells the template, as YYYY-MM-DD; None leaves the clock.

    Attributes:
        variables: Names that the template may read from outside; those of its own loops are not among them.

    Raises:
        TemplateError: it does not compile, or it can never give the same text twice.
        OptionError: a reserved argument, or a date that is none.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        special_tokens: Mapping[str, Any],
        arguments: Mapping[str, Any],
        date: str | None = None,
    ) -> None:
        if taken := sorted(RESERVED_ARGUMENTS.intersection(arguments)):
            raise OptionError(f"--template-arg {taken[0]}: the name is reserved, it can't be given")
        self.source = source
        self._parts = {source[place : place + _PART] for place in range(len(source))}
        self.name = name
        self._recorder = _Recorder()
        environment, tree = _parse(source, name)
        marks = sum(_is_generation(node) for node in tree.find_all(nodes.CallBlock))
        self.has_generation = marks > 0
        self.reads = _names_read(tree)
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self.printed = frozenset(node.data for node in tree.find_all(nodes.TemplateData)) | self.reads
        self.prints_date = any(node.name == "strftime_now" for node in tree.find_all(nodes.Name))
        _refuse_chance(tree, name)
        globals_: dict[str, Any] = {"strftime_now": pinned_date(date)} if date is not None else {}
        environment.filters = {
            **environment.filters,
            **{f"padfree_{call}": getattr(self._recorder, call) for call in _CALLS},
        }
        environment.getattr = _quick_getattr(environment)  # type: ignore[assignment, method-assign]
        environment.call = _quick_call(environment)  # type: ignore[attr-defined]
        traced = _Tracer().visit(tree)
        edges = sum(node.name == "padfree_generation_edge" for node in tree.find_all(nodes.Filter))
        if edges != 2 * marks:
            raise TemplateError(
                f"{name} has {{% generation %}} inside a macro or captured block, where "
                "its place in the text is unknown: print the assistant's text outside of macros"
            )
        self._template = environment.from_string(traced, globals=globals_)
        self._template.globals = dict(self._template.globals)  # each render walks it, and a ChainMap is slow
        self._variables = {**self._template.globals, "documents": None, **special_tokens, **arguments}

    def contains(self, text: str) -> bool:
        """Whether the text stands in the template's own, which is read only if its beginning does."""
        return (len(text) < _PART or text[:_PART] in self._parts) and text in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Render:
        """Renders as `apply_chat_template(messages, tools, tokenize=False)` does.

        The messages have to be distinct objects; an object that stands in two places has no one place.

        Raises:
            RENDER_ERRORS: what the template or its code raises on these messages.
        """
        recorder = self._recorder
        recorder.begin(messages)
        blocks = recorder.blocks
        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        context = self._template.new_context(variables, shared=True)
        for block in self._template.root_render_func(context):
            blocks.append(block)
        offsets = [0, *itertools.accumulate(map(len, blocks))]
        edges = iter(recorder.generation)
        return Render(
            text="".join(blocks),
            pieces=tuple(_pieces(recorder.changes, offsets)),
            marked=tuple(
                [
                    Piece(offsets[start], offsets[end], message)
                    for (start, message), (end, _) in zip(edges, edges, strict=True)
                ]
            ),
        )


def _parse(source: str, name: str) -> tuple[jinja2.Environment, nodes.Template]:
    """The environment of transformers, with its filters and tags, and the template's syntax tree in it.

    The environment has no public door; building one here would drift from what `apply_chat_template` does.
    """
    from transformers.utils import chat_template_utils

    try:
        compiled = chat_template_utils._compile_jinja_template(source)
        environment = cast(jinja2.Environment, compiled.environment).overlay()
        return environment, environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{name} does not compile: line {error.lineno}: {error}") from error


def _quick_getattr(environment: jinja2.Environment) -> Callable[[Any, str], Any]:
    """The environment's own `getattr`, without asking again what it has answered for a type.

    `message.role` on a dict costs an exception before the item is read, and a method of a text some ten
    type checks: half of a render. What comes out is the same.
    """
    sandbox = cast(SandboxedEnvironment, environment)
    original = sandbox.getattr
    of_dicts = frozenset(dir(dict))
    safe: set[tuple[type, str]] = set()

    def quick(obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in of_dicts:
            try:
                return obj[attribute]
            except KeyError:
                return sandbox.undefined(obj=obj, name=attribute)
        if (kind, attribute) in safe:
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return original(obj, attribute)
        if (
            issubclass(kind, str | LoopContext | Namespace)
            and not attribute.startswith("format")  # the sandbox wraps these
            and sandbox.is_safe_attribute(obj, attribute, None)
        ):
            safe.add((kind, attribute))
        return original(obj, attribute)

    return quick


def _quick_call(environment: jinja2.Environment) -> Callable[..., Any]:
    """The environment's own `call`, without asking of each method of a text whether it is safe.

    Nor whether it wants the template's variables: it takes what it is given. The same for `namespace`.
    """
    sandbox = cast(SandboxedEnvironment, environment)
    original = sandbox.call
    namespace = cast(type[Namespace], environment.globals["namespace"])

    def quick(context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        if called is namespace or (type(called) is BuiltinMethodType and type(called.__self__) is str):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return called(*args, **kwargs)
        return original(context, called, *args, **kwargs)

    return quick


def _names_read(tree: nodes.Template) -> frozenset[str]:
    """The names of attributes and keys that the template reads anywhere, such as `reasoning_content`."""
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    strings = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(attributes | strings)


def _refuse_chance(tree: nodes.Template, name: str) -> None:
    chance = {node.name for node in tree.find_all(nodes.Filter)} & {"random"}
    chance |= {node.name for node in tree.find_all(nodes.Name)} & {"lipsum"}
    if chance:
        raise TemplateError(f"{name} uses `{chance.pop()}`: no two runs would give the same text")


def pinned_date(date: str) -> Callable[[str], str]:
    """`strftime_now` for templates, at the date YYYY-MM-DD (a time of day may follow, as in ISO 8601).

    Raises:
        OptionError: not such a date.
    """
    try:
        moment = datetime.datetime.fromisoformat(date)
    except ValueError as error:
        raise OptionError(f"--template-date {date}: give a date as YYYY-MM-DD") from error
    return moment.strftime


def _pieces(changes: Sequence[tuple[int, int]], offsets: Sequence[int]) -> list[Piece]:
    """The text cut where the message at hand changes; what prints nothing makes no cut."""
    pieces: list[Piece] = []
    ends = [offsets[printed] for printed, _ in changes[1:]] + [offsets[-1]]
    for (printed, message), end in zip(changes, ends, strict=True):
        start = offsets[printed]
        if pieces and pieces[-1].message == message:
            start = pieces.pop().start
        if end > start:
            pieces.append(Piece(start, end, message))
    return pieces
