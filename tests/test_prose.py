"""The rules of prose that a program can check: openings, verbs, banned words and length of sentences.

`python tests/test_prose.py PATH…` prints what breaks them below the paths.
"""

import ast
import inspect
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator
from typing import Any


ROOT = pathlib.Path(__file__).parents[1]
MOST_WORDS = 25
MOST_WORDS_OF_A_MESSAGE = 40
"""Words of a sentence that a user reads: it names the cause, the place and the remedy."""
OPENINGS = frozenset(("what", "whether", "of", "those", "where", "how", "which", "who", "whose", "why", "that"))
"""Words that open no sentence: the subject must stand first."""
BANNED = (
    *("told", "said", "anew", "beside", "whatever", "whoever", "held", "kept", "taken", "met", "meanwhile"),
    *("come to", "comes to", "came to", "for want of", "of whom", "by itself", "at all"),
)
"""Words of everyday speech that stand for a word of the field: live, stored, saved, consumed, reached, again."""
VERBS = frozenset(
    """
    abort accept accumulate add adjust aggregate align allocate allow analyse annotate answer append apply approximate
    ask assemble assert assign attach average backpropagate balance begin bind block bound break broadcast build bundle
    cache calculate call cancel canonicalise cap cast change charge check choose clamp clean clear climb clip clone
    close cluster coalesce collapse collect colour combine compare compile complain complete compose compress compute
    concatenate configure connect construct consume continue convert copy correct count cover create credit cut decide
    declare decode decompose deduplicate defer define delegate delete derive describe deserialise detach detect
    determine differentiate disable discard dispatch display distribute divide download draw drop dump duplicate
    eliminate embed emit enable encode encourage end enforce ensure enter enumerate equal escape estimate evaluate
    exclude execute exit expand expect explain export express extend extract factor fail fetch fill filter find finish
    fit fix flatten fold follow forbid force forecast forget format forward free freeze fuse gather generate get give
    group guard guess halve handle hash hide hold identify ignore import improve include increase index infer inherit
    initialise inline insert inspect install instantiate integrate interpolate interpret interrupt intersect invert
    invoke isolate iterate join judge jump keep kill label launch lay leave let lift limit link list listen load locate
    lock log look lower make map mark mask match materialise measure merge minimise mirror model modify move multiply
    name narrow negate normalise note offer offload omit open optimise order override overwrite own pack pad pair
    parametrise parse partition pass patch pause permute pick pin pipeline place plan plot point poll pool pop predict
    prefer prepare prepend preserve prevent price print probe produce profile project promote propagate propose protect
    prove provide prune publish pull push put query queue quote raise randomise rank read rebuild recognise recompute
    record recover rectify reduce refer refine refuse register regroup reject relax release reload remat remember remove
    rename render repeat replace replay replicate report represent request require reset reshape reshard resolve respond
    restart restore restrict resume retrieve retry return reuse reverse rewrite rotate round route run sample satisfy
    save scale scan scatter schedule score scroll search select send separate serialise serve set shard share shift show
    shrink sign signal simplify simulate size skip slice snap solve sort spawn specialise split spread stack stage start
    state step stop store stream strip style subclass submit substitute subtract suggest sum support suppress swap
    switch synchronise tabulate tag take tell terminate test throw tie tighten tile time toggle total trace track train
    transfer transform translate transpose traverse treat trim truncate try tune turn type unflatten unify uninstall
    unpack unregister unroll unwrap update upload use validate verify view visit vote wait walk warm warn watch weigh
    widen wrap write yield zero zip
    """.split()
)
"""First words of functions' docstrings: verbs in the imperative."""


def code_as_words(text: str) -> str:
    """Replace inline code, links and roles by one word each."""
    text = re.sub(r":\w+:`[^`]*`|``[^`]*``|`[^`]*`", "CODE", text)
    return re.sub(r"https?://\S+", "LINK", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring; an item of a list and a literal block's lines end one."""
    for paragraph in re.split(r"\n\s*\n", text):
        if all(line.startswith("    ") for line in paragraph.splitlines()):
            continue
        for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.|:\w+[^:]*:) ?)", paragraph):
            yield from (
                part.strip()
                for part in re.split(r"(?<=[.!?:])(?:['\")]*)\s+(?=[A-Z`\[('\"]|CODE|\d)", code_as_words(item))
                if part.strip()
            )


def strings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind (`function` or `noun`) and text of docstrings and of strings below fields and constants."""
    left: list[Any] = [tree]
    for node in left:  # statements alone: most nodes are in expressions
        left += [
            each for key in ("body", "orelse", "handlers", "finalbody", "cases") for each in getattr(node, key, ())
        ]
        body = getattr(node, "body", [])
        for before, statement in zip([None, *body], body, strict=False):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
                continue
            kind = "noun"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and before is None:
                marks = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
                kind = "noun" if marks & {"property", "cached_property", "fixture"} else "function"
            yield value.lineno, kind, value.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of comments; those of following lines that hold nothing else make one."""
    lines = text.splitlines()
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(?:noqa|type:|pyrefly:|fmt:|pragma|ruff:|!)", token.string):
            continue
        alone = lines[token.start[0] - 1].lstrip().startswith("#")
        if block and not (alone and token.start[0] == last + 1):
            yield start, "\n".join(block)
            block = []
        if not block:
            start = token.start[0]
        block.append(token.string.lstrip("#: ").rstrip())
        last = token.start[0] if alone else -1
    if block:
        yield start, "\n".join(block)


def faults(text: str, most_words: int = MOST_WORDS) -> Iterator[str]:
    """Yield the rules that a text breaks, wherever it stands."""
    for sentence in sentences(text):
        words = sentence.split()
        if words[0].strip("'\"(,").lower() in OPENINGS and not sentence.endswith("?"):
            yield f"begins with {words[0]!r}: {' '.join(words[:8])}"
        if len(words) > most_words:
            yield f"has {len(words)} words: {' '.join(words[:8])}"
        for word in BANNED:
            if re.search(rf"\b{word}\b", sentence, re.IGNORECASE):
                yield f"says {word!r}: {sentence[:80]}"


def problems(path: str, text: str) -> Iterator[str]:
    """Yield a sentence for each rule that a module's docstrings and comments break."""
    for line, kind, string in strings(ast.parse(text)):
        for fault in faults(inspect.cleandoc(string)):
            yield f"{path}:{line}: {fault}"
        first = re.split(r"[\s,:;.]", string.strip(), maxsplit=1)[0]
        if kind == "function" and first.lower() not in VERBS:
            yield f"{path}:{line}: a function's docstring begins with a verb, not {first!r}"
    for line, comment in comments(text):
        for fault in faults(comment):
            yield f"{path}:{line}: {fault}"


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of strings with at least five words that are no docstrings; `{...}` counts as one word.

    Continuations, which begin with a blank, and lists of names before `.split()` are left out.
    """
    skipped = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr | ast.JoinedStr)
        or (isinstance(node, ast.Attribute) and node.attr == "split" and isinstance(node.value, ast.Constant))
        for part in (node.values if isinstance(node, ast.JoinedStr) else [node.value])
    }
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node] if id(node) not in skipped else []
        if not all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
            continue
        text = "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "`X`" for part in parts
        )
        if len(text.split()) >= 5 and not text[0].isspace() and "\n" not in text.strip():
            yield getattr(node, "lineno", 0), text


def files(*places: pathlib.Path) -> list[pathlib.Path]:
    """List the modules below some folders, or the files themselves."""
    return sorted(file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place]))


CHECKED = ("autoshard", "examples", "experiments", "tests", "tests-browser")
"""Folders whose modules follow the rules, without exceptions."""


def test_docstrings_and_comments_follow_the_rules():
    broken = [
        line
        for file in files(*(ROOT / folder for folder in CHECKED))
        for line in problems(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(broken)


def test_messages_follow_the_rules():
    broken = [
        f"{file.relative_to(ROOT)}:{line}: {fault}"
        for file in files(ROOT / "autoshard")
        for line, text in messages(ast.parse(file.read_text(encoding="utf-8")))
        for fault in faults(text, MOST_WORDS_OF_A_MESSAGE)
    ]
    assert not broken, "\n".join(broken)


def test_planted_messages_are_found():
    planted = (
        'def f(x):\n    """Fail, as users are told here."""\n    raise ValueError(f"What {x} has is kept anew.")\n'
    )
    (line, text) = next(messages(ast.parse(planted)))
    assert (line, text) == (3, "What `X` has is kept anew.")
    assert len(list(faults(text, MOST_WORDS_OF_A_MESSAGE))) == 3
    assert not list(messages(ast.parse('NAMES = "abs add and ceil cos".split()\n')))


def test_planted_prose_is_found():
    planted = '"""A module."""\n\n\ndef f():\n    """What it takes."""\n    return 1  # kept anew\n'
    assert [line.partition(": ")[2] for line in problems("x.py", planted)] == [
        "begins with 'What': What it takes.",
        "a function's docstring begins with a verb, not 'What'",
        "says 'anew': kept anew",
        "says 'kept': kept anew",
    ]
    long = f'"""{"Word " * 26}end."""\n'
    assert list(problems("x.py", long)) == ["x.py:1: has 27 words: Word Word Word Word Word Word Word Word"]
    good = 'def f():\n    """Return `what` of the tensor, which is 1."""\n'
    assert not list(problems("x.py", good))


def test_cited_observations_are_on_their_page():
    page = (ROOT / "docs" / "compiler_behaviour.md").read_text(encoding="utf-8")
    titles = set(re.findall(r"^### (.+)$", page, re.MULTILINE))
    cited = {
        " ".join(title.split())
        for file in files(ROOT / "autoshard")
        for title in re.findall(r'compiler_behaviour\.md,\s+"([^"]+)"', file.read_text(encoding="utf-8"))
    }
    assert len(cited) > 20 and cited <= titles, cited - titles


def main() -> int:
    found = [
        line
        for file in files(*map(pathlib.Path, sys.argv[1:]))
        for line in problems(str(file), file.read_text(encoding="utf-8"))
    ]
    print("\n".join(found))
    print(len(found), "problems")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
