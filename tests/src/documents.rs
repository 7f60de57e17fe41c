//! The documents of this repository, and the command lines in them.

use std::fs;
use std::iter::once;
use std::path::{Path, PathBuf};

/// Returns the words of each command in the README and in `docs/` that calls `program`, which is the first word.
///
/// Only code blocks of a shell are read. Comments are left out, as is what comes before `program` in a line, such as
/// `srun`. `repository` is the folder of the README.
pub(super) fn commands(repository: &Path, program: &str) -> Vec<Vec<String>> {
    let mut commands = Vec::new();
    for document in documents(repository) {
        let text = fs::read_to_string(&document).unwrap();
        for block in shell_blocks(&text) {
            let lines = block.replace("\\\n", " ");
            commands.extend(lines.lines().filter_map(|line| call_of(program, line)));
        }
    }
    commands
}

/// Returns the README and the documents in `docs/`.
pub(super) fn documents(repository: &Path) -> Vec<PathBuf> {
    let mut documents: Vec<PathBuf> = fs::read_dir(repository.join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    documents.push(repository.join("README.md"));
    documents.sort();
    documents
}

fn shell_blocks(text: &str) -> impl Iterator<Item = &str> {
    let blocks = text.split("\n```").skip(1).step_by(2);
    blocks.filter_map(|block| {
        let (language, lines) = block.split_once('\n')?;
        let language = language.split_whitespace().next()?;
        ["sh", "console", "bash"]
            .contains(&language)
            .then_some(lines)
    })
}

fn call_of(program: &str, line: &str) -> Option<Vec<String>> {
    let line = line.split(" #").next()?.trim();
    let words = line.split_whitespace().map(|word| word.trim_matches('\''));
    let mut words = words.skip_while(|&word| word != program);
    let first = words.next()?;
    // `cargo run --bin accel-launch -- …`
    let arguments = words.skip_while(|&word| word == "--");
    Some(once(first).chain(arguments).map(str::to_owned).collect())
}
