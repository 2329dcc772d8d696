"""Checks the words of comments, error texts and pages (HACKING.md, "English").

    words.py SOURCE

Prints a line for each place that it refuses, and how to say it instead. It knows
a few words only; that a sentence can be understood is for its readers to check.
"""

import pathlib
import re
import sys

# What is refused in any prose, unless `unless` is in the same sentence.
PERSON = (
    r"\b(user|caller|reader|person|people|engineer|operator|maintainer|author"
    r"|you|program(mer)?|somebody|nobody|anybody|those)\b"
)
RULES = [
    (
        r"\bbehind (a|an|each|every|its|it|that|this|them|these|the|one|all)\b",
        None,
        '"behind" is a place: "after", or what the place is',
    ),
    (r"\b(parted|divided) by (commas|spaces|a comma|blanks)\b", None, '"separated by"'),
    (r"(?<!\w)[Ww]hoever\b", PERSON, '"whoever" is a person: name the rank or thread'),
    (r"(?<![\w\"'])[Ww]ho\b", PERSON, '"who" is a person: "the rank that"'),
    (r"\bhimself\b", r"\buser\b", "say who: a rank is not a person"),
]
# What a comment does not begin with.
BEGINNING = re.compile(r"(Of|By|Behind|Who)\b")
# Uses that are right: a place in space, or a quotation.
RIGHT = re.compile(
    r"behind (a|the) (NAT|gateway|proxy|firewall|load balancer)|`[^`]*`", re.I
)
SUFFIXES = {".h", ".cpp", ".cu", ".md", ".py", ".cmake", ".txt"}
FOLDERS = ["benchmarks", "cmake", "docs", "examples", "lockstep", "tests"]
OWN = "tests/repository/words.py"


def comments(lines):
    """(number of the first line, text) of each comment of one or more lines."""
    start, text = 0, []
    for number, line in enumerate(lines, 1):
        whole = re.match(r"\s*(?://+|#(?!\w|!))\s?(.*)", line)
        if whole:
            if not text:
                start = number
            if whole[1].strip():
                text.append(whole[1])
                continue
        elif not text and (after := re.search(r"\S\s+(?://|#)\s+(\S.*)", line)):
            yield number, after[1]
        if text:
            yield start, "\n".join(text)
            text = []
    if text:
        yield start, "\n".join(text)


def literals(lines):
    """(number, text) of the C++ string literals that have a space in them."""
    for number, line in enumerate(lines, 1):
        code = line.split("//")[0]
        for found in re.findall(r'"((?:[^"\\]|\\.)*)"', code):
            if " " in found:
                yield number, found


def paragraphs(lines):
    """(number, text) of a page outside its code, and of the comments in that."""
    start, text, code = 0, [], None
    for number, line in enumerate([*lines, ""], 1):
        if line.lstrip().startswith("```"):
            if code is not None:
                for at, comment in comments(code):
                    yield start + at, comment
                code = None
            else:
                code, start = [], number
        elif code is not None:
            code.append(line)
        elif line.strip():
            if not text:
                start = number
            text.append(line)
        elif text:
            yield start, "\n".join(text)
            text = []


def sentence_at(text, position):
    before = [m.end() for m in re.finditer(r"[.;:]\s", text[:position])]
    after = re.search(r"[.;:](\s|$)", text[position:])
    end = position + after.start() if after else len(text)
    return text[before[-1] if before else 0 : end]


def findings(path, lines):
    page = path.suffix == ".md"
    for number, text in paragraphs(lines) if page else comments(lines):
        if not page and BEGINNING.match(text.strip()):
            yield number, text, "a comment begins with its subject or a verb"
        yield from refused(number, text)
    if path.suffix in {".h", ".cpp", ".cu"}:
        for number, text in literals(lines):
            yield from refused(number, text)


def refused(number, text):
    plain = RIGHT.sub(lambda found: " " * len(found[0]), text)
    for words, unless, advice in RULES:
        for found in re.finditer(words, plain):
            sentence = sentence_at(plain, found.start())
            if unless and re.search(unless, sentence):
                continue
            line = number + plain[: found.start()].count("\n")
            yield line, sentence, advice


def main():
    source = pathlib.Path(sys.argv[1])
    files = [path for folder in FOLDERS for path in (source / folder).rglob("*")]
    count = 0
    for path in sorted([*source.glob("*.md"), *source.glob("*.txt"), *files]):
        name = path.relative_to(source).as_posix()
        if path.suffix not in SUFFIXES or name == OWN:
            continue
        lines = path.read_text().splitlines()
        for number, text, advice in findings(path, lines):
            words = " ".join(text.split())
            print(f"{name}:{number}: {advice}: {words[:90]}")
            count += 1
    if count:
        sys.exit(f"{count} places whose English the glossary refuses")


main()
