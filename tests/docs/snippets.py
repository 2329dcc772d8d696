"""The code and the commands of the documentation, for the tests to run.

    snippets.py check SOURCE PAGE...         are blocks marked, do links lead on,
                                             does a page begin with a sentence
    snippets.py generate SOURCE OUT PAGE...  OUT/fragments.cpp, OUT/programs.cpp,
                                             OUT/snippets.json

PAGEs are relative to SOURCE. How blocks of a page are marked:

```cpp      With `int main(` a program of its own, else a fragment. The fragments
            of a page follow each other in one function. It runs in every rank
            of worlds of 1 and 2; programs run alone and under `lockstep run`.
            What saves runs twice in its folder, as after a restart.
            `{ ... }`, and what begins a line with `...`, is left out.
```sh       Commands, run by `sh -e` in a folder of the page's own, in the order
            of the page, with the build's programs on the PATH and a free port
            in $PORT. Must succeed.
```console  `$ command`, and what it prints: lines in any order, `...` for any
            text. Commands share the folder of ```sh.
```cmake    Lines that a project which the tests build has too: that in
            tests/repository/consumer, or examples/own_project.
```python   Run by the tests' Python, in the page's folder, after its commands.
            A program is not run by itself: it is the file NAME.py, for commands.
```diff     A program: the one before it on the page, changed. Runs of lines
            stand in their order in that program, "@@" is between two of them.
```text     Anything else; not looked at.

A comment of HTML before a block is not seen by the reader:

<!-- cpp ... -->          C++ that belongs to the fragments around it, or a
                          program.
<!-- python ... -->       What the page's later blocks of Python begin with.
<!-- sh ... -->           Commands that run at this place.
<!-- fresh -->            The next fragment begins a function of its own.
<!-- program: NAME -->    The next program is ./NAME for the page's commands.
<!-- run ... -->          What runs instead of the next ```sh block.
<!-- not run: WHY -->     The next block is not run (C++ is compiled); the tests
                          print why.

Blocks that are indented by four spaces instead are mistakes, as are other
languages and blocks without one.
"""

import dataclasses
import json
import pathlib
import re
import sys

LANGUAGES = {"cpp", "sh", "console", "cmake", "python", "diff", "text"}
FENCE = re.compile(r"^(\s*)```+\s*(.*)$")
COMMENT = re.compile(
    r"^<!-- (?:(?P<kind>cpp|sh|python|run)$|(?P<fresh>fresh) -->$|"
    r"program: (?P<program>[a-z_0-9]+) -->$|not run: (?P<why>.*?)(?: -->)?$)")
INCLUDE = re.compile(r"^\s*#\s*include\b")
MAIN = re.compile(r"^int main\(")
# Snippets that save; a second start finds the file in its folder.
SAVES = re.compile(r"\bsave_(snapshot|state_dict)\(")
NAMES_PAGE = "docs/names.md"
# Pages that say which test shows what they say.
PAGES_WITH_TESTS = {"docs/faults.md", "docs/internals/liveness.md"}
# A name of Lockstep in a row of its tables.
NAME = re.compile(r"`([^`]+)`")
# A link within the repository, or a picture.
LINK = re.compile(r"\]\(((?!https?:)[^)\s]+)\)")


class Mistake(Exception):
    pass


@dataclasses.dataclass
class Block:
    """One piece of a page: a fence, or a hidden comment."""

    language: str
    line: int  # the line of its first text
    text: list
    hidden: bool = False
    fresh: bool = False
    program: str = ""
    instead: list | None = None  # lines that run in place of the text
    not_run: str = ""


def blocks_of(page, text):
    """The blocks of one page in their order. Raises Mistake."""
    marks = {}
    lines = text.splitlines()
    at = 0
    before = None  # the last program

    def until(end):
        nonlocal at
        start = at
        while at < len(lines) and not end(lines[at]):
            at += 1
        if at == len(lines):
            raise Mistake(f"{page}:{start}: what begins here has no end")
        at += 1
        return lines[start:at - 1]

    while at < len(lines):
        line = lines[at]
        at += 1
        fence = FENCE.match(line)
        if fence:
            language = fence[2].strip()
            if language not in LANGUAGES:
                raise Mistake(
                    f"{page}:{at}: a block of \"{language}\"; mark it as one of "
                    f"{', '.join(sorted(LANGUAGES))}")
            first = at + 1
            body = until(lambda l: l.strip().startswith("```"))
            body = [l.removeprefix(fence[1]) for l in body]
            block = Block(language, first, body, **marks)
            marks = {}
            if language == "diff":
                block = Block("cpp", first, changed(page, before, block),
                              program=block.program)
            if is_program(block):
                before = block
            yield block
        elif line.startswith("<!--"):
            comment = COMMENT.match(line)
            if not comment:
                raise Mistake(f"{page}:{at}: \"{line}\" is not a comment that the "
                              "tests know; see tests/docs/snippets.py")
            if comment["kind"]:
                first = at + 1
                body = until(lambda l: l.strip() == "-->")
                if comment["kind"] == "run":
                    marks["instead"] = body
                else:
                    yield Block(comment["kind"], first, body, hidden=True,
                                fresh=marks.pop("fresh", False),
                                program=marks.pop("program", ""))
            elif comment["fresh"]:
                marks["fresh"] = True
            elif comment["program"]:
                marks["program"] = comment["program"]
            else:
                why = [comment["why"]]
                if not line.endswith("-->"):
                    more = until(lambda l: l.endswith("-->"))
                    why += [*more, lines[at - 1].removesuffix("-->")]
                marks["not_run"] = " ".join(part.strip() for part in why)
        elif line.startswith("    ") and (at == 1 or not lines[at - 2].strip()):
            raise Mistake(f"{page}:{at}: a block by indentation; use a fence "
                          "with a language")
        elif marks and line.strip():
            raise Mistake(f"{page}:{at}: a comment above marks the next block, "
                          "but text comes first")


def changed(page, program, diff):
    """The text of `program` with the changes of the block `diff`."""
    if not program or not diff.program:
        raise Mistake(f"{page}:{diff.line}: a diff is a program with a name, and "
                      "changes a program above it")
    old, new = program.text, []
    for number, run in enumerate("\n".join(diff.text).split("\n@@\n"), 1):
        run = run.split("\n")
        have = [line[1:] for line in run if not line.startswith("+")]
        at = next((i for i in range(len(old) - len(have) + 1)
                   if old[i:i + len(have)] == have), None)
        if at is None:
            raise Mistake(f"{page}:{diff.line}: run {number} of the diff is not in "
                          f"the program of line {program.line}: {have[0]}")
        new += old[:at] + [line[1:] for line in run if not line.startswith("-")]
        old = old[at + len(have):]
    return new + old


def without_ellipses(line):
    line = re.sub(r"\{ \.\.\. \}", "{ }", line)
    return re.sub(r"^\s*\.\.\.", "", line)


class Source:
    """A generated file of C++ whose lines say where they come from."""

    def __init__(self):
        self.includes = {}
        self.lines = []

    def add(self, page, first, text):
        self.lines.append(f'#line {first} "{page}"')
        for line in text:
            if INCLUDE.match(line):
                self.includes[line.strip()] = None
                line = ""
            self.lines.append(without_ellipses(line))

    def text(self, includes):
        return "\n".join([*includes, *self.includes, *self.lines, ""])


def identifier(page, number):
    stem = re.sub(r"\W", "_", pathlib.PurePath(page).with_suffix("").as_posix())
    return f"{stem}_{number}"


def fragments_source(pages):
    source = Source()
    for page, blocks in pages.items():
        functions = []
        for block in blocks:
            if block.language != "cpp" or is_program(block):
                continue
            if block.fresh or not functions:
                functions.append([])
            functions[-1].append(block)
        for number, pieces in enumerate(functions, 1):
            name = identifier(page, number)
            runs = not any(block.not_run for block in pieces)
            head = (f"WORLD_TEST(Docs, {name}, 1, 2) {{\n"
                    "const lockstep::internal::testing::InFolder in_folder("
                    f'world.folder / "{name}");' if runs else
                    f"[[maybe_unused]] static void {name}() {{")
            source.add(page, pieces[0].line, head.split("\n"))
            twice = runs and any(saves(block) for block in pieces)
            if twice:
                source.lines += [
                    'for (const char* start : {"first start", "second start"}) {',
                    "SCOPED_TRACE(start);"]
            for block in pieces:
                source.add(page, block.line, block.text)
            source.lines.append("}}" if twice else "}")
    return source


def saves(block):
    return any(SAVES.search(line) for line in block.text)


def is_program(block):
    return block.language == "cpp" and any(map(MAIN.match, block.text))


def programs_source(pages):
    """Every program is a main() in a namespace of its own."""
    source = Source()
    entries = []
    for page, blocks in pages.items():
        programs = [block for block in blocks if is_program(block)]
        for number, block in enumerate(programs, 1):
            name = identifier(page, number)
            source.lines.append(f"namespace {name} {{")
            text, inside = [], False
            for line in block.text:
                inside = inside or bool(MAIN.match(line))
                # Only the global main() returns 0 without a return statement.
                text.append("return 0; }" if inside and line == "}" else line)
                inside = inside and line != "}"
            source.add(page, block.line, text)
            source.lines.append("}")
            takes = any(MAIN.match(line) and "argc" in line or "char**" in line
                        for line in block.text)
            call = "main(argc, argv)" if takes else "main()"
            entries.append(f'if (name == "{name}") return {name}::{call};')
    source.lines += [
        "int run_program(const std::string& name, [[maybe_unused]] int argc,",
        "                [[maybe_unused]] char** argv) {", *entries,
        "return -1;", "}"]
    return source


def names_source(page, text):
    """Code that does not compile unless every name of ours is there."""
    lines = []
    for number, name in our_names(text):
        if not re.fullmatch(r"[A-Za-z_][\w:]*", name):
            continue
        if re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*|RANK", name):
            continue
        lines.append(f'#line {number} "{page}"')
        scope, _, member = name.rpartition("::")
        if not scope:
            lines.append(f"{{ using ::lockstep::{name}; }}")
        elif scope[0].islower():  # a namespace of LibTorch
            lines.append(f"{{ using ::{name}; }}")
        else:
            lines.append(f"LOCKSTEP_HAS({scope}, {member})")
    return ["namespace lockstep_names {",
            "[[maybe_unused]] static void names() {", *lines, "}", "}"]


def tables(text):
    """Rows of tables as (line, {column: cell})."""
    columns = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            columns = None
            continue
        cells = [cell.strip() for cell in
                 re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if columns is None:
            columns = cells
        elif not set(line) <= set("|-: "):
            yield number, dict(zip(columns, cells))


def our_names(text):
    for number, row in tables(text):
        for name in NAME.findall(row.get("Lockstep", "")):
            yield number, name.removesuffix("()")


def command_entries(pages):
    """What the commands test runs, page by page."""
    result = []
    for page, blocks in pages.items():
        steps, programs, scripts, skipped, number, before = [], [], [], [], 0, []
        for block in blocks:
            where = f"{page}:{block.line}"
            if block.not_run:
                skipped.append({"where": where, "why": block.not_run})
            if is_program(block):
                number += 1
                name = identifier(page, number)
                programs.append({"name": name, "called": block.program,
                                 "where": where, "run": not block.not_run,
                                 "starts": 2 if saves(block) else 1})
            elif block.not_run:
                continue
            elif block.language == "python" and block.program:
                scripts.append({"name": block.program + ".py",
                                "text": "\n".join(block.text) + "\n"})
            elif block.language == "python" and block.hidden:
                before += block.text
            elif block.language in {"sh", "python"}:
                text = block.instead or block.text
                if block.language == "python":
                    text = before + text
                steps.append({"where": where, "kind": block.language,
                              "text": "\n".join(text) + "\n"})
            elif block.language == "console":
                steps += sessions(where, block)
        result.append({"page": page, "programs": programs, "scripts": scripts,
                       "steps": steps, "skipped": skipped})
    return result


def sessions(where, block):
    found = []
    for line in block.text:
        if line.startswith("$ "):
            found.append({"where": where, "kind": "console", "text": line[2:],
                          "output": []})
        elif found and found[-1]["text"].endswith("\\"):
            found[-1]["text"] += "\n" + line
        elif found:
            found[-1]["output"].append(line)
        else:
            raise Mistake(f"{where}: a console block begins with \"$ command\"")
    return found


def check_cmake(source, page, block):
    projects = [(source / "tests/repository/consumer/CMakeLists.txt", "consumer"),
                (source / "examples/own_project/CMakeLists.txt", "train")]
    for project, program in projects:
        have = re.sub(rf"\b{program}\b", "program", project.read_text())
        missing = [line for line in block.text
                   if line.strip() and line.strip() not in
                   [each.strip() for each in have.splitlines()]]
        if not missing:
            return
    raise Mistake(f"{page}:{block.line}: no project of the tests has all of these "
                  f"lines; {project} lacks \"{missing[0]}\"")


def check_names(source, page, text):
    """Variables and options in the column of ours: quoted in the sources."""
    code = "\n".join(path.read_text() for path in (source / "lockstep").rglob("*")
                     if path.suffix in {".cpp", ".h"})
    for number, name in our_names(text):
        name = name.partition("=")[0]
        option = re.fullmatch(r"-m|--[a-z-]+", name)
        if option or re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*|RANK", name):
            if not re.search(rf'[",]{re.escape(name)}[",]', code):
                raise Mistake(f"{page}:{number}: nothing reads or sets {name}")


def check_headers(source, page, text):
    """A section's headers, or those that they include, have its names of ours."""
    def code(header):
        return re.sub("//.*", "", (source / header).read_text())

    for section in re.split("^(?=## )", text, flags=re.MULTILINE):
        title = section.partition("\n")[0]
        listed = re.search(r"^Headers?: (?:`[^`]+`[,\s]*)+\.$", section, re.MULTILINE)
        headers = [code(each) for each in NAME.findall(listed[0] if listed else "")]
        headers += [code(each) for header in headers
                    for each in re.findall('^#include "(lockstep/[^"]+)"', header,
                                           re.MULTILINE)]
        for _, name in our_names(section):
            name = re.sub("^lockstep::([a-z]+::)?", "", name)
            if not re.fullmatch(r"[A-Z]\w*[a-z]\w*(::\w+)*|[a-z_]\w*", name):
                continue  # an option, a variable, or LibTorch's
            if not any(re.search(rf"\b{name.partition('::')[0]}\b", header)
                       for header in headers):
                raise Mistake(f"{page}: none of the headers of \"{title}\" "
                              f"declares {name}")


def check_tests(source, page, text):
    """Each test that the page names exists."""
    tests = {match for path in (source / "tests").rglob("*.cpp")
             for match in re.findall(r"TEST(?:_[FP])?\((\w+),\s*(\w+)",
                                     path.read_text())}
    for number, line in enumerate(text.splitlines(), 1):
        for name in NAME.findall(line):
            if re.fullmatch(r"\w+\.\w+", name) and tuple(name.split(".")) not in tests:
                raise Mistake(f"{page}:{number}: there is no test {name}")


def check_beginning(page, text):
    """A page begins with a sentence on what it is for."""
    title, first = [line for line in text.splitlines() if line.strip()][:2]
    if not title.startswith("# ") or not re.match(r"[A-Z\[]|`[^`]", first):
        raise Mistake(f"{page}:1: \"{first}\" follows the title; say first, in a "
                      "sentence, what the page is for and when to use it")


def anchors(text):
    """The names by which links lead to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-")
            for each in headings}


def check_links(source, page, text):
    """Every link within the repository leads to a file, and to a heading of it."""
    prose = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), text,
                   flags=re.DOTALL)
    for number, line in enumerate(prose.splitlines(), 1):
        for link in LINK.findall(line):
            name, _, anchor = link.partition("#")
            target = (source / page).parent / name if name else source / page
            if not target.exists() or (
                    anchor and anchor not in anchors(target.read_text())):
                raise Mistake(f"{page}:{number}: nothing is at {link}")


def main():
    command, source, *rest = sys.argv[1:]
    source = pathlib.Path(source)
    out = pathlib.Path(rest.pop(0)) if command == "generate" else None
    pages, texts, mistakes = {}, {}, []
    for page in rest:
        texts[page] = (source / page).read_text()
        pages[page] = []
        try:
            for block in blocks_of(page, texts[page]):
                pages[page].append(block)
                if command == "check" and block.language == "cmake":
                    check_cmake(source, page, block)
            command_entries({page: pages[page]})
            if command == "check" and page == NAMES_PAGE:
                check_headers(source, page, texts[page])
            if command == "check" and page in PAGES_WITH_TESTS:
                check_tests(source, page, texts[page])
            if command == "check":
                check_beginning(page, texts[page])
                check_links(source, page, texts[page])
                check_names(source, page, texts[page])
        except Mistake as mistake:  # `check` reports it
            mistakes.append(str(mistake))
            pages[page] = []
    if command == "check":
        print(*mistakes, sep="\n")
        return 1 if mistakes else 0

    out.mkdir(parents=True, exist_ok=True)
    fragments = fragments_source(pages)
    for page in pages:
        if page == NAMES_PAGE:
            fragments.lines += names_source(page, texts[page])
    (out / "fragments.cpp").write_text(fragments.text(
        ["#include <nlohmann/json.hpp>", "#include <lockstep/lockstep.h>",
         "#include <lockstep/model_parallel.h>",
         "#include <torch/torch.h>", '#include "tests/docs/in_folder.h"',
         '#include "tests/docs/names.h"',
         '#include "tests/harness/process_world.h"',
         "#include <gtest/gtest.h>"]))
    (out / "programs.cpp").write_text(programs_source(pages).text(
        ["#include <string>"]))
    (out / "snippets.json").write_text(
        json.dumps(command_entries(pages), indent=1))
    return 0


sys.exit(main())
