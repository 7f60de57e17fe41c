"""Reads, without a compiler, what a crate's source files define and import, and the doc comments of files.

A file is named by its module path, `()` for the crate's root. Tests, comments and strings are left out.
"""

import pathlib
import re

CRATES = [
    "accelerator/src",
    "accelerator/collective/src",
    "accelerator/host/src",
    "accelerator/fault/src",
    "accelerator/manifest/src",
    "accelerator/nccl/src",
    "accelerator/ops/src",
    "accelerator/plan/src",
    "accelerator/track/src",
    "accelerator/tune/src",
    "launcher/jobs/src",
    "launcher/src",
]

# The folders with all Rust files of the repository.
FOLDERS = ["accelerator", "benches", "examples", "fuzz", "launcher", "tests"]

DOC = re.compile(r"\s*//[/!] ?(.*)")
# Noun clauses, which have no verb.
BARE = re.compile(r"(?:What|Whether|Of|Those|That|How|Where|Who|Whose|Which) ")


def files(root):
    """The files of a crate by module path."""
    found = {}
    for path in sorted(pathlib.Path(root).rglob("*.rs")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] in ("mod", "lib", "main"):
            parts.pop()
        if "tests" in parts:
            continue
        found[tuple(parts)] = path
    return found


def code(text):
    """The text without comments, strings, visibility paths and what is compiled for tests."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text, flags=re.S)
    text = re.sub(r"pub\(in [^)]*\)", "pub(crate)", text)
    kept, at = "", 0
    marker = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\)\]")
    while match := marker.search(text, at):
        kept += text[at : match.start()]
        at = _item_end(text, match.end())
    return kept + text[at:]


def _item_end(text, at):
    """The end of the item that begins at `at`."""
    brace, semicolon = text.find("{", at), text.find(";", at)
    is_use = re.match(r"\s*(?:pub(?:\([^)]*\))?\s+)?use\b", text[at:])
    if semicolon != -1 and (is_use or brace == -1 or semicolon < brace):
        return semicolon + 1
    return _closed(text, brace)


def _closed(text, at):
    """Behind the brace that closes the one at `at`."""
    depth = 0
    for end in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return end + 1
    return len(text)


def _inline_depths(text):
    """The spans of inline modules."""
    return [
        (match.end(), _closed(text, match.end() - 1))
        for match in re.finditer(r"\bmod\s+\w+\s*\{", text)
    ]


def _paths(tree):
    """The paths of a `use` tree."""
    tree = tree.strip()
    match = re.match(r"^([\w:]*?)(?:::)?\{(.*)\}$", tree, flags=re.S)
    if not match:
        return [re.sub(r"\s+as\s+\w+$", "", tree)]
    prefix, body = match.groups()
    parts, depth, part = [], 0, ""
    for char in body:
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += char
    nested = [path for part in parts + [part] if part.strip() for path in _paths(part)]
    return [f"{prefix}::{path}" if prefix else path for path in nested]


class Crate:
    """The imports of a crate: which file names what of which other file."""

    def __init__(self, root):
        self.files = files(root)
        self._faces = {module: {} for module in self.files}
        named = {module: self._named(module) for module in self.files}
        self.imports = {module: {} for module in self.files}
        for module, paths in named.items():
            for path in paths:
                target, name = self._resolve(path)
                # A parent that declares its child names nothing of it.
                if target != module and (name or target[: len(module)] != module):
                    self.imports[module].setdefault(target, set()).add(name)

    def _absolute(self, module, path, depth):
        segments = path.split("::")
        here = list(module)
        if segments[0] == "crate":
            return segments[1:]
        if segments[0] == "self":
            return None if depth else here + segments[1:]
        if segments[0] != "super":
            child = module + (segments[0],)
            return here + segments if child in self.files else None
        while segments and segments[0] == "super":
            if depth:
                depth -= 1
            else:
                here = here[:-1]
            segments = segments[1:]
        return here + segments

    def _named(self, module):
        """The absolute paths that a file names; those that it only hands on count where they are used."""
        text = code(self.files[module].read_text())
        inline = _inline_depths(text)
        depth = lambda at: sum(start <= at < end for start, end in inline)
        named, handed_on, spans = [], [], []
        for match in re.finditer(r"((?:pub(?:\([^)]*\))?\s+)?)\buse\s+([^;]+);", text):
            spans.append(match.span())
            for path in _paths(re.sub(r"\s+", " ", match[2])):
                target = self._absolute(module, path.strip(), depth(match.start()))
                if target is None:
                    continue
                if match[1].strip() and target[-1] != "*":
                    self._faces[module][target[-1]] = target
                    handed_on.append(target)
                else:
                    named.append(target)
        rest = text
        for start, end in reversed(spans):
            rest = rest[:start] + " " * (end - start) + rest[end:]
        for match in re.finditer(r"\b(?:crate|super|self)(?:::\w+)+", rest):
            target = self._absolute(module, match[0], depth(match.start()))
            if target:
                named.append(target)
        return named + [path for path in handed_on if re.search(rf"\b{path[-1]}\b", rest)]

    def _resolve(self, path, seen=()):
        """The file that a path leads to, through what others hand on, and the name in it."""
        for length in range(len(path), -1, -1):
            module = tuple(path[:length])
            if module not in self.files:
                continue
            rest = path[length:]
            face = self._faces[module].get(rest[0]) if rest else None
            if face and (module, rest[0]) not in seen:
                return self._resolve(face + rest[1:], seen + ((module, rest[0]),))
            return module, rest[0] if rest else ""

    def without_hidden(self, module):
        """The code of a file without the items that `#[doc(hidden)] pub mod`s of its root contain or re-export."""
        root = code(self.files[()].read_text())
        names = set()
        for match in re.finditer(r"#\[doc\(hidden\)\]\s*pub mod (\w+)\s*([;{])", root):
            names.add(match[1])
            body = root[match.end() : _closed(root, match.end() - 1)] if match[2] == "{" else ""
            for tree in re.findall(r"pub use ([^;]+);", body):
                names.update(path.split("::")[-1] for path in _paths(re.sub(r"\s+", " ", tree)))
        text = code(self.files[module].read_text())
        if not names:
            return text
        if names & set(module):
            return ""
        name = rf"(?:{'|'.join(sorted(names))})\b"
        item = re.compile(
            rf"^(?:pub (?:mod|struct|enum|trait|(?:const )?fn) {name}|impl(?:<[^>{{]*>)? (?:[^{{]* for )?{name})", re.M
        )
        kept, at = "", 0
        while match := item.search(text, at):
            kept += text[at : match.start()]
            at = _item_end(text, match.end())
        return kept + text[at:]

    def circles(self):
        """The sets of files that import one another, the largest first."""
        found = components(self.files, lambda file: self.imports[file])
        return sorted((circle for circle in found if len(circle) > 1), key=len, reverse=True)

    def module_imports(self):
        """The imports between the modules right below the root, each with the files that have it."""
        found = {}
        for file, targets in self.imports.items():
            for target, names in targets.items():
                if file and target and file[0] != target[0]:
                    shown = f"{self.files[file]} ({', '.join(sorted(names))})"
                    found.setdefault((file[0], target[0]), []).append(shown)
        return found


def components(nodes, successors):
    """The strongly connected components of a graph, by Tarjan's algorithm."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in successors(node):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in nodes:
        if node not in index:
            visit(node)
    return found


def types(root):
    """The places of each struct, enum, trait and union of a crate, by name."""
    found = {}
    for path in files(root).values():
        pattern = r"^(?:pub(?:\([^)]*\))?\s+)?(?:struct|enum|trait|union)\s+(\w+)"
        for match in re.finditer(pattern, code(path.read_text()), flags=re.M):
            found.setdefault(match[1], []).append(str(path))
    return found


def rust_files(root):
    """All Rust files of a checkout, without build folders."""
    for folder in FOLDERS:
        for path in sorted((pathlib.Path(root) / folder).rglob("*.rs")):
            if "target" not in path.relative_to(root).parts:
                yield path


def doc_comments(text):
    """The doc comments of a file, each as the numbers and texts of its lines."""
    found, in_docs = [], False
    for number, line in enumerate(text.splitlines(), 1):
        doc = DOC.match(line)
        if doc and not in_docs:
            found.append([])
        if doc:
            found[-1].append((number, doc[1]))
        in_docs = bool(doc)
    return found


def bare_openings(text):
    """The numbers and texts of the lines with which doc comments open that begin with a noun clause."""
    return [comment[0] for comment in doc_comments(text) if BARE.match(comment[0][1])]
