"""Compiles sources and public headers by themselves, so that a missing include
shows.

    compile_alone.py COMPILE_COMMANDS HEADERS [FILE...]

COMPILE_COMMANDS is that of the preset plain, in which every source has a command;
HEADERS is cmake/LockstepHeaders.cmake. Without FILEs, what the last commit and the
working tree have changed is compiled, at most MOST files of it (each that includes
LibTorch takes some ten seconds).
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

MOST = 24


def changed():
    def git(*arguments):
        return subprocess.run(["git", *arguments], capture_output=True,
                              text=True).stdout.split()

    commit = git("rev-parse", "--verify", "--quiet", "HEAD~1") and ["HEAD~1"]
    return [name for name in git("diff", "--name-only", "--diff-filter=d",
                                 *(commit or ["HEAD"]))
            if name.endswith((".h", ".cpp"))]


def syntax_only(command, source):
    """The words of a command that compiles a source, for another one."""
    words = shlex.split(command["command"])
    while words[0] != "--" and not words[0].endswith(("++", "g++", "clang++")):
        words.pop(0)  # ccache and its settings
    output = words.index("-o")
    del words[output:output + 2]
    words[words.index("-c"):] = ["-fsyntax-only", "-x", "c++", str(source)]
    return words


def main():
    commands = {os.path.realpath(each["file"]): each
                for each in json.loads(pathlib.Path(sys.argv[1]).read_text())}
    public = re.search(r"set\(LOCKSTEP_PUBLIC_HEADERS([^)]*)\)",
                       pathlib.Path(sys.argv[2]).read_text())[1].split()
    # A program of users sees all layers and LibTorch.
    user = commands[os.path.realpath("examples/02_ddp.cpp")]
    tasks = []
    for name in sys.argv[3:] or changed():
        path = os.path.realpath(name)
        if path in commands:
            tasks.append((name, syntax_only(commands[path], path), commands[path]))
        elif name.removeprefix("lockstep/") in public:
            words = syntax_only(user, os.devnull)
            tasks.append((name, [*words[:-1], "-include", path, words[-1]], user))
    left = tasks[MOST:] if not sys.argv[3:] else []
    tasks = tasks[:len(tasks) - len(left)]

    def compile_one(task):
        name, words, command = task
        return name, subprocess.run(words, cwd=command["directory"],
                                    capture_output=True, text=True)

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, done in pool.map(compile_one, tasks):
            if done.returncode:
                failed += 1
                print(f"{name} does not compile by itself:\n{done.stderr}")
    print(f"{len(tasks)} compiled by themselves, {failed} failed")
    if left:
        print(f"{len(left)} more have changed; name those that matter: "
              f"./dev includes {left[0][0]} ...")
    return 1 if failed else 0


sys.exit(main())
