//! Code blocks in documentation, and what they use.

/// The visible code of each block that rustdoc compiles, without comments and the content of strings.
///
/// A block that must not compile shows how an item is not used.
pub(crate) fn compiled(docs: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut lines = docs.lines();
    while let Some(line) = lines.next() {
        let Some(info) = line.trim_start().strip_prefix("```") else {
            continue;
        };
        let code = lines
            .by_ref()
            .take_while(|line| !line.trim_start().starts_with("```"));
        let code = code
            .filter(|line| !is_hidden(line))
            .map(|line| bare(line) + "\n")
            .collect();
        if is_compiled(info) {
            blocks.push(code);
        }
    }
    blocks
}

/// The places of a name in code: what stands before it, and what after.
pub(crate) fn places<'a>(
    code: &'a str,
    name: &'a str,
) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
    let of_a_name = |char: char| char.is_alphanumeric() || char == '_';
    code.match_indices(name)
        .map(|(at, name)| (&code[..at], &code[at + name.len()..]))
        .filter(move |(before, after)| {
            !before.ends_with(of_a_name) && !after.starts_with(of_a_name)
        })
        .map(|(before, after)| (before.trim_end(), after.trim_start()))
}

fn is_compiled(info: &str) -> bool {
    info.split([',', ' ']).all(|word| {
        matches!(word, "" | "rust" | "no_run" | "should_panic") || word.starts_with("edition")
    })
}

fn is_hidden(line: &str) -> bool {
    let line = line.trim_start();
    line == "#" || line.starts_with("# ")
}

fn bare(line: &str) -> String {
    let mut bare = String::new();
    let mut in_string = false;
    let mut chars = line.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '\\' if in_string => drop(chars.next()),
            '"' => {
                in_string = !in_string;
                bare.push(char);
            }
            _ if in_string => {}
            '/' if chars.peek() == Some(&'/') => break,
            _ => bare.push(char),
        }
    }
    bare
}
