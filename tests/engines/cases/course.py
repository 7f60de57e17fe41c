#!/usr/bin/env python3
"""Runs the commands of a page's `console` block, and compares their output with the page. Numbers, ages and digests may
differ, and `...` stands for any lines. course.py PAGE ACCEL_JOBS [SHOWN=REAL...]"""
import re
import subprocess
import sys
import time

LIMIT = 240  # seconds until a command shows what it has to


def commands(page):
    """The commands, and the lines that each must print."""
    block = re.search(r"```console\n(.*?)```", page, re.S).group(1).replace("\\\n", " ")
    found = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found:
            found[-1][1].append(line)
    return [(command, "\n".join(lines).strip("\n")) for command, lines in found]


def pattern(text):
    text = re.escape(re.sub(r" {2,}", "  ", text))
    text = text.replace(r"\ \ ", " +")
    text = re.sub(r"(\d+(\\\.\d+)?)[smhd]\b", r"\\d+[smhd]", text)
    text = re.sub(r"(?<![\\\w-])\d+(\\\.\d+)*", r"[\\d.]+", text)
    text = re.sub(r"\bnode\d", r"node\\d", text)
    return text.replace("\\.\\.\\.\\\n", "(.|\n)*")


def run(command, jobs, real):
    command = command.replace("accel-launch jobs", jobs).replace("accel-launch submit", f"{jobs} submit")
    for shown, is_ in real:
        command = command.replace(shown, is_) if shown else command
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=LIMIT)
    output = done.stdout
    for shown, is_ in real:
        output = output.replace(is_, shown)
    return done.returncode, output.strip("\n"), done.stderr


def main():
    page, jobs = sys.argv[1:3]
    real = [word.split("=", 1) for word in sys.argv[3:]]
    with open(page) as file:
        course = commands(file.read())
    for command, shown in course:
        end = time.monotonic() + LIMIT
        while True:
            code, output, errors = run(command, jobs, real)
            if code == 0 and re.fullmatch(pattern(shown), output):
                break
            if time.monotonic() > end or re.search(" (submit|stop) ", command):
                sys.exit(f"{page}: {command}\nends with {code} and prints\n{output}\n{errors}\n--- and not\n{shown}")
            time.sleep(0.5)
        print(f"$ {command}\n{output}")


main()
