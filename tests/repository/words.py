"""Checks the words of comments, error texts and pages (HACKING.md, "English").

    words.py SOURCE

Prints a line for each place that it refuses, and how to say it instead. It knows
a few words only; that a sentence can be understood is for its readers to check.
"""

import dataclasses
import pathlib
import re
import sys

PERSON = (
    r"\b(user|caller|reader|person|people|engineer|operator|maintainer|author"
    r"|you|program(mer)?|somebody|nobody|anybody|those)\b"
)
# A word that begins a note on a value: "null: none".
VALUE = (
    r"([Nn]ull(ptr)?|[Nn]one|[Nn]othing|[Ee]mpty|[Uu]nset|[Uu]ndefined|[Zz]ero"
    r"|[Tt]rue|[Ff]alse|[Nn]egative|0|-1)"
)


@dataclasses.dataclass
class Rule:
    """Words that are refused in any prose, unless `unless` is in the same
    sentence. main() checks that `wrong` is refused and `right` is not."""

    words: str
    advice: str
    wrong: str
    right: str
    unless: str = ""


RULES = [
    Rule(
        r"\bbehind (a|an|each|every|its|it|that|this|them|these|the|one|all)\b",
        '"behind" is a place: "after", or what the place is',
        "freeze parameters behind the construction",
        "The rank is behind the gateway",
    ),
    Rule(
        r"\b(parted|divided) by (commas|spaces|a comma|blanks)\b",
        '"separated by"',
        "names, parted by commas",
        "names, separated by commas",
    ),
    Rule(
        r"(?<!\w)[Ww]hoever\b",
        '"whoever" is a person: name the rank or thread',
        "Whoever waits is woken.",
        "Whoever calls is a user.",
        PERSON,
    ),
    Rule(
        r"(?<![\w\"'])[Ww]ho\b",
        '"who" is a person: "the rank that"',
        "The rank who waits is woken.",
        "A user who waits may look.",
        PERSON,
    ),
    Rule(
        r"\bhimself\b",
        "say who: a rank is not a person",
        "The rank waits for himself.",
        "A user may do it himself.",
        r"\buser\b",
    ),
    Rule(
        r"(?<![Tt]here )\b(is|are|was|were) no (?!longer|more|less|fewer|such|better"
        r"|worse|slower|faster|larger|smaller|greater|sooner|later|different"
        r"|easier|one\b)[\w\"]",
        '"is not a ..."',
        "stdout is no terminal",
        "there is no terminal, and it is no longer used",
    ),
    Rule(
        r"\b(is|are|was|were|be|been)( (not|all|yet|already|still|both|always|never"
        r"|only|now|no longer))* there\b(?! (is|are|was|were|an?|no|any|anything"
        r"|more|enough|something|nothing|such|another|still an?|already an?)\b)",
        '"there" is a place: "exists", "has arrived", "is set"',
        "until all ranks are there",
        "Is there a rank? All that there is lies there.",
    ),
    Rule(
        r"(^|[;./] |\()" + VALUE + r": (?!\d)",
        'a sentence: "null if there is none", "0 means all ranks"',
        "null: none; empty: found out",
        "Exit codes: 0: equal; 1: they differ; 2: wrong arguments",
        r"\b1: ",
    ),
    Rule(
        r"\b(that|those) of\b[^,.;:]*\b(is|are|by|of|in|with|as|to) (that|those) of\b"
        r"|\bthat one's\b",
        "name the thing instead of a chain of pronouns",
        "that of a part is that of the whole",
        "the losses are those of one process",
    ),
]
# Names and words for theatre, in code as well.
THEATRE = Rule(
    r"(?i)forsak|forsook|\bin[_ ]peace\b|doomed|\bk?deaf|farewell|(\b|_)fate(\b|_)",
    "a name says the event: abandon, left_normally, ending, ignored_until",
    "drop_doomed();",
    "drop_ending();",
)
# What a comment does not begin with.
BEGINNING = Rule(
    r"(Of|By|Behind|Who|What)\b",
    "a comment begins with its subject or a verb",
    "What needs two moments.",
    "The rates, which need two samples.",
)
# Uses that are right: a place in space, or a quotation.
RIGHT = re.compile(
    r"behind (a|the) (NAT|gateway|proxy|firewall|load balancer)|`[^`]*`", re.I
)
SUFFIXES = {".h", ".cpp", ".cu", ".md", ".py", ".cmake", ".txt"}
FOLDERS = ["benchmarks", "cmake", "docs", "examples", "lockstep", "python",
           "tests"]
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
        if not page and re.match(BEGINNING.words, text.strip()):
            yield number, text, BEGINNING.advice
        yield from refused(number, text, RULES)
    if path.suffix in {".h", ".cpp", ".cu"}:
        for number, text in literals(lines):
            yield from refused(number, text, RULES)
    for number, line in enumerate(lines, 1):
        yield from refused(number, line, [THEATRE])


def refused(number, text, rules):
    plain = RIGHT.sub(lambda found: " " * len(found[0]), text)
    # Words may stand on two lines.
    flat = plain.replace("\n", " ")
    for rule in rules:
        for found in re.finditer(rule.words, flat):
            sentence = sentence_at(plain, found.start())
            if rule.unless and re.search(rule.unless, sentence):
                continue
            line = number + plain[: found.start()].count("\n")
            yield line, sentence, rule.advice


def check_rules():
    for rule in [*RULES, THEATRE]:
        for text, wanted in ((rule.wrong, True), (rule.right, False)):
            if any(refused(1, text, [rule])) != wanted:
                sys.exit(f"words.py: {rule.words!r} is wrong about {text!r}")
    if not re.match(BEGINNING.words, BEGINNING.wrong) or re.match(
            BEGINNING.words, BEGINNING.right):
        sys.exit("words.py: BEGINNING is wrong about its examples")


def main():
    check_rules()
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
